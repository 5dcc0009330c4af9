"""A large plain file read by two processes at once, each every other stripe of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from recompute_scan.trace.columns import Int32
from recompute_scan.trace.kineto.builder import Builder
from recompute_scan.trace.kineto.layout import Separator
from recompute_scan.trace.kineto.packing import Codes, Packed, Packer
from recompute_scan.trace.kineto.second import LENGTH
from recompute_scan.trace.kineto.stripes import ODD, ReadingPlan, Share, Stripes
from recompute_scan.workers import usable_cores

# Below this one process has read the file before a second one has paid for its memory.
FROM_BYTES = 512 * 2**20
STRIPE = 2 * 2**20
# On Linux a pipe can hold a whole share, so that neither process waits for the other.
_PIPE = 1 << 20
# The way in does not look into the current folder, nor at the main module of the caller.
_START = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from recompute_scan.trace.kineto.second import main; main()"
)


def worth_it(size: int) -> bool:
    """Whether a plain file of so many bytes should be read by two processes.

    A worker that reads one rank of many leaves the other processors to the other ranks.
    """
    if size < FROM_BYTES or not sys.executable or usable_cores() < 2:
        return False
    from multiprocessing import parent_process  # noqa: PLC0415 - only large files ask

    return parent_process() is None


def count_of(data: bytearray, byte: bytes, first: int, stop: int) -> int:
    """How often a byte is in a part of a buffer: NumPy takes a fifth of `bytearray.count`.

    The second process does without: importing NumPy takes longer than it saves there.
    """
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, stop - first, first) == ord(byte)))


def read_together(
    path: Path, first: int, separator: Separator, python: bool, builder: Builder
) -> int:
    """Read the events of a plain file, but for the last few MB, with a second process.

    What comes out is what one process would have read, to the bit. Where the second process
    cannot be started, or something in the file is odd, fewer events are read.

    Args:
        path: The file.
        first: Where its first event begins.
        separator: What is between two of its events.
        python: Whether ``python_function`` events are kept.
        builder: Takes the events in.

    Returns:
        Where the first event begins that was not read.

    Raises:
        InputError: See :meth:`Builder.add`.
    """
    # The last stripe has the end of the file in it, which is not events alone.
    stripes = (path.stat().st_size - first) // STRIPE - 1
    plan = ReadingPlan(str(path.resolve()), first, STRIPE, stripes, separator, python)
    try:
        second = _start(plan)
    except OSError:
        return first
    try:
        with FileIO(path) as file:
            return _read(plan, file, builder, second)
    finally:
        second.kill()
        second.wait()
        for pipe in (second.stdin, second.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _start(plan: ReadingPlan) -> subprocess.Popen[bytes]:
    second = subprocess.Popen(  # noqa: S603 - our own module, with our own interpreter
        [sys.executable, "-c", _START, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pipesize=_PIPE,
    )
    if second.stdin is not None:
        with suppress(OSError):
            second.stdin.write(msgspec.msgpack.encode(plan))
            second.stdin.close()
    return second


def _read(
    plan: ReadingPlan, file: FileIO, builder: Builder, second: subprocess.Popen[bytes]
) -> int:
    stripes = Stripes(plan, file, builder.packer, count_of)
    translation = _Translation(builder.packer)
    try:
        for number in range(plan.stripes):
            if number % 2 == 0:
                for packed in stripes.packed(number):
                    builder.take(packed)
                continue
            share = _receive(second.stdout)
            if share is None:
                return stripes.position
            for packed in translation.translated(share):
                builder.take(packed)
            stripes.position = stripes.begin(number + 1)
    except ODD:
        pass
    return stripes.position


def _receive(pipe: IO[bytes] | None) -> Share | None:
    """The next share; ``None`` where the second process gave up."""
    if pipe is None:
        return None
    length = pipe.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    message = pipe.read(LENGTH.unpack(length)[0])
    try:
        return msgspec.msgpack.decode(message, type=Share)
    except msgspec.DecodeError:
        return None


class _Translation:
    """The second process's codes into ours, which number in the order of the file."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self._names = np.zeros(0, np.int32)
        self._threads = np.zeros(0, np.int32)
        self._signatures = np.zeros(1, np.int32)

    def translated(self, share: Share) -> Iterator[Packed]:
        """The events of the next share."""
        packer = self._packer
        self._names = _longer(self._names, packer.names, share.names)
        self._threads = _longer(self._threads, packer.threads, share.threads)
        self._signatures = _longer(self._signatures, packer.signatures, share.signatures)
        for packed in share.packed:
            yield msgspec.structs.replace(
                packed,
                name=self._names[np.frombuffer(packed.name, np.int32)].tobytes(),
                thread=self._threads[np.frombuffer(packed.thread, np.int32)].tobytes(),
                dims=self._signatures[np.frombuffer(packed.dims, np.int32)].tobytes(),
            )
        packer.left_out += share.left_out
        packer.numbering.join(*share.numbered)
        packer.after_python = share.after_python


def _longer(table: Int32, codes: Codes, keys: Sequence[Any]) -> Int32:
    return np.concatenate([table, np.array([codes[key] for key in keys], np.int32)])
