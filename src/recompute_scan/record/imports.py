"""Functions that wait for the import of a module, and can stop waiting.

wrapt's hooks cannot be taken back, so it gets one for each module that anybody ever waited for;
with nobody waiting that one does nothing, once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import wrapt

from recompute_scan.record.patches import Undo

_Hook = Callable[[ModuleType], None]
_waiting: dict[str, list[_Hook]] = {}


def after_import(name: str, hook: _Hook) -> Undo:
    """Call ``hook`` with the module once it is imported, or now if it is there already.

    Returns:
        What to call in order to wait no longer.
    """
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
        return lambda: None
    first = name not in _waiting
    waiting = _waiting.setdefault(name, [])
    waiting.append(hook)
    if first:
        wrapt.register_post_import_hook(lambda module: _imported(name, module), name)

    def stop() -> None:
        if hook in waiting:
            waiting.remove(hook)

    return stop


def _imported(name: str, module: ModuleType) -> None:
    for hook in _waiting.pop(name, []):
        hook(module)
