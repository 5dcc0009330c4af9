"""A document of any of our types with every field in it, so that all of a reader has work."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
from msgspec import inspect


def filled(kind: type) -> bytes:
    """JSON that decodes as this type, with two items wherever there can be several."""
    return msgspec.json.encode(_value(inspect.type_info(kind), count(1), 0))


def _value(kind: inspect.Type, number: Iterator[int], depth: int) -> Any:
    match kind:
        case inspect.UnionType():
            some = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
            return _value(some[0], number, depth)
        case inspect.StructType():
            return {
                field.encode_name: _constant(field) or _value(field.type, number, depth + 1)
                for field in kind.fields
            }
        case inspect.VarTupleType() | inspect.ListType():
            times = 2 if depth < 4 else 1
            return [_value(kind.item_type, number, depth + 1) for _ in range(times)]
        case inspect.TupleType():
            return [_value(one, number, depth + 1) for one in kind.item_types]
        case inspect.DictType():
            value = _value(kind.value_type, number, depth + 1)
            is_text = isinstance(kind.key_type, inspect.StrType)
            return {f"train.py:{next(number)}" if is_text else next(number): value}
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return next(number) % 2  # where it counts the items of something, of two
        case inspect.FloatType():
            return next(number) + 0.5
        case inspect.NoneType():
            return None
        case _:
            return f"layers.{next(number)}.block"


def _constant(field: inspect.Field) -> Any:
    """What stands in every document: the name of its schema."""
    return field.default if field.name in {"schema", "format"} else None
