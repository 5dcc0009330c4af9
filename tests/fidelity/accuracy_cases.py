"""The recorded cases, trained with their checkpoints and without, and compared.

The truth is the gradients and the buffers of the same training without checkpoints. torch's are
taken out wherever a module has bound them; where a case brings functions of its own, its model is
trained as it is. The case's own oracle says whether nothing was recomputed then; where something
was, there is no truth, and that is said.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recompute_scan.record.checkpoint_calls import Probe
from tests.cases.case import Build, Case
from tests.cases.frameworks import under
from tests.cases.model import Oracle
from tests.fidelity.compare import wrong
from tests.fidelity.truth import distance, seed

# Beyond rounding: of a gradient's norm.
_WRONG = 1e-3
Gradients = list[torch.Tensor | None]
Source = Literal["checkpoints taken out", "the plain model", "none"]


@dataclass(frozen=True)
class Compared:
    """One case.

    Attributes:
        apart: Largest distance of a gradient, or of a buffer behind the step, from that without
            checkpoints; ``None`` without truth.
        source: Where the truth is from.
        said: What is said to be wrong, one text each.
        recomputes: How many were compared.
        untold: Why some were not.
    """

    apart: float | None
    source: Source
    said: list[str]
    recomputes: int
    untold: tuple[str, ...]

    @property
    def wrong(self) -> bool:
        """Whether more than rounding lies between."""
        return self.apart is not None and self.apart > _WRONG

    @property
    def right(self) -> bool:
        """Whether what is said is what the gradients say; nothing may be said without truth."""
        return bool(self.said) == self.wrong


def look_at(case: Case) -> Compared:
    """Train the case's first step with checkpoints and without, and compare its second one."""
    apart, source = _truth(case)
    said, recomputes, untold = _said(case)
    return Compared(apart, source, said, recomputes, untold)


def _truth(case: Case) -> tuple[float | None, Source]:
    with_, _ = _gradients(case.build)
    for source, build, without in _references(case):
        with without():
            gradients, recomputes = _gradients(build)
        if gradients and not recomputes and _alike(with_, gradients):
            return max(map(distance, with_, gradients)), source
    return None, "none"


def _references(
    case: Case,
) -> Iterator[tuple[Source, Build, Callable[[], contextlib.AbstractContextManager[Any]]]]:
    yield "checkpoints taken out", case.build, taken_out
    if case.build.__qualname__.partition(".")[0] in ("under", "some_layers"):
        yield "the plain model", under(), contextlib.nullcontext


def _alike(some: Gradients, others: Gradients) -> bool:
    shapes = [[None if one is None else one.shape for one in each] for each in (some, others)]
    return shapes[0] == shapes[1]


def _gradients(build: Build) -> tuple[Gradients, int]:
    """The gradients when the optimizers make their steps, then all buffers, and how much was
    recomputed.
    """
    found: Gradients = []
    places: list[tuple[nn.Module, str]] = []

    def keep(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            found.extend(
                None if one.grad is None else one.grad.detach().clone() for one in group["params"]
            )

    def place(module: nn.Module, name: str, buffer: object) -> None:
        places.append((module, name))

    oracle = Oracle()
    hooks = [
        register_optimizer_step_pre_hook(keep),
        register_module_buffer_registration_hook(place),
    ]
    try:
        seed()
        step = build(oracle, torch.device("cpu"))
        oracle.reset()
        seed()
        step()
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        found += [module._buffers.get(name) for module, name in places]
    return found, sum(n for (*_, kind), n in oracle.entries.items() if kind == "recomputes")


def _said(case: Case) -> tuple[list[str], int, tuple[str, ...]]:
    seed()
    probe = Probe(Path.cwd())
    probe.install()
    try:
        step = case.build(Oracle(), torch.device("cpu"))
        probe.begin()
        step()  # what runs in the first step only, such as setting up optimizers and shards
        probe.comparison.compare()
        step()
        found = probe.comparison.compared()
    finally:
        probe.remove()
    assert probe.warnings == []
    untold = {why: None for region in found.regions for why in region.untold}
    return wrong(found), sum(region.recomputes for region in found.regions), tuple(untold)


@contextlib.contextmanager
def taken_out() -> Iterator[None]:
    """torch's checkpoints call what they are given, and nothing else."""
    originals = {
        torch.utils.checkpoint.checkpoint: _call,
        torch.utils.checkpoint._checkpoint_without_reentrant_generator: _nothing_around,
    }
    changed: list[tuple[Any, str, Any]] = []
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            with contextlib.suppress(TypeError):
                if value in originals:
                    changed.append((module, name, value))
                    setattr(module, name, originals[value])
    torch.utils.checkpoint.CheckpointFunction.apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.utils.checkpoint.CheckpointFunction.apply  # inherited again
        for module, name, value in changed:
            setattr(module, name, value)


_OPTIONS = (
    "use_reentrant",
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for name in _OPTIONS:
        kwargs.pop(name, None)
    return function(*args, **kwargs)


def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return function(*args)
