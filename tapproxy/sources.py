"""What a tap is told to watch beside its traffic, as sources that can be read.

Rules here: only the addresses that the operator names are contacted. Whoever wants any of it has the host read too:
it costs a millisecond, and can't be had afterwards.
"""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

from tapproxy.config import ServeConfig
from tapproxy.core.address import is_loopback, parse_upstream
from tapproxy.core.errors import ConfigError
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.evidence.gpu import GpuReader
from tapproxy.evidence.host import HostReader
from tapproxy.evidence.scrape import EnginePage
from tapproxy.sampling import Blocking, Source


def of(config: ServeConfig) -> list[Source]:
    """The pages that were named, this host, and its cards. Raises ConfigError where a CA file cannot be read."""
    found: list[Source] = list(pages(config.engine_metrics, insecure=config.insecure, ca_file=config.upstream_ca))
    host = HostReader(config.engine_pid)
    here = "yes" if _engine_is_here(config) else "no"

    def read_host() -> Sample:
        sample = host.read()
        # What this host lacks slows an engine only where it runs here.
        sample.facts["engine_here"] = here
        return sample

    found.append(Blocking(SampleKind.HOST, host.source, read_host))
    if config.gpu:
        cards = GpuReader(lambda: host.engine_pids)
        found.append(Blocking(SampleKind.GPU, "gpu", cards.read))
    return found


def pages(urls: tuple[str, ...], *, insecure: bool = False, ca_file: object = None) -> list[EnginePage]:
    """The readers of these pages. Raises ConfigError where the CA file cannot be read."""
    verify = None
    if not insecure and any(url.startswith("https:") for url in urls):
        try:
            verify = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        except OSError as error:
            raise ConfigError(f"{str(ca_file)!r} holds no CA certificates that can be read: {error}") from None
    return [EnginePage(url, verify=verify) for url in urls]


def _engine_is_here(config: ServeConfig) -> bool:
    """A process that was named is here; else an engine on loopback is."""
    if config.engine_pid:
        return True
    hosts = [urlsplit(url).hostname or "" for url in config.engine_metrics]
    upstream = parse_upstream(config.upstream)
    hosts += [upstream.host] if upstream.host is not None else []
    return not hosts or any(map(is_loopback, hosts))
