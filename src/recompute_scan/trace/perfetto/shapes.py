"""The shapes and types of operators' inputs, each different one with its number."""

from __future__ import annotations

import json
import struct

import numpy as np

from recompute_scan.arrays import true_at
from recompute_scan.trace.columns import Bool, Int32, Int64
from recompute_scan.trace.kineto.packing import Codes
from recompute_scan.trace.limits import Limits, refuse_distinct
from recompute_scan.trace.perfetto.debug_annotations import DebugAnnotations
from recompute_scan.trace.perfetto.wire import FIXED64, LENGTH, VARINT, number_at

# Where a value begins and ends, for each event.
Spanned = tuple[Int64, Int64]
# Pieces that are remembered: their bytes, and how many; values and their elements.
_LONG_PIECE, _MOST_PIECES = 4096, 10_000
_LONG_VALUE = 256
_BOOL, _UINT, _INT, _DOUBLE, _STRING, _ELEMENT = 2, 3, 4, 5, 6, 12
_DOUBLES = struct.Struct("<d")
_DEPTH = 32


class Shapes:
    """Numbers what inputs are.

    Args:
        source: The file's name, for messages.
        limits: Bounds on distinct shapes.

    Attributes:
        signatures: Code of each distinct shape, as JSON text; the first is empty.
    """

    def __init__(self, source: str, limits: Limits) -> None:
        self.signatures: dict[bytes, int] = {b"": 0}
        self._source = source
        self._limits = limits
        self._texts: dict[tuple[bytes, int], str] = {}
        self._known: dict[tuple[bytes | None, ...], int] = {}
        self._pieces = Codes()
        # Of each piece: the end of its dimensions, the beginning of its types, and the code.
        self._cuts = np.zeros((3, 0), np.int64)

    def codes(self, raw: bytes, beside: DebugAnnotations, dims: Spanned, convolves: Bool) -> Int32:
        """Code of each event's shapes; of a convolution, with the values of its inputs."""
        types = beside.spans("Input type")
        codes = np.zeros(len(convolves), np.int32)
        together = (dims[1] > 0) & (types[0] >= dims[1]) & (types[1] - dims[0] < _LONG_PIECE)
        rows = true_at(together)
        codes[rows] = self._joined(raw, rows, dims, types)
        rows = true_at(((dims[1] > 0) | (types[1] > 0)) & ~together)
        codes[rows] = self._separate(raw, rows, dims, types)
        if convolves.any():
            # What a convolution does depends on its stride and the like, not on shapes alone.
            rows = true_at(convolves)
            codes[rows] = self._separate(raw, rows, dims, types, beside.spans("Concrete Inputs"))
        return codes

    def _joined(self, raw: bytes, rows: Int64, dims: Spanned, types: Spanned) -> Int64:
        """Codes by both values and what is between them: one look-up, as nearly all are known."""
        begin, end = dims[0][rows], types[1][rows]
        if len(self._pieces) > _MOST_PIECES:
            self._pieces.clear()
            self._cuts = self._cuts[:, :0]
        known = len(self._pieces)
        look_up = map(slice, begin.tolist(), end.tolist())
        found = np.array([*map(self._pieces.__getitem__, map(raw.__getitem__, look_up))], np.int64)
        cuts = np.stack((dims[1][rows] - begin, types[0][rows] - begin, np.zeros_like(begin)))
        before = np.maximum.accumulate(np.append(known - 1, found))[:-1]
        fresh = true_at(found > before)
        cuts[2, fresh] = self._separate(raw, rows[fresh], dims, types)
        self._cuts = np.concatenate((self._cuts, cuts[:, fresh]), axis=1)
        first, second, code = self._cuts[:, found]
        codes: Int64 = code
        odd = true_at((first != cuts[0]) | (second != cuts[1]))
        codes[odd] = self._separate(raw, rows[odd], dims, types)
        return codes

    def _separate(self, raw: bytes, rows: Int64, *spans: Spanned) -> list[int]:
        """Codes by the values alone."""
        pieces = (
            [
                raw[begin:end] if end else None
                for begin, end in zip(start[rows].tolist(), stop[rows].tolist(), strict=True)
            ]
            for start, stop in spans
        )
        known = self._known
        return [known[key] if key in known else self._new(key) for key in zip(*pieces, strict=True)]

    def _new(self, key: tuple[bytes | None, ...]) -> int:
        text = b"".join(self._json(piece) for piece in key if piece is not None)
        code = self.signatures.setdefault(text, len(self.signatures))
        self._known[key] = code
        if len(self._known) > self._limits.distinct:
            raise refuse_distinct(self._source, self._limits.distinct, "input shapes")
        return code

    def _json(self, value: bytes) -> bytes:
        """A value, without its name, as Kineto's JSON has it; empty where it is broken.

        An array without elements is written as nothing at all, so nothing is one.
        """
        try:
            return self._text(value, _DEPTH).encode()
        except (ValueError, IndexError):
            return b""

    def _text(self, value: bytes, depth: int) -> str:
        text = self._texts.get((value, depth))
        if text is None:
            text = self._read(value, depth)
            if len(value) <= _LONG_VALUE and len(self._texts) < _MOST_PIECES:
                self._texts[value, depth] = text
        return text

    def _read(self, data: bytes, depth: int) -> str:
        """The value in a DebugAnnotation, which is small: one field after the other.

        Raises:
            ValueError: It is nested too deep, or has a field of no use here.
            IndexError: It ends in the middle of a field.
        """
        if not depth:
            raise ValueError("nested too deep")
        elements: list[str] = []
        at, end = 0, len(data)
        while at < end:
            tag, at = (data[at], at + 1) if data[at] < 128 else number_at(data, at)
            number, wire = tag >> 3, tag & 7
            if wire == FIXED64 and number == _DOUBLE:
                (value,) = _DOUBLES.unpack(data[at : at + 8].ljust(8, b"\0"))
                return json.dumps(value)
            value, at = (data[at], at + 1) if data[at] < 128 else number_at(data, at)
            if wire == VARINT and number in (_INT, _UINT, _BOOL):
                if number == _BOOL:
                    return "true" if value else "false"
                return str(value - (1 << 64) if number == _INT and value >> 63 else value)
            if wire != LENGTH or at + value > end:
                raise ValueError("not a value")
            piece, at = data[at : at + value], at + value
            if number == _STRING:
                return json.dumps(piece.decode(errors="replace"), ensure_ascii=False)
            if number != _ELEMENT:
                raise ValueError("not a value")
            elements.append(self._text(piece, depth - 1))
        return f"[{', '.join(elements)}]"
