"""Texts that are no code: templates, lists, and pages of the documentation, each by its name.

A checkout has them where they are written, a wheel together in one file, which is two thirds as
large as they would be one by one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import zstandard

# Made by hatch_build.py.
_PACKED = "texts.zst"
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_DOCS = "docs/"


def text(name: str) -> str | None:
    """The text; ``None`` where there is none of that name.

    Args:
        name: Its path below this package, or below a checkout where it begins with ``docs/``.
    """
    packed = _packed()
    if packed is not None:
        return packed.get(name)
    path = _place(name)
    return path.read_text(encoding="utf-8") if path.is_file() else None


def names(begin: str) -> list[str]:
    """The names that begin so, up to a slash, in order."""
    packed = _packed()
    if packed is not None:
        return sorted(name for name in packed if name.startswith(begin))
    return sorted(begin + path.name for path in _place(begin).glob("*") if path.is_file())


def _place(name: str) -> Path:
    return (_ROOT if name.startswith(_DOCS) else _HERE) / name


@cache
def _packed() -> dict[str, str] | None:
    """All of them, in a wheel; ``None`` in a checkout."""
    path = _HERE / _PACKED
    if not path.is_file():
        return None
    parts = zstandard.decompress(path.read_bytes()).decode().split("\0")
    return dict(zip(parts[::2], parts[1::2], strict=True))
