"""What a frame's variables hold, looked at so that nothing of the script's changes.

Before Python 3.13 a function's frame has one dictionary for its variables, filled anew at each look
(PEP 667): whoever called ``locals()`` there holds the same one, and what it shows stays alive.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType

# A function whose code names one of these may hold that dictionary.
_HOLDERS = frozenset({"locals", "vars", "f_locals"})


def variables(frame: FrameType) -> dict[str, object]:
    """The frame's variables by name; none where a look could be noticed."""
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    if frame.f_trace is not None or not _HOLDERS.isdisjoint(frame.f_code.co_names):
        return {}
    found = frame.f_locals
    shown = dict(found)
    found.clear()
    return shown
