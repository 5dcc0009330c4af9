"""What an event is: the format has no category, so its annotations, name or stage have to tell."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from recompute_scan.arrays import distinct
from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Kind
from recompute_scan.trace.names import OPERATOR, RANGE
from recompute_scan.trace.perfetto.interned import (
    COMPUTE_KERNEL,
    EVENT_NAME,
    GPU_SPECIFICATION,
    InternedNames,
)
from recompute_scan.trace.perfetto.messages import PackedRun, gather
from recompute_scan.trace.perfetto.wire import Spans

# Field numbers in GpuRenderStageEvent.
_EVENT_ID, _DURATION, _GPU, _QUEUE, _STAGE, _NAME, _KERNEL = 1, 2, 11, 13, 14, 20, 19
_STREAM = re.compile(r"stream 0*(\d{1,9})$")
UInt8 = npt.NDArray[np.uint8]
_COPY = re.compile(r"Mem(cpy|set)\b")


class Marks:
    """For each event, which annotations it has.

    Args:
        **has: One array for each of them.
    """

    def __init__(self, **has: Bool) -> None:
        self.python = has["python"]
        self.call = has["call"]
        self.device = has["device"]
        self.wait = has["wait"]
        self.recorded = has["recorded"]
        self.numbered = has["numbered"]
        self.shaped = has["shaped"]


# What a name tells of an event, a bit each.
_IS_RANGE, _IS_OPERATOR, _IS_COPY, CONVOLUTION = 1, 2, 4, 8


def traits(text: str) -> int:
    """What a name tells."""
    found = _IS_RANGE if RANGE.match(text) else 0
    found |= _IS_OPERATOR if OPERATOR.match(text) else 0
    found |= _IS_COPY if _COPY.match(text) else 0
    return found | (CONVOLUTION if "convolution" in text else 0)


def slice_kinds(named: UInt8, marks: Marks) -> Int8:
    """The :class:`Kind` of each slice.

    Args:
        named: The :func:`traits` of its name.
        marks: What is written with it.
    """
    ranges, operators, copies = ((named & bit) > 0 for bit in (_IS_RANGE, _IS_OPERATOR, _IS_COPY))
    # Autograd numbers operators only; a range has shapes where a collective opens it.
    recorded = marks.recorded | marks.numbered
    operator = recorded & ~ranges & (marks.numbered | marks.shaped | operators)
    kinds = np.full(len(named), Kind.OTHER, np.int8)
    for which, kind in (
        (recorded, Kind.ANNOTATION),
        (operator, Kind.OP),
        (marks.call, Kind.RUNTIME),
        (marks.device, Kind.KERNEL),
        (marks.device & copies, Kind.COPY),
        (marks.wait, Kind.OTHER),
        (marks.python, Kind.PYTHON),
    ):
        kinds[which] = kind
    return kinds


# GpuRenderStageEvent says what it is by the name of its stage.
_STAGES = {"Kernel": Kind.KERNEL, "Memcpy": Kind.COPY, "Memset": Kind.COPY}


class Stages:
    """Collects render stages.

    Attributes:
        columns: For each: time, duration (ns), kind, name, correlation, stream, GPU.
    """

    def __init__(self, names: InternedNames) -> None:
        self.columns: list[tuple[Int64, Int64, Int8, Int32, Int64, Int32, Int64]] = []
        self._names = names

    def take(self, run: PackedRun, events: Spans) -> None:
        """Take in the stages of some packets; the arguments are those of ``Slices.take``."""
        number = len(events.message)
        fields = gather(run.data, events, run.broken)
        packet = events.message

        def named(space: int, field: int) -> Int64:
            iid = fields.numbers(field, number)
            return self._names.resolve(space, run.sequence[packet], iid, run.first + packet)

        stage, queue = named(GPU_SPECIFICATION, _STAGE), named(GPU_SPECIFICATION, _QUEUE)
        name, kernel = named(EVENT_NAME, _NAME), named(COMPUTE_KERNEL, _KERNEL)
        texts = tuple(self._names.texts)
        kinds = np.array([_STAGES.get(text, Kind.OTHER) for text in texts], np.int8)
        streams = np.zeros(len(texts), np.int32)
        for code in distinct(queue).tolist():
            streams[code] = _stream(texts[code])
        duration = fields.numbers(_DURATION, number)
        named_so = np.where(name > 0, name, np.where(kernel > 0, kernel, stage))
        self.columns.append(
            (
                run.time[packet],
                duration,
                kinds[stage],
                named_so.astype(np.int32),
                fields.numbers(_EVENT_ID, number, -1),
                streams[queue],
                fields.numbers(_GPU, number),
            )
        )


def _stream(text: str) -> int:
    found = _STREAM.match(text)
    return int(found[1]) if found else -1
