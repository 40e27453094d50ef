"""Compiles the data path while a wheel is built, where a C compiler is at hand; else the wheel is pure Python.

The same source, with its types: mypyc makes C of it, which takes a third of the CPU time off a short request and a
tenth off an event. Nothing else differs, and an installation without a compiler works as well. Editable installations
stay Python, so that what one edits is what runs. TAPPROXY_COMPILE=0 turns it off, =1 makes a failure an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What runs for every event or every request. ``core.record`` stays Python: orjson writes its objects from their
# ``__dict__``, which compiled ones do not have.
MODULES = {
    "core": "body counts deltas eventlog exchange frames histogram http1 metrics sse spot tally usage",
    "tap": "acked app health ids ledger outbox relay server",
    "wire": "acks client stamps",
}
SETUP = """
from mypyc.build import mypycify
from setuptools import setup
modules = mypycify(
    ["--ignore-missing-imports", "--config-file=", *{files!r}], opt_level="3", debug_level="0", group_name="tapproxy"
)
setup(name="tapproxy-compiled", packages=[], ext_modules=modules)
"""


class CompileHook(BuildHookInterface[Any]):
    """hatchling's hook; see the module's text."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("TAPPROXY_COMPILE", "")
        if version == "editable" or wanted == "0":
            return
        self.work = tempfile.mkdtemp(prefix="tapproxy-build-")
        try:
            made = self._compile(Path(self.work))
        except (OSError, subprocess.SubprocessError, ImportError) as error:
            if wanted == "1":
                shutil.rmtree(self.work, ignore_errors=True)
                raise
            sys.stderr.write(f"tapproxy: the data path is not compiled: {error}\n")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in made:
            build_data["force_include"][str(path)] = str(path.relative_to(self.work))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(getattr(self, "work", ""), ignore_errors=True)

    def _compile(self, work: Path) -> list[Path]:
        """Builds in a copy, since mypyc leaves its products beside the sources; returns them."""
        shutil.copytree(Path(self.root) / "tapproxy", work / "tapproxy", ignore=shutil.ignore_patterns("*.so"))
        files = [f"tapproxy/{part}/{name}.py" for part, names in MODULES.items() for name in names.split()]
        (work / "setup.py").write_text(SETUP.format(files=files))
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=work, capture_output=True, text=True
        )
        if done.returncode:
            raise OSError("mypyc or the C compiler failed:\n" + (done.stdout + done.stderr)[-3000:])
        return sorted(path for path in work.glob("**/*.so") if path.relative_to(work).parts[0] != "build")
