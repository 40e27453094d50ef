"""Which tool wrote a file, and what it says. A file that is none of theirs is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import orjson

from tapproxy.core.errors import ConfigError
from tapproxy.load.importers import aiperf, guidellm, vllm_bench
from tapproxy.load.importers.imported import Imported

_EXPECTED: Final = (
    "expected a result of `vllm bench serve --save-result --save-detailed` (JSON), aiperf's profile_export.jsonl "
    "or guidellm's benchmarks.json"
)
# Files that lie beside the one that is meant, or are another tool's.
_OTHERS: Final = {
    "aiperf_aggregate": "it is aiperf's summary over all requests: give the profile_export.jsonl beside it",
    "aiperf_raw": "it is aiperf's raw export, which holds no times by its definitions: give profile_export.jsonl",
    "genai_perf": "it is GenAI-Perf's profile export, which is not read here: its successor aiperf writes one that is",
    "record": "it is a tap's own records: `import` reads the results of other tools; give the directory with --data",
    "comparison": "it is tapproxy's own comparison: `tapproxy runs` shows what is kept of it",
}


def read(path: Path, inputs: Path | None = None) -> Imported:
    """Reads a result file. ``inputs``: aiperf's inputs.json, for the fingerprints of the request bodies.

    Raises ConfigError where it cannot be read or is not one of the known files, saying what it is and what is
    expected.
    """
    objects = _objects(path, _bytes(path))
    try:
        return _parsed(objects, inputs)
    except ConfigError as error:
        raise ConfigError(f"{str(path)!r} cannot be imported: {error}") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}; {_EXPECTED}") from None


def _objects(path: Path, data: bytes) -> list[Any]:
    """The JSON values of the file: one, or one a line."""
    if not data.strip():
        raise ConfigError(f"{str(path)!r} is empty; {_EXPECTED}")
    try:
        return [_loads(data)]
    except ValueError:
        pass
    lines = [line for line in data.split(b"\n") if line.strip()]
    values = []
    for at, line in enumerate(lines, 1):
        try:
            values.append(_loads(line))
        except ValueError:
            if values and at == len(lines):
                break  # the last line of a run that was cut off
            raise ConfigError(f"{str(path)!r} is neither JSON nor JSON lines (line {at}); {_EXPECTED}") from None
    return values


def _loads(data: bytes) -> Any:
    """orjson first; Python's own reader for the NaN and Infinity that Python's own writer makes."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except RecursionError:
            raise ValueError("nested too deeply") from None


def _parsed(objects: list[Any], inputs: Path | None) -> Imported:
    if all(vllm_bench.is_one(each) for each in objects):
        return vllm_bench.parse(objects)
    if all(aiperf.is_line(each) for each in objects):
        return aiperf.parse(objects, None if inputs is None else _objects(inputs, _bytes(inputs))[0])
    if len(objects) == 1 and guidellm.is_one(objects[0]):
        return guidellm.parse(objects[0])
    raise ConfigError(_what_else(objects[0]))


def _what_else(value: Any) -> str:
    if aiperf.is_aggregate(value):
        return _OTHERS["aiperf_aggregate"]
    if aiperf.is_raw_line(value):
        return _OTHERS["aiperf_raw"]
    if isinstance(value, dict):
        schema = str(value.get("schema", ""))
        for name in ("record", "comparison"):
            if schema.startswith(f"tapproxy.{name}/"):
                return _OTHERS[name]
        if "experiments" in value:
            return _OTHERS["genai_perf"]
        keys = ", ".join(sorted(str(key) for key in value)[:6])
        return f"its keys ({keys[:80] or 'none'}) are those of no tool known here; {_EXPECTED}"
    return f"it holds a JSON {type(value).__name__} and no object; {_EXPECTED}"
