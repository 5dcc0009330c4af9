"""What the tool says of a case: its trace and its compiler's records, recorded in this process."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch._functorch.config
from torch.profiler import ProfilerActivity, profile, schedule

from recompute_scan import trace as traces
from recompute_scan.analysis.answer import result_of
from recompute_scan.compiled.compiled_answer import graphs_from
from recompute_scan.compiled.structured import Record, wanted_name
from recompute_scan.result import Result

from .cases import Case, Step
from .truth import Truth, measure

_STEPS, _WARMUP = 2, 3


class Records(logging.Handler):
    """Keeps what torch's structured trace says."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "metadata", {})
        name = wanted_name(fields)
        if name is not None:
            payload = getattr(record, "payload", None)
            self.records.append(Record(name, fields, payload if isinstance(payload, str) else ""))


def said_of(case: Case) -> Result:
    """The answer to the case."""
    torch._dynamo.reset()
    records = Records()
    log = logging.getLogger("torch.__trace")
    log.addHandler(records)
    try:
        with warnings.catch_warnings(), torch._functorch.config.patch(dict(case.settings)):
            warnings.simplefilter("ignore")
            step = case.make(case.backend)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json.gz"
                _record(step, path)
                trace = traces.load(path)
    finally:
        log.removeHandler(records)
    return result_of(trace, graphs=graphs_from(records.records))


def _record(step: Step, path: Path) -> None:
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=_WARMUP, active=_STEPS, repeat=1),
        record_shapes=True,
    ) as profiler:
        for _ in range(_WARMUP + _STEPS):
            step().backward()
            profiler.step()
    profiler.export_chrome_trace(str(path))


def truth_of(case: Case) -> Truth:
    """The operators that ran again, counted as they ran under ``aot_eager``."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch._functorch.config.patch(dict(case.settings)):
        warnings.simplefilter("ignore")
        backend = "aot_eager" if case.backend == "inductor" else case.backend
        return measure(case.make(backend), case.plain())


# Families of operators of which every recompute is counted, by what the truth calls them.
_COUNTED = {
    "gemm": ("mm", "addmm", "bmm"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu",),
    "norm": ("native_layer_norm",),
}


def miscounted(result: Result, truth: Truth) -> dict[str, tuple[float, int]]:
    """Kinds of operators of which the answer has another number of recomputes, said and true.

    Inductor makes other operators of norms, so that those of ``aot_eager`` alone can be compared.
    """
    said: Counter[str] = Counter()
    for family in result.families:
        said[family.kind] += family.recomputed_per_step  # type: ignore[assignment]
    for graph in result.compiled.graphs if result.compiled else ():
        for one in graph.recomputes:  # those that are free are in no family
            kind = next((kind for kind, names in _COUNTED.items() if one.operator in names), "")
            if one.free and graph.calls_per_step:
                said[kind] += one.operators * one.times * graph.calls_per_step  # type: ignore[assignment]
    true = {kind: sum(truth.again[name] for name in names) for kind, names in _COUNTED.items()}
    return {kind: (said[kind], one) for kind, one in true.items() if said[kind] != one}
