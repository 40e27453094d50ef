"""The register: every run of a comparison, kept under ``DIR/runs/ID``.

Rules here: directories 0700, files 0600, named by us alone and never written through a link. A run is there as a whole
or not at all. No prompt, completion or credential is kept: of the prompts only a keyed digest, so that two runs of one
register can be told to have asked the same.

``run.json``: what was asked, over which paths, how the client fared; ``plan.json``: when what was to be sent;
``comparison.json``: the result; ``environment.json``: what ran where; ``requests.jsonl``: a line a request, its record
in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import orjson

from tapproxy import __version__
from tapproxy.core.errors import ConfigError
from tapproxy.core.record import Record
from tapproxy.core.sample import Sample
from tapproxy.load import rundiff
from tapproxy.load.plan import Slot
from tapproxy.load.redact import Redactor, texts
from tapproxy.load.sender import Result
from tapproxy.load.trial import Asked, ClientFacts, PathFacts, Scenario, Trial

# Within the class ``list`` is its method.
_Names = list[str]

SCHEMA: Final = "tapproxy.run/1"
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\Z")
_FILES: Final = ("run.json", "plan.json", "comparison.json", "environment.json")
_SAMPLES: Final = "samples.jsonl"
_PRETTY: Final = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
# Fields of a slot that hold what is asked.
_PROMPTS: Final = frozenset(("prompt", "prefix", "messages", "body"))
_KEY: Final = ".key"
_NEW: Final = ".new-"
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# The client's own keys are known to be secret, wherever they turn up.
_SECRET_VARIABLES: Final = ("OPENAI_API_KEY", "TAPPROXY_ADMIN_TOKEN", "TAPPROXY_PAIR_KEY", "HF_TOKEN")


@dataclass(frozen=True, slots=True)
class Kept:
    """One run of the register. The objects are as they were written; keys of a later version may be missing."""

    id: str
    directory: Path
    started_unix_ns: int
    version: str | None
    asked: dict[str, Any]
    paths: dict[str, Any]
    client: dict[str, Any]
    prompts_digest: str | None
    interrupted: bool
    notes: list[str]
    environment: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    comparison: dict[str, Any] = field(default_factory=dict)

    def requests(self) -> Iterator[dict[str, Any]]:
        """Every request with its record, in the plan's order; a broken line is passed over."""
        try:
            file = (self.directory / "requests.jsonl").open("rb")
        except OSError:
            return
        with file:
            for line in file:
                with contextlib.suppress(ValueError):
                    yield orjson.loads(line)

    def samples(self) -> Iterator[Sample]:
        """What the engines' pages said during the run; none where none was named. A broken line is passed over."""
        try:
            file = (self.directory / _SAMPLES).open("rb")
        except OSError:
            return
        with file:
            for line in file:
                with contextlib.suppress(ValueError, AttributeError):
                    yield Sample.from_dict(orjson.loads(line))

    def trial(self) -> Trial:
        """The run as data again, to be judged beside another; its prompts are gone. Raises ConfigError if broken."""
        try:
            read = [(bool(line["floor"]), _result(line)) for line in self.requests()]
            floor = [result for of_floor, result in read if of_floor]
            return Trial(
                id=self.id,
                started_unix_ns=self.started_unix_ns,
                asked=Asked(**{**_known(Asked, self.asked), "scenario": Scenario(self.asked["scenario"])}),
                paths={name: PathFacts(**_known(PathFacts, facts)) for name, facts in self.paths.items()},
                results=[result for of_floor, result in read if not of_floor],
                client=ClientFacts(**_known(ClientFacts, self.client)),
                floor=floor or None,
                interrupted=self.interrupted,
                notes=list(self.notes),
                environment=self.environment,
                samples=list(self.samples()),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the run {self.id!r} cannot be read: {type(error).__name__}: {error}; it was kept by another version, "
                "or is broken"
            ) from None


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of the list. ``problem``: why it cannot be read, where it cannot."""

    id: str
    started_unix_ns: int | None = None
    scenario: str | None = None
    paths: tuple[str, ...] = ()
    requests: int | None = None
    verdict: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class RemovedRuns:
    """What a purge removed and left."""

    runs: int
    size_bytes: int
    kept: int


class Register:
    """The runs of one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self.directory = data_dir / "runs"

    def refuse_unwritable(self) -> None:
        """Says before a measurement that it could not be kept, and makes nothing. Raises ConfigError."""
        there = next(each for each in (self.directory, *self.directory.absolute().parents) if os.path.exists(each))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(self._cannot(f"{str(there)!r} cannot be written into"))

    def _cannot(self, why: str) -> str:
        return f"the run cannot be kept in {str(self.directory)!r}: {why}; give --data a directory this user can write"

    def keep(self, trial: Trial, comparison: dict[str, Any], plan: dict[str, Any]) -> Path:
        """Writes a run; returns its directory.

        Raises ConfigError where the id is no name of a directory or is taken, or where nothing can be written.
        """
        if not _ID.match(trial.id):
            raise ConfigError(f"the run's id is {trial.id!r}: expected letters, digits, '.', '_' and '-', at most 80")
        target = self.directory / trial.id
        try:
            self._make()
            if target.exists() or target.is_symlink():
                raise ConfigError(f"the run {trial.id!r} is kept already in {str(self.directory)!r}")
            new = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.directory))
            try:
                for name, value in self._objects(trial, comparison, plan).items():
                    _write(new / name, [orjson.dumps(value, option=_PRETTY), b"\n"])
                _write(new / "requests.jsonl", _lines(trial))
                if trial.samples:
                    _write(new / _SAMPLES, (orjson.dumps(each.to_dict()) + b"\n" for each in trial.samples))
                new.rename(target)
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise
        except OSError as error:
            raise ConfigError(self._cannot(str(error.strerror or error))) from None
        return target

    def list(self) -> Sequence[Listed]:
        """Every run, the oldest first. Raises ConfigError where the directory cannot be read; none is no error."""
        found = [self._listed(name) for name in self._names()]
        return sorted(found, key=lambda each: (each.started_unix_ns or 0, each.id))

    def load(self, run_id: str) -> Kept:
        """One run, by its id or the beginning of one. Raises ConfigError where there is none, or several."""
        names = self._names()
        hits = [run_id] if run_id in names else [name for name in names if run_id and name.startswith(run_id)]
        if not hits:
            known = f"there are {', '.join(names[-5:])}" if names else "none are kept there"
            raise ConfigError(f"no run {run_id!r} in {str(self.directory)!r}: {known} (`tapproxy runs list`)")
        if len(hits) > 1:
            raise ConfigError(
                f"{run_id!r} is the beginning of {len(hits)} runs ({', '.join(hits[:5])}): give more of it"
            )
        return self._load(hits[0])

    def diff(self, one: str, other: str) -> dict[str, Any]:
        """What changed from ``one`` to ``other``, in settings and in numbers. Raises ConfigError as ``load`` does."""
        return rundiff.diff(self.load(one), self.load(other))

    def remove(self, before_unix_ns: int | None) -> RemovedRuns:
        """Removes the runs that began before the time given, or all of them (None).

        Only directories that hold a run of ours go, and what an interrupted ``keep`` left. Raises OSError.
        """
        runs = size_bytes = kept = 0
        for name in self._names(unfinished=before_unix_ns is None):
            path = self.directory / name
            began = None if name.startswith(_NEW) else self._listed(name).started_unix_ns
            if began is None:
                began = path.stat().st_mtime_ns
            if before_unix_ns is not None and began >= before_unix_ns:
                kept += 1
                continue
            size_bytes += sum(each.lstat().st_size for each in path.iterdir())
            shutil.rmtree(path)
            runs += not name.startswith(_NEW)
        if before_unix_ns is None and not kept:
            (self.directory / _KEY).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.directory.rmdir()
        return RemovedRuns(runs, size_bytes, kept)

    def _make(self) -> None:
        os.makedirs(self.directory.parent, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.directory.mkdir(mode=0o700)
        found = self.directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(f"{str(self.directory)!r} is there and is not a directory of this user: move it away")
        if found.st_mode & 0o077:
            self.directory.chmod(0o700)

    def _key(self) -> bytes:
        """The register's own key of the prompts' digests."""
        path = self.directory / _KEY
        with contextlib.suppress(FileExistsError):
            _write(path, [secrets.token_bytes(32)])
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            return file.read()

    def _objects(self, trial: Trial, comparison: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
        """File → what is to be in it, without what may not be kept."""
        sent = [result.slot.prompt for result in trial.results]
        prompts = texts(plan) or sent
        digest = hmac.new(self._key(), "\0".join(prompts).encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
        run = {
            "schema": SCHEMA,
            "id": trial.id,
            "started_unix_ns": trial.started_unix_ns,
            "tapproxy": __version__,
            "asked": asdict(trial.asked),
            "paths": {name: asdict(facts) for name, facts in trial.paths.items()},
            "client": asdict(trial.client),
            "prompts_digest": f"hmac-sha256:{digest}" if prompts else None,
            "interrupted": trial.interrupted,
            "notes": trial.notes,
        }
        redact = Redactor(_known_secrets(), [*prompts, *sent])
        found = {"run.json": run, "plan.json": plan, "comparison.json": comparison}
        return {name: redact.value(value) for name, value in (found | {"environment.json": trial.environment}).items()}

    def _names(self, unfinished: bool = False) -> _Names:
        try:
            with os.scandir(self.directory) as entries:
                found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(
                f"the runs in {str(self.directory)!r} cannot be read: {error.strerror or error}"
            ) from None
        runs = [name for name in found if _ID.match(name) and (self.directory / name / "run.json").is_file()]
        return sorted(runs) + [name for name in found if unfinished and name.startswith(_NEW)]

    def _listed(self, name: str) -> Listed:
        try:
            run = self._load(name)
        except ConfigError as error:
            return Listed(name, problem=str(error))
        paths = run.comparison.get("paths")
        counts = [path.get("requests") for path in paths.values()] if isinstance(paths, dict) else []
        known = [each for each in counts if isinstance(each, int)]
        verdict = run.comparison.get("verdict")
        return Listed(
            name,
            run.started_unix_ns,
            run.asked.get("scenario"),
            tuple(run.paths),
            sum(known) if known else None,
            verdict.get("verdict") if isinstance(verdict, dict) else None,
        )

    def _load(self, name: str) -> Kept:
        directory = self.directory / name
        return _kept(name, directory, {file: _read(directory / file) for file in _FILES})


def _kept(name: str, directory: Path, objects: Mapping[str, Any]) -> Kept:
    run = objects["run.json"]
    if run.get("schema") != SCHEMA:
        raise ConfigError(f"the run {name!r} is of schema {run.get('schema')!r}: expected {SCHEMA!r}")
    started = run.get("started_unix_ns")
    if not isinstance(started, int):
        raise ConfigError(f"the run {name!r} does not say when it began: its run.json is broken")
    return Kept(
        id=name,
        directory=directory,
        started_unix_ns=started,
        version=run.get("tapproxy"),
        asked=run.get("asked") or {},
        paths=run.get("paths") or {},
        client=run.get("client") or {},
        prompts_digest=run.get("prompts_digest"),
        interrupted=bool(run.get("interrupted")),
        notes=run.get("notes") or [],
        environment=objects["environment.json"],
        plan=objects["plan.json"],
        comparison=objects["comparison.json"],
    )


def _known_secrets() -> Iterator[str]:
    return filter(None, map(os.environ.get, _SECRET_VARIABLES))


def _lines(trial: Trial) -> Iterator[bytes]:
    redact = Redactor(_known_secrets())
    for floor, results in ((False, trial.results), (True, trial.floor or ())):
        for result in results:
            yield _line(result, redact, floor)


def _line(result: Result, redact: Redactor, floor: bool) -> bytes:
    """A request: its slot without the prompt, how it ended, its record."""
    slot = {name: value for name, value in _shallow(result.slot).items() if name not in _PROMPTS}
    line = {"floor": floor, **_shallow(result)}
    line["slot"] = {**slot, "prompt_chars": len(result.slot.prompt)}
    line["error"] = None if result.error is None else redact.text(result.error)[:200]
    line["record"] = result.record.to_dict()
    return orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS) + b"\n"


def _shallow(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)}


def _known(kind: Any, value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version has; a later one may have written more."""
    names = {each.name for each in fields(kind)}
    return {name: each for name, each in value.items() if name in names}


def _result(line: Mapping[str, Any]) -> Result:
    slot = Slot(**{**_known(Slot, line["slot"]), "prompt": ""})
    rest = {name: value for name, value in _known(Result, line).items() if name not in ("slot", "record")}
    return Result(slot=slot, record=Record.from_dict(line["record"]), **rest)


def _write(path: Path, parts: Iterable[bytes]) -> None:
    with open(os.open(path, _FLAGS, 0o600), "wb") as file:
        file.writelines(parts)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{str(path)!r} is not JSON: the run is broken; `tapproxy purge` removes it") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r} holds no JSON object: the run is broken; `tapproxy purge` removes it")
    return found
