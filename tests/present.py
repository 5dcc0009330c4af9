"""A value of a type that allows ``None``, where a test goes on with the value."""

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """The value itself; the test fails where there is none."""
    assert value is not None
    return value
