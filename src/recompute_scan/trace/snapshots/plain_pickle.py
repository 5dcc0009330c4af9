"""A pickle of plain values, read by an interpreter of our own that can make nothing else.

Of the opcodes of ``pickletools`` only those are known that make numbers, texts, lists, tuples and
dictionaries; whatever names a function, a class or an extension is refused before anything is
made of it. What is read is bounded by the number of values, by the sizes that the file gives,
and by its length, so that a file of a few bytes cannot ask for more memory than it has.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from recompute_scan.errors import InputError
from recompute_scan.trace.limits import Limits, refuse_events

# The protocols that have binary opcodes; torch writes Python's default.
_PROTOCOLS = range(2, 6)
# A number of the allocator has 8 bytes.
_LONGEST_NUMBER = 16
# Opcodes that look something up or call it, for the message.
_CODE = {
    b"c": "GLOBAL",
    b"\x93": "STACK_GLOBAL",
    b"R": "REDUCE",
    b"b": "BUILD",
    b"i": "INST",
    b"o": "OBJ",
    b"\x81": "NEWOBJ",
    b"\x92": "NEWOBJ_EX",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
    b"P": "PERSID",
    b"Q": "BINPERSID",
}


class _Misformed(Exception):
    """The bytes are no pickle of plain values: why, a part of a sentence."""


def read_plain(data: bytes, source: str, limits: Limits) -> Any:
    """The value in a pickle.

    Args:
        data: The file.
        source: Its name, for messages.
        limits: ``events`` bounds the opcodes, ten for each event.

    Raises:
        InputError: It asks for code to be run (``E341``), is no pickle of plain values
            (``E342``), or holds too much (``E313``).
    """
    reader = _Reader(data)
    try:
        value = reader.run(10 * limits.events)
    except _Misformed as wrong:
        raise refuse_snapshot(source, str(wrong)) from None
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, AttributeError, TypeError):
        raise refuse_snapshot(source, "it is cut off or damaged") from None
    except _Code as code:
        raise InputError(
            "E341",
            f"{source} is a pickle that runs code, and was not opened.",
            why=f"it has the opcode {code}; a memory snapshot has lists, texts and numbers only",
            hint="torch.cuda.memory._dump_snapshot(FILE) writes a snapshot; do not unpickle this "
            "file unless you know where it is from",
        ) from None
    except _TooMuch:
        raise refuse_events(source, limits.events) from None
    return value


def refuse_snapshot(source: str, why: str) -> InputError:
    """``E342``: it is no memory snapshot."""
    return InputError(
        "E342",
        f"{source} is a pickle, but no memory snapshot.",
        why=why,
        hint="give a file that torch.cuda.memory._dump_snapshot(FILE) wrote",
    )


class _Code(Exception):
    """An opcode that would run something."""


class _TooMuch(Exception):
    """More opcodes than may be."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, most: int) -> Any:
        data, made = self._data, _OPCODES
        for _ in range(most):
            code = data[self._at]
            self._at += 1
            if code == 0x2E:
                if len(self._stack) != 1:
                    raise _Misformed("it does not end with one value")
                return self._stack[0]
            how = made.get(code)
            if how is None:
                name = _CODE.get(bytes([code]))
                if name is not None:
                    raise _Code(name)
                raise _Misformed(f"it has the opcode 0x{code:02x}, which no snapshot has")
            how(self)
        raise _TooMuch

    def take(self, number: int) -> bytes:
        begin, end = self._at, self._at + number
        if end > len(self._data):
            raise _Misformed("it is cut off")
        self._at = end
        return self._data[begin:end]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def protocol(self) -> None:
        if self.number(1) not in _PROTOCOLS:
            raise _Misformed("its protocol is unknown")

    def frame(self) -> None:
        self.take(8)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def marked(self) -> list[Any]:
        begin = self._marks.pop()
        if begin > len(self._stack):
            raise _Misformed("it is damaged")
        found = self._stack[begin:]
        del self._stack[begin:]
        return found

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, size: int) -> None:
        self._memo[self.number(size)] = self._stack[-1]

    def get(self, size: int) -> None:
        self._stack.append(self._memo[self.number(size)])

    def long(self, size: int) -> None:
        length = self.number(size)
        if length > _LONGEST_NUMBER:
            raise _Misformed("one of its numbers is too long")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def text(self, size: int) -> None:
        self.push(self.take(self.number(size)).decode("utf-8", "replace"))

    def bytes_(self, size: int) -> None:
        self.push(self.take(self.number(size)).decode("utf-8", "replace"))

    def append(self) -> None:
        value = self._stack.pop()
        self._list().append(value)

    def appends(self) -> None:
        values = self.marked()
        self._list().extend(values)

    def _list(self) -> list[Any]:
        owner = self._stack[-1]
        if type(owner) is not list:
            raise _Misformed("it is damaged")
        return owner

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._dict()[_key(key)] = value

    def set_items(self) -> None:
        values = self.marked()
        owner = self._dict()
        for at in range(0, len(values) - 1, 2):
            owner[_key(values[at])] = values[at + 1]

    def _dict(self) -> dict[Any, Any]:
        owner = self._stack[-1]
        if type(owner) is not dict:
            raise _Misformed("it is damaged")
        return owner

    def tuple_of(self, number: int) -> None:
        if number > len(self._stack):
            raise _Misformed("it is damaged")
        begin = len(self._stack) - number
        self._stack[begin:] = [tuple(self._stack[begin:])]


def _key(value: Any) -> str | int:
    if type(value) not in (str, int):
        raise _Misformed("a key is neither a text nor a number")
    found: str | int = value
    return found


_Step = Callable[[_Reader], None]
_OPCODES: dict[int, _Step] = {
    0x80: _Reader.protocol,
    0x95: _Reader.frame,
    ord("("): _Reader.mark,
    0x94: _Reader.memoize,
    ord("q"): lambda reader: reader.put(1),
    ord("r"): lambda reader: reader.put(4),
    ord("h"): lambda reader: reader.get(1),
    ord("j"): lambda reader: reader.get(4),
    ord("N"): lambda reader: reader.push(None),
    0x88: lambda reader: reader.push(True),
    0x89: lambda reader: reader.push(False),
    ord("J"): lambda reader: reader.push(int.from_bytes(reader.take(4), "little", signed=True)),
    ord("K"): lambda reader: reader.push(reader.number(1)),
    ord("M"): lambda reader: reader.push(reader.number(2)),
    0x8A: lambda reader: reader.long(1),
    0x8B: lambda reader: reader.long(4),
    ord("G"): lambda reader: reader.push(struct.unpack(">d", reader.take(8))[0]),
    0x8C: lambda reader: reader.text(1),
    ord("X"): lambda reader: reader.text(4),
    0x8D: lambda reader: reader.text(8),
    ord("C"): lambda reader: reader.bytes_(1),
    ord("U"): lambda reader: reader.bytes_(1),
    ord("]"): lambda reader: reader.push([]),
    ord("a"): _Reader.append,
    ord("e"): _Reader.appends,
    ord("}"): lambda reader: reader.push({}),
    ord("s"): _Reader.set_item,
    ord("u"): _Reader.set_items,
    ord(")"): lambda reader: reader.push(()),
    ord("t"): lambda reader: reader.push(tuple(reader.marked())),
    0x85: lambda reader: reader.tuple_of(1),
    0x86: lambda reader: reader.tuple_of(2),
    0x87: lambda reader: reader.tuple_of(3),
}
