"""What an event is: the format has no category, so its annotations and its name have to tell."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from recompute_scan.trace.columns import Bool, Int8, Int64, Kind

# Ranges that torch itself opens and that are no operators.
_RANGE = re.compile(r"ProfilerStep#|Optimizer\.|nccl:|gloo:|mpi:|recompute_scan\.|enumerate\(")
_OPERATOR = re.compile(
    r"[A-Za-z_]\w*(::[A-Za-z_]\w*)+(\.\w+)?$|autograd::engine::|\w+Backward\d*$|record_param_comms$"
    r"|Torch-Compiled Region|CompiledFunction|TorchDynamo |AOTDispatcher |Pregraph bytecode|triton_"
)
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


def slice_kinds(name: Int64, names: Iterable[str], marks: Marks) -> Int8:
    """The :class:`Kind` of each slice.

    Args:
        name: Code of its name.
        names: Texts of all codes.
        marks: What is written with it.
    """
    texts = list(names)
    ranges = np.array([bool(_RANGE.match(text)) for text in texts], np.bool_)[name]
    operators = np.array([bool(_OPERATOR.match(text)) for text in texts], np.bool_)[name]
    copies = np.array([bool(_COPY.match(text)) for text in texts], np.bool_)[name]
    # Autograd numbers operators only; a range has shapes where a collective opens it.
    recorded = marks.recorded | marks.numbered
    operator = recorded & ~ranges & (marks.numbered | marks.shaped | operators)
    kinds = np.full(len(name), Kind.OTHER, np.int8)
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
STAGES = {"Kernel": Kind.KERNEL, "Memcpy": Kind.COPY, "Memset": Kind.COPY}
