"""Text that UTF-8 cannot hold, such as file names that are none."""

from __future__ import annotations

from typing import Any


def encodable(value: Any) -> Any:
    """The same plain data, with what UTF-8 cannot hold replaced by question marks."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    return value
