"""What the tool says of a case: its trace and its compiler's records, recorded in this process."""

import logging
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._logging._internal
import torch._logging.structured
from torch.profiler import ProfilerActivity, profile, schedule

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.result import Result

from .cases import Case, Step
from .truth import PRODUCTS, Truth, measure

_STEPS, _WARMUP = 2, 3
internal: Any = torch._logging._internal
structured: Any = torch._logging.structured


@dataclass(frozen=True)
class Said:
    """The answers to one case.

    Attributes:
        by_trace: From a trace with the compiler's log beside it.
        by_log: From the folder alone that ``TORCH_TRACE`` names.
    """

    by_trace: Result
    by_log: Result


@contextmanager
def torch_trace(folder: Path) -> Iterator[None]:
    """What ``TORCH_TRACE`` does, for as long as this lasts."""
    internal.LOG_TRACE_ID_FILTER = None
    handler = internal.LazyTraceHandler(str(folder))
    handler.setFormatter(internal.TorchLogsFormatter(trace=True))
    structured.INTERN_TABLE.clear()  # or names of files that an earlier log has are not told
    log = logging.getLogger("torch.__trace")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def said_of(case: Case) -> Said:
    """The answers to the case."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as place:
        logs, folder = Path(place) / "logs", Path(place) / "traces"
        logs.mkdir()
        folder.mkdir()
        with (
            torch_trace(logs),
            warnings.catch_warnings(),
            torch._functorch.config.patch(dict(case.settings)),
        ):
            warnings.simplefilter("ignore")
            _record(case.make(case.backend), folder / "trace.json.gz")
        by_log = analyse([logs])
        (log,) = logs.glob("*.log")
        shutil.copy(log, folder)
        return Said(analyse([folder]), by_log)


def _record(step: Step, path: Path) -> None:
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=_WARMUP, active=_STEPS, repeat=1),
        record_shapes=True,
    ) as profiler:
        for _ in range(_WARMUP + _STEPS):
            step.backward(step())
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


def miscounted(result: Result, truth: Truth) -> dict[str, tuple[float, float]]:
    """Kinds of operators of which the answer has another number of recomputes, said and true.

    Inductor makes other operators of norms, so that those of ``aot_eager`` alone can be compared;
    of a backward pass that is one graph no number is said.
    """
    if result.evidence_level == "graphs":
        return {}
    said: defaultdict[str, float] = defaultdict(float)
    for family in result.families:
        said[family.kind] += family.recomputed_per_step
    for graph in result.compiled.graphs if result.compiled else ():
        for one in graph.recomputes:  # those that are free are in no family
            kind = next((kind for kind, names in _COUNTED.items() if one.operator in names), "")
            if one.free and graph.calls_per_step:
                said[kind] += one.operators * one.times * graph.calls_per_step
    true = {kind: sum(truth.again[name] for name in names) for kind, names in _COUNTED.items()}
    return {kind: (said[kind], one) for kind, one in true.items() if said[kind] != one}


def counted_otherwise(result: Result, truth: Truth) -> dict[str, tuple[float, float]]:
    """Names whose plain count inside backward passes is not the true one, per step."""
    attention = _COUNTED["attention"]
    counts = result.cross_check.counts if result.cross_check else ()
    said = {one.name.rpartition("::")[2]: one.inside / _STEPS for one in counts}
    names = [name for name in attention if name in said]
    return {
        name: (said[name], again) for name in names if (again := truth.again[name]) != said[name]
    }


def misplaced(result: Result, truth: Truth) -> dict[str, tuple[float, float]]:
    """Places of which the answer has another number of recomputed products, said and true.

    A place is a layer, where the truth has products of each region's; and a module whose products
    a compiled graph runs again by itself, where no checkpoint around it runs it again as a whole.
    """
    if result.evidence_level == "graphs":
        return {}
    wrong: dict[str, tuple[float, float]] = {}
    said: defaultdict[str, float] = defaultdict(float)
    for graph in result.compiled.graphs if result.compiled else ():
        for one in graph.recomputes:
            if one.operator in PRODUCTS and one.module is not None:
                said[one.module] += one.operators * one.times * (graph.calls_per_step or 0)
    for module, number in said.items():
        ran = sum(times for name, times in truth.modules.items() if _ends(name, module))
        if number > ran or (number < ran and not _around(result)):
            wrong[module] = (number, ran)
    layers = _layers(truth)
    if len(layers) == len(result.regions):
        for region, (layer, true) in zip(result.regions, layers.items(), strict=True):
            said_ = region.recompute_runs_per_backward
            # A policy or a budget keeps products and recomputes the rest.
            if said_ != true and (true or said_ != 1 or result.verdict != "partial"):
                wrong[layer] = (said_, true)
    return wrong


def _ends(name: str, module: str) -> bool:
    """Is it that module, by its whole name or by its name in its layer?"""
    path = name.split(".")
    layer = max((place + 1 for place, part in enumerate(path) if part.isdigit()), default=0)
    return module in (name, ".".join(path[layer:]))


def _around(result: Result) -> bool:
    """Does a checkpoint run compiled code again as a whole?"""
    return any(one.variant is not None for region in result.regions for one in region.checkpoints)


def _layers(truth: Truth) -> dict[str, float]:
    """How often the products of each layer ran again, by the most among its modules."""
    found: dict[str, float] = {}
    for module in sorted(truth.weighted, key=_natural):
        path = module.split(".")
        place = next((number for number, name in enumerate(path) if name.isdigit()), None)
        if place is not None:
            layer = ".".join(path[: place + 1])
            found[layer] = max(found.get(layer, 0), truth.modules[module])
    return found


def _natural(module: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in module.split(".")]
