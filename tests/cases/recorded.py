"""Each case recorded at most once per process, when a test first asks for it."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from .case import record
from .functions import FUNCTIONS
from .functions_more import MORE_FUNCTIONS
from .nesting import CASES
from .truth import Truth

BY_NAME = {case.name: case for case in (*CASES, *FUNCTIONS, *MORE_FUNCTIONS)}


@functools.cache
def recorded(name: str) -> tuple[Path, Truth]:
    """The case's trace (gzipped Kineto JSON) and its truth.

    Raises:
        KeyError: There is no such case.
    """
    case = BY_NAME[name]
    trace = _folder() / f"{name}.json.gz"
    return trace, record(case, trace)


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="recompute-scan-cases-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
