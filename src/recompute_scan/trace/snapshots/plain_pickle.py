"""A pickle of plain values, read without a class or a function in it being looked up.

:class:`pickle.Unpickler` reads it, and refuses whatever names a class, a function, an extension or
a persistent object. Before that, :mod:`pickletools` lists the opcodes, which bounds what the
unpickler alone would not:

- the number of values: so many opcodes;
- sizes: a text or number must be in the file, where the unpickler allocates first and then reads;
- the memo: places are given in order, where the unpickler makes room for the largest one;
- keys: a number has at most 64 bits, so that few can share a hash, and a tuple holds numbers alone,
  so that its hash is neither deep nor exponential. Other values that nest cannot be keys.

Nesting needs no bound: the unpickler has a stack of its own.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, NoReturn

from recompute_scan.errors import InputError
from recompute_scan.trace.limits import Limits, refuse_events

# Bits of a number of the allocator.
_LONGEST_NUMBER = 64
_NUMBERS = frozenset("BININT BININT1 BININT2 LONG1 LONG4".split())
_MEMO = frozenset("MEMOIZE BINPUT LONG_BINPUT".split())
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# The other opcodes that make texts, numbers, lists and dictionaries.
_PLAIN = frozenset(
    "PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "SHORT_BINSTRING BINGET LONG_BINGET EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS "
    "EMPTY_TUPLE".split()
)
# Those that look something up or call it.
_CODE = frozenset(
    "GLOBAL STACK_GLOBAL REDUCE BUILD INST OBJ NEWOBJ NEWOBJ_EX EXT1 EXT2 EXT4 PERSID "
    "BINPERSID".split()
)


class _Code(Exception):
    """An opcode that would run something."""


class _Misformed(Exception):
    """The bytes are no pickle of plain values: why, a part of a sentence."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise _Code("GLOBAL")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise _Code("PERSID")


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
    try:
        if not _few_and_plain(data, 10 * limits.events):
            raise refuse_events(source, limits.events)
        file = io.BytesIO(data)
        return _PlainUnpickler(file, encoding="utf-8", errors="replace").load()
    except _Misformed as wrong:
        raise refuse_snapshot(source, str(wrong)) from None
    except _Code as code:
        raise InputError(
            "E341",
            f"{source} is a pickle that runs code, and was not opened.",
            why=f"it has the opcode {code}; a memory snapshot has lists, texts and numbers only",
            hint="torch.cuda.memory._dump_snapshot(FILE) writes a snapshot; do not unpickle this "
            "file unless you know where it is from",
        ) from None
    except (
        *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError),
        *(OverflowError, MemoryError),
    ):
        raise refuse_snapshot(source, "it is cut off or damaged") from None


def refuse_snapshot(source: str, why: str) -> InputError:
    """``E342``: it is no memory snapshot."""
    return InputError(
        "E342",
        f"{source} is a pickle, but no memory snapshot.",
        why=why,
        hint="give a file that torch.cuda.memory._dump_snapshot(FILE) wrote",
    )


def _few_and_plain(data: bytes, most: int) -> bool:
    """Whether there are at most so many opcodes; others than plain ones are refused."""
    numbers, behind_mark, last = 0, False, ""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if count >= most:
            return False
        if name in _NUMBERS:
            behind_mark = last == "MARK" if not numbers else behind_mark
            numbers += 1
            if int(argument or 0).bit_length() > _LONGEST_NUMBER:
                raise _Misformed("one of its numbers is too long")
        elif name in _MEMO:
            if argument is not None and argument > count:
                raise _Misformed("it is damaged")
        else:
            if name in _TUPLES or name == "TUPLE":
                if numbers < _TUPLES.get(name, 0) or (name == "TUPLE" and not behind_mark):
                    raise _Misformed("one of its tuples holds more than numbers")
            elif name in _CODE:
                raise _Code(name)
            elif name not in _PLAIN:
                raise _Misformed(f"it has the opcode {name}, which no snapshot has")
            numbers, behind_mark = 0, False
        last = name
    return True
