"""``python -m tapproxy.simulate``: the simulated engine without the rest of tapproxy.

Every setting of ``SimConfig`` is a flag of the same name. Exit codes: 0 ended by a signal, 2 a bad flag,
3 the address cannot be listened on.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NoReturn

from tapproxy.simulate.config import SimConfig, SimConfigError, flag
from tapproxy.simulate.run import CannotListen, run

_TYPES = {"str": str, "int": int, "float": float, "Path": Path}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{message}\n")
        raise SystemExit(2)


def _parser() -> _Parser:
    parser = _Parser(prog="python -m tapproxy.simulate", allow_abbrev=False)
    for field in dataclasses.fields(SimConfig):
        option = flag(field.name)
        kind = str(field.type).partition(" ")[0]
        if kind == "bool":
            parser.add_argument(option, dest=field.name, action="store_true")
        else:
            parser.add_argument(option, dest=field.name, type=_TYPES[kind], default=field.default)
    return parser


def main(arguments: list[str] | None = None) -> int:
    try:
        return run(SimConfig(**vars(_parser().parse_args(arguments))))
    except SimConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except CannotListen as error:
        sys.stderr.write(f"{error}\n")
        return 3


if __name__ == "__main__":
    sys.exit(main())
