"""Attributes of other people's classes and modules, replaced for a time and put back exactly.

Functions that wait for the import of a module can stop waiting. wrapt's hooks cannot be taken back,
so it gets one for each module that anybody ever waited for; with nobody waiting that one does
nothing, once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt
from msgspec import Struct

Undo = Callable[[], None]
_NOT_ITS_OWN = object()


class _Replaced(Struct, eq=False):
    owner: Any
    name: str
    before: Any
    value: Any

    def undo(self) -> None:
        _REPLACED.remove(self)
        if vars(self.owner).get(self.name) is not self.value:
            # Replaced once more: if by us, what that one puts back is not this.
            for later in _REPLACED:
                same = later.owner is self.owner and later.name == self.name
                if same and later.before is self.value:
                    later.before = self.before
        elif self.before is _NOT_ITS_OWN:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


_REPLACED: list[_Replaced] = []


class Patches:
    """What was replaced so far; :meth:`undo` puts all of it back, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; what :meth:`undo` restores is the owner's own entry, or none.

        Whoever replaces it again while ours is there keeps theirs, with ours inside.
        """
        replaced = _Replaced(owner, name, vars(owner).get(name, _NOT_ITS_OWN), value)
        setattr(owner, name, value)
        _REPLACED.append(replaced)
        self._undo.append(replaced.undo)

    def add(self, undo: Undo) -> None:
        """Something else to call when all is put back."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()


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
