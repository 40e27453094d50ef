"""Stages a path with one known fault, runs a load over it and over its healthy neighbours, and draws the conclusion.

    direct   client → engine
    tap      client → inner tap → engine
    nginx    client → outer tap → nginx as the scenario has it → inner tap → engine
    fixed    client → outer tap → nginx with the recommended settings → inner tap → engine

This module puts parts together; the numbers come from load, diagnose and core. Rules here: everything listens on a
free loopback port and lives in a private directory; whatever was started is stopped and whatever was written is
removed, also when the run is cut short at any point; what had been measured by then is kept.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tapproxy import __version__
from tapproxy.core import metrics, stats
from tapproxy.core.errors import MeasureError
from tapproxy.core.record import Ended, Record
from tapproxy.diagnose import causes, pairing
from tapproxy.load import compare, plan, sender
from tapproxy.nginx import rules, sandbox
from tapproxy.simulate import child
from tapproxy.store import read_records
from tapproxy.wire.fetch import Client
