"""Configuration files as flat settings with lines: YAML, JSON, TOML."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import msgspec

from recompute_scan.errors import how_to_add
from recompute_scan.frameworks.configuration import Setting, truthy
from recompute_scan.lint.said import Unreadable
from recompute_scan.project_file import refuse_long_keys

_MOST = 20_000
_DEEPEST = 50


def read_settings(text: str, suffix: str) -> list[Setting]:
    """Every scalar of the file; of several YAML documents, all.

    Raises:
        Unreadable: It is not what its name says, or PyYAML is not installed.
    """
    if suffix in (".yaml", ".yml"):
        return _yaml(text)
    try:
        if suffix == ".toml":
            refuse_long_keys(text)
        decode = msgspec.json.decode if suffix == ".json" else msgspec.toml.decode
        data = decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unreadable(f"it is no {suffix[1:].upper()} ({type(error).__name__})") from None
    except ImportError:
        raise Unreadable("TOML needs tomli before Python 3.11") from None
    return [Setting(path, value, text) for path, value in _flat(data, (), _budget())]


def _budget() -> Iterator[int]:
    return iter(range(_MOST))


def _flat(
    data: Any, path: tuple[str, ...], budget: Iterator[int]
) -> Iterator[tuple[tuple[str, ...], object]]:
    if next(budget, None) is None or len(path) > _DEEPEST:
        raise Unreadable("it holds too much")
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _flat(value, (*path, str(key)), budget)
    elif isinstance(data, list):
        for value in data:
            yield from _flat(value, (*path, "[]"), budget)
    else:
        yield path, data


def _yaml(text: str) -> list[Setting]:
    try:
        import yaml  # noqa: PLC0415 - an extra
    except ImportError:
        raise Unreadable(f"YAML needs PyYAML; {how_to_add('lint')}") from None
    try:
        found: list[Setting] = []
        budget = _budget()
        # PyYAML counts ends of lines that editors do not.
        ends = [hit.start() for hit in re.finditer("\n", text)]
        for root in yaml.compose_all(text, Loader=yaml.SafeLoader):
            found += _nodes(root, (), budget, ends)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise Unreadable(f"it is no YAML ({type(error).__name__})") from None
    return found


def _nodes(
    node: Any, path: tuple[str, ...], budget: Iterator[int], ends: list[int]
) -> Iterator[Setting]:
    # Aliases are met again here, so the budget bounds what they expand to.
    if next(budget, None) is None or len(path) > _DEEPEST:
        raise Unreadable("it holds too much")
    if node is None:
        return
    if node.id == "mapping":
        for key, value in node.value:
            name = str(key.value) if key.id == "scalar" else "?"
            if value.id == "scalar":
                if next(budget, None) is None:
                    raise Unreadable("it holds too much")
                at = bisect_left(ends, key.start_mark.index) + 1
                yield Setting((*path, name), _scalar(value), at)
            else:
                yield from _nodes(value, (*path, name), budget, ends)
    elif node.id == "sequence":
        for value in node.value:
            yield from _nodes(value, (*path, "[]"), budget, ends)
    else:
        yield Setting(path, _scalar(node), bisect_left(ends, node.start_mark.index) + 1)


def _scalar(node: Any) -> object:
    kind = node.tag.rpartition(":")[2]
    if kind == "bool":
        return truthy(node.value)
    return None if kind == "null" else node.value
