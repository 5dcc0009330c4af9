"""The second process: packs every other stripe of a large file and writes them to its output.

It is started by :mod:`recompute_scan.trace.kineto.together`, reads its plan from the input, and
imports as little as it can.
"""

from __future__ import annotations

import struct
import sys
from contextlib import suppress
from io import FileIO
from itertools import islice
from typing import BinaryIO

import msgspec

from recompute_scan.trace.health import Numbering
from recompute_scan.trace.kineto.packing import Packer
from recompute_scan.trace.kineto.stripes import ODD, ReadingPlan, Share, Stripes

# Before each share stands its length.
LENGTH = struct.Struct("=Q")


def main() -> None:
    """Pack the odd stripes of the plan, in order, until one is not as it should be."""
    plan = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ReadingPlan)
    with FileIO(plan.path) as file, suppress(*ODD):
        share(plan, file, sys.stdout.buffer)


def share(plan: ReadingPlan, file: FileIO, output: BinaryIO) -> None:
    """Write the shares of all odd stripes.

    Raises:
        ODD: A stripe is not as it should be; those before it were written.
    """
    packer = Packer(plan.python, health={})
    stripes = Stripes(plan, file, packer)
    known = 0, 0, len(packer.signatures)
    for number in range(1, plan.stripes, 2):
        left_out = packer.left_out
        packer.numbering = Numbering()
        packed = list(stripes.packed(number))
        names, threads, signatures = (
            list(islice(codes, first, None))
            for codes, first in zip(
                (packer.names, packer.threads, packer.signatures), known, strict=True
            )
        )
        known = len(packer.names), len(packer.threads), len(packer.signatures)
        message = msgspec.msgpack.encode(
            Share(
                packed=packed,
                names=names,
                threads=threads,
                signatures=signatures,
                left_out=packer.left_out - left_out,
                numbered=(packer.numbering.events, packer.numbering.numbers),
                after_python=packer.after_python,
            )
        )
        output.write(LENGTH.pack(len(message)))
        output.write(message)
        output.flush()


if __name__ == "__main__":
    main()
