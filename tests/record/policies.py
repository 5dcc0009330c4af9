"""What policies of selective checkpoints decide, as `run` sees it, beside a count of its own.

The truth is counted by two dispatch modes of this file: one inside the checkpointed function sees
what is called there, one around everything what really runs.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from recompute_scan.findings.base import NotApplicable
from recompute_scan.findings.registry import RULES
from recompute_scan.record.checkpoint_calls import Probe
from recompute_scan.record.isolation import Guard
from recompute_scan.result.fidelity import Policies

aten = torch.ops.aten
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
MM, ADDMM, GELU = "aten.mm.default", "aten.addmm.default", "aten.gelu.default"
ROWS, WIDTH = 8, 16
Body = Callable[[torch.Tensor], torch.Tensor]


class _Counts(TorchDispatchMode):
    """Counts operators by the phase that the region is in, and bytes of results by operator."""

    def __init__(self, truth: Truth, where: str) -> None:
        super().__init__()
        self._truth, self._where = truth, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        phase = self._truth.phase
        if phase and func not in SAC_IGNORED_OPS:
            self._truth.counts[self._where, phase[-1], str(func)] += 1
            given = {arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            new = isinstance(out, torch.Tensor) and out.data_ptr() not in given
            if self._where == "inside" and new:
                size = out.numel() * out.element_size()
                self._truth.sizes[phase[-1], str(func)] += size
        return out


@dataclass
class Truth:
    """What the two modes have counted."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    sizes: Counter[tuple[str, str]] = field(default_factory=Counter)
    phase: list[str] = field(default_factory=list)

    def met(self) -> dict[str, int]:
        """Calls in the forward, by operator."""
        found = {n: c for (w, p, n), c in self.counts.items() if (w, p) == ("inside", "forward")}
        return dict(found)

    def recomputed(self, name: str) -> int:
        """Calls that really ran in recomputes."""
        return self.counts["outside", "recompute", name]

    def served(self, name: str) -> int:
        """Calls in recomputes that did not run."""
        return self.counts["inside", "recompute", name] - self.recomputed(name)


@dataclass(frozen=True)
class Case:
    """A policy, what it is to keep, and the rules that are to speak of it.

    Attributes:
        name: In the table.
        policy: What ``create_selective_checkpoint_contexts`` gets.
        keeps: How many calls of which operators are kept, of ``blocks`` calls.
        findings: Codes, in order.
        body: What is checkpointed.
    """

    name: str
    policy: Any
    keeps: dict[str, int]
    findings: tuple[str, ...] = ()
    body: str = "mlp"
    blocks: int = 3


def _by(*operators: Any) -> Callable[..., Any]:
    kept = set(operators)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return SAVE if op in kept else AGAIN

    return policy


class _Stateful:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is aten.mm.default:
            self.calls += 1
            return SAVE if self.calls % 2 else AGAIN
        return AGAIN


def _given(kept: Any, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return SAVE if op in kept else AGAIN


def _as_bool(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return op is aten.mm.default


def _must_not(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return CheckpointPolicy.MUST_RECOMPUTE


def _by_packet(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return SAVE if op.overloadpacket in (aten.mm, aten.bmm) else AGAIN


CASES = (
    Case("list", [aten.mm.default], {MM: 6}),
    Case("list of two", [aten.mm.default, aten.gelu.default], {MM: 6, GELU: 3}),
    Case("list with duplicates", [aten.mm.default] * 2, {MM: 6}),
    Case("list, one never met", [aten.mm.default, aten.bmm.default], {MM: 6}, ("RS502",)),
    Case("list, none met", [aten.bmm.default], {}, ("RS501",)),
    Case("empty list", [], {}, ("RS501",)),
    Case("function", _by(aten.mm.default), {MM: 6}),
    Case("function, packet", _by(aten.mm), {}, ("RS501",)),
    Case("function, packet among others", _by(aten.mm, aten.gelu.default), {GELU: 3}, ("RS502",)),
    Case("function asks for packets", _by_packet, {MM: 6}),
    Case("function gives booleans", _as_bool, {MM: 6}),
    Case("must recompute", _must_not, {}, ("RS501",)),
    Case("partial", functools.partial(_given, {aten.gelu.default}), {GELU: 3}),
    Case("lambda", lambda ctx, op, *a, **k: SAVE if op is aten.mm.default else AGAIN, {MM: 6}),
    Case("stateful object", _Stateful(), {MM: 3}),
    Case("last result kept", _by(aten.mul.Tensor), {"aten.mul.Tensor": 3}, ("RS504",), "last"),
    Case("experts", [aten.mm.default], {MM: 12}, (), "experts"),
    Case("profiler ranges inside", [aten.mm.default], {MM: 6}, (), "ranges"),
    Case("view kept", _by(aten.t.default), {"aten.t.default": 6}),
)


def _bodies(weights: list[torch.Tensor]) -> dict[str, Body]:
    first, second, gate, other = weights

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.gelu(x @ first.t()) @ second.t())

    def last(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ first) * 2.0

    def experts(x: torch.Tensor) -> torch.Tensor:
        """Rows go where the data says: how many each expert gets is not known before."""
        chosen = (x @ gate).argmax(-1) % 2
        out = torch.zeros_like(x)
        for number, weight in enumerate((first, second)):
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, torch.tanh(x[rows] @ weight))
        return torch.tanh(out @ other)

    def ranges(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("inside"):
            return mlp(x)

    return {"mlp": mlp, "last": last, "experts": experts, "ranges": ranges}


def watch(case: Case, folder: Path) -> tuple[Policies, Truth, list[torch.Tensor]]:
    """One step of a case under our watch: what it saw, the truth, and the gradients."""
    probe = Probe(folder, Guard())
    probe.install()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            probe.policies.begin()
            truth, gradients = step(case)
            found = probe.policies.end()
    finally:
        probe.remove()
    assert found is not None and not probe.warnings, probe.warnings
    return found, truth, gradients


def step(case: Case) -> tuple[Truth, list[torch.Tensor]]:
    """A forward and a backward pass of a case: its truth and its gradients."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(4)]
    body, truth = _bodies(weights)[case.body], Truth()
    context = functools.partial(create_selective_checkpoint_contexts, case.policy)
    x = torch.randn(ROWS, WIDTH)
    with _Counts(truth, "outside"):
        for _ in range(case.blocks):
            x = checkpoint(_phased(body, truth), x, use_reentrant=False, context_fn=context)
        x.sum().backward()
    return truth, [weight.grad for weight in weights if weight.grad is not None]


def _phased(body: Body, truth: Truth) -> Body:
    runs: list[None] = []

    def phased(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        truth.phase.append("forward" if len(runs) == 1 else "recompute")
        try:
            with _Counts(truth, "inside"):
                return body(x)
        finally:
            truth.phase.pop()

    return phased


def codes(found: Policies) -> tuple[str, ...]:
    """The findings that need no trace, by their codes."""
    evidence = SimpleNamespace(
        decided=found.policies, sources={}, confidence="high", cost=None, compiled_calls_again=0
    )
    rules = [rule for rule in RULES if rule.code in ("RS501", "RS502", "RS504")]
    said: list[str] = []
    for rule in rules:
        with suppress(NotApplicable):
            said += [one.code for one in rule.check(cast("Any", evidence))]
    return tuple(said)


def compare(case: Case, folder: Path) -> tuple[list[str], Policies]:
    """What is wrong with a case, one line each, and what was seen."""
    found, truth, _ = watch(case, folder)
    operators = {one.name: one for policy in found.policies for one in policy.operators}
    wrong = []
    if {name: one.met for name, one in operators.items()} != truth.met():
        wrong.append(f"met {[(n, o.met) for n, o in operators.items()]} and not {truth.met()}")
    for name, one in operators.items():
        kept = case.keeps.get(name, 0)
        if one.kept != kept:
            wrong.append(f"{name}: kept {one.kept} and not {kept}")
        if (one.recomputed, one.served) != (truth.recomputed(name), truth.served(name)):
            wrong.append(
                f"{name}: {one.recomputed} recomputed, {one.served} served and not "
                f"{truth.recomputed(name)}, {truth.served(name)}"
            )
        size = truth.sizes["forward", name] if kept == one.met else None
        if size is not None and one.kept_bytes != size:
            wrong.append(f"{name}: {one.kept_bytes} bytes kept and not {size}")
    if codes(found) != case.findings:
        wrong.append(f"findings {codes(found)} and not {case.findings}")
    return wrong, found


def in_threads(cases: tuple[Case, ...], folder: Path) -> Policies:
    """Some cases at once, each in a thread of its own, under one watch."""
    probe = Probe(folder, Guard())
    probe.install()
    try:
        probe.policies.begin()
        threads = [threading.Thread(target=step, args=(case,)) for case in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = probe.policies.end()
    finally:
        probe.remove()
    assert found is not None
    return found
