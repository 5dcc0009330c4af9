"""Each case recorded once, when a test first asks for it; processes of one test run share it."""

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from pathlib import Path

from . import SHARED
from .case import record
from .functions import FUNCTIONS
from .functions_more import MORE_FUNCTIONS
from .functions_others import OTHERS
from .nesting import CASES
from .truth import Truth, read_truth, write_truth

BY_NAME = {case.name: case for case in (*CASES, *FUNCTIONS, *MORE_FUNCTIONS, *OTHERS)}


@functools.cache
def recorded(name: str) -> tuple[Path, Truth]:
    """The case's trace (gzipped Kineto JSON) and its truth.

    Raises:
        KeyError: There is no such case.
    """
    case, place = BY_NAME[name], _folder() / name
    if not place.exists():
        made = Path(tempfile.mkdtemp(dir=_folder()))
        write_truth(made / "truth.json", record(case, made / f"{name}.json.gz"))
        # It appears whole. Where another process was first, that one's is taken.
        with contextlib.suppress(OSError):
            made.rename(place)
    return place / f"{name}.json.gz", read_truth(place / "truth.json")


@functools.cache
def _folder() -> Path:
    if shared := os.environ.get(SHARED):
        return Path(shared)
    folder = Path(tempfile.mkdtemp(prefix="recompute-scan-cases-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
