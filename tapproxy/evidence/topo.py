"""The matrix of ``nvidia-smi topo -m``: how the cards of a host reach one another.

Rules here: the text is read as it was printed, colours or not; what is no matrix is said. Whether pipeline parallelism
would do better than tensor parallelism is not concluded here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tapproxy.core.sample import Sample, SampleKind
from tapproxy.evidence import procfs

_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
_LINK: Final = re.compile(r"NV(\d+)")
_CARD: Final = re.compile(r"GPU\d+")
# From near to far, as nvidia-smi's own legend has it: one switch, several, a host bridge, the socket's links, further.
_WAYS: Final = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
_MOST_BYTES: Final = 1 << 20


def read(
    path: Path,
    *,
    boot_id: str | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
    unix_ns: Callable[[], int] = time.time_ns,
) -> Sample:
    """One sample of kind launch: ``nvlink`` (1 where every pair of cards has links), ``nvlink_weakest``, the
    links of the weakest pair, ``gpus``, the host's cards; the worst way between two as a fact. Never raises.
    """
    sample = Sample(SampleKind.LAUNCH, f"topology {path.name}", 0, 0, procfs.boot_id() if boot_id is None else boot_id)
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        sample.problem = f"the topology {path.name} cannot be read: {error.strerror}"
    else:
        _tell(sample, matrix(text))
    sample.t_mono_ns, sample.t_unix_ns = now_ns(), unix_ns()
    return sample


def matrix(text: str) -> dict[tuple[str, str], str]:
    """(card, card) → the way between them, of every pair once."""
    header: Sequence[str] = ()
    found: dict[tuple[str, str], str] = {}
    for line in _ANSI.sub("", text).splitlines():
        words = line.split()
        cards = [word for word in words if _CARD.fullmatch(word)]
        if not header:
            # The header begins with the first card; a row begins with one and goes on with ways.
            if len(cards) >= 1 and words[: len(cards)] == cards and not line[:1].strip():
                header = cards
            continue
        if words and _CARD.fullmatch(words[0]) and len(words) > len(header):
            for card, way in zip(header, words[1:], strict=False):
                if card != words[0] and way != "X" and (card, words[0]) not in found:
                    found[words[0], card] = way
    return found


def _tell(sample: Sample, found: dict[tuple[str, str], str]) -> None:
    if not found:
        sample.problem = f"{sample.source} holds no matrix of two cards or more: save the output of nvidia-smi topo -m"
        return
    links = [_LINK.fullmatch(way) for way in found.values()]
    sample.values["gpus"] = len({card for pair in found for card in pair})
    sample.values["nvlink"] = float(all(links))
    sample.values["nvlink_weakest"] = min(int(link[1]) if link is not None else 0 for link in links)
    sample.facts["worst_way"] = max(found.values(), key=_far)
    sample.facts["cards"] = " ".join(sorted({card for pair in found for card in pair}))


def _far(way: str) -> int:
    return 0 if _LINK.fullmatch(way) else _WAYS.index(way) if way in _WAYS else len(_WAYS)
