"""Attributes of other people's classes and modules, replaced for a time and put back exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]
_NOT_ITS_OWN = object()


class Patches:
    """What was replaced so far; :meth:`undo` puts all of it back, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; what :meth:`undo` restores is the owner's own entry, or none.

        Whoever replaces it again while ours is there keeps theirs, with ours inside.
        """
        before = vars(owner).get(name, _NOT_ITS_OWN)
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name) is not value:
                return
            if before is _NOT_ITS_OWN:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def add(self, undo: Undo) -> None:
        """Something else to call when all is put back."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
