"""What the GPU did, where it is written as render stages (``gpu_render_stage_event``)."""

from __future__ import annotations

import re

import numpy as np

from recompute_scan.trace.columns import Int8, Int32, Int64, Kind
from recompute_scan.trace.perfetto.interned import (
    COMPUTE_KERNEL,
    EVENT_NAME,
    GPU_SPECIFICATION,
    InternedNames,
)
from recompute_scan.trace.perfetto.kinds import STAGES
from recompute_scan.trace.perfetto.wire import Fields, PackedRun

# Field numbers in GpuRenderStageEvent.
_EVENT_ID, _DURATION, _GPU, _QUEUE, _STAGE, _NAME, _KERNEL = 1, 2, 11, 13, 14, 20, 19
_STREAM = re.compile(r"stream 0*(\d{1,9})$")


class Stages:
    """Collects render stages.

    Attributes:
        columns: For each: time, duration (ns), kind, name, correlation, stream, GPU.
    """

    def __init__(self, names: InternedNames) -> None:
        self.columns: list[tuple[Int64, Int64, Int8, Int32, Int64, Int32, Int64]] = []
        self._names = names

    def take(self, run: PackedRun, events: Fields) -> None:
        """Take in the stages of some packets; the arguments are those of ``Slices.take``."""
        number = len(events.message)
        fields = run.gather(events)
        packet = events.message

        def named(space: int, field: int) -> Int64:
            iid = fields.numbers(field, number)
            return self._names.resolve(space, run.sequence[packet], iid, run.first + packet)

        stage, queue = named(GPU_SPECIFICATION, _STAGE), named(GPU_SPECIFICATION, _QUEUE)
        name, kernel = named(EVENT_NAME, _NAME), named(COMPUTE_KERNEL, _KERNEL)
        texts = tuple(self._names.texts)
        kinds = np.array([STAGES.get(text, Kind.OTHER) for text in texts], np.int8)
        streams = np.array([_stream(text) for text in texts], np.int32)
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
