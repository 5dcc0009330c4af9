"""How far a long piece of work has come, for whoever shows that to a person.

Who works says it with :func:`telling`; who shows it asks :func:`how_far` when it draws. Nothing is
called in between, so that the work itself gets no slower.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

_shares: list[Callable[[], float]] = []


@contextmanager
def telling(share: Callable[[], float]) -> Iterator[None]:
    """While the body runs, ``share`` gives how much of the work is done, from 0 to 1.

    It may be called from another thread, and may raise ``OSError`` or ``ValueError`` where it does
    not know.
    """
    _shares.append(share)
    try:
        yield
    finally:
        _shares.remove(share)


@contextmanager
def reading(file: IO[bytes]) -> Iterator[None]:
    """While the body runs, the share is that of the file's bytes that have been read."""
    size = max(1, os.fstat(file.fileno()).st_size)
    with telling(lambda: os.lseek(file.fileno(), 0, os.SEEK_CUR) / size):
        yield


def how_far() -> float | None:
    """The share of the innermost work that is done, from 0 to 1; ``None`` where it is not known."""
    with suppress(IndexError, OSError, ValueError):
        return min(1.0, max(0.0, _shares[-1]()))
    return None
