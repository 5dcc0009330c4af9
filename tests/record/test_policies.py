"""Policies of selective checkpoints: what is seen is what was counted, and nothing changes."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from recompute_scan.record.checkpoint_calls import Probe
from recompute_scan.record.isolation import Guard
from recompute_scan.result.fidelity import Policies
from tests.record.policies import AGAIN, CASES, SAVE, Case, aten, compare, in_threads, step, watch


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_seen_is_what_was_counted(case: Case, tmp_path: Path) -> None:
    wrong, found = compare(case, tmp_path)
    assert not wrong
    assert len(found.policies) == 1
    assert found.policies[0].regions == found.policies[0].recomputes == case.blocks


@pytest.mark.parametrize("name", ["list", "lambda", "experts"])
def test_gradients_are_the_same_to_the_last_bit(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    _, _, watched = watch(case, tmp_path)
    for ours, plain in zip(watched, step(case)[1], strict=True):
        assert torch.equal(ours, plain)


def _watched(tmp_path: Path, work: Any) -> Policies:
    probe = Probe(tmp_path, Guard())
    probe.install()
    try:
        probe.policies.begin()
        work()
        found = probe.policies.end()
    finally:
        probe.remove()
    assert found is not None and not probe.warnings
    return found


def _block(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ x) @ x)


def _run(policy: Any, body: Any = _block) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(body, x, use_reentrant=False, context_fn=context).sum().backward()


def test_a_policy_is_called_as_often_and_with_the_same(tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((ctx.is_recompute, op, len(args), tuple(kwargs)))
        return SAVE if op is aten.mm.default else AGAIN

    _run(policy)
    plain = list(seen)
    seen.clear()
    _watched(tmp_path, lambda: _run(policy))
    assert seen == plain and plain


def test_what_a_policy_raises_reaches_the_script(tmp_path: Path) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("mine")

    def work() -> None:
        with pytest.raises(KeyError, match="mine") as caught:
            _run(policy)
        assert caught.value.__context__ is None

    found = _watched(tmp_path, work)
    assert [(one.raised, one.met) for one in found.policies] == [(1, 0)]


def test_checkpoints_in_one_another_each_have_their_policy(tmp_path: Path) -> None:
    def inner(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return SAVE if op is aten.tanh.default else AGAIN

    def outer(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return SAVE if op is aten.mm.default else AGAIN

    def body(x: torch.Tensor) -> torch.Tensor:
        context = functools.partial(create_selective_checkpoint_contexts, inner)
        return checkpoint(_block, x @ x, use_reentrant=False, context_fn=context)  # type: ignore[no-any-return]

    found = _watched(tmp_path, lambda: _run(outer, body))
    by_name = {policy.name.rpartition(".")[2]: policy for policy in found.policies}
    assert set(by_name) == {"inner", "outer"}
    assert {o.name: o.kept for o in by_name["inner"].operators} == {
        "aten.mm.default": 0,
        "aten.tanh.default": 2,
    }


def test_threads_are_counted_together(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "function")
    found = in_threads((case, case, case), tmp_path)
    assert [(one.regions, one.met, one.kept) for one in found.policies] == [(9, 54, 18)]


def test_nothing_is_left_when_the_step_has_ended(tmp_path: Path) -> None:
    kinds = [
        getattr(torch.utils.checkpoint, name)
        for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    ]
    before = [dict(vars(kind)) for kind in kinds]
    _watched(tmp_path, lambda: _run([aten.mm.default]))
    assert [dict(vars(kind)) for kind in kinds] == before


def test_torch_refuses_a_list_of_packets_as_without_us(tmp_path: Path) -> None:
    def work() -> None:
        with pytest.raises(ValueError, match="OpOverload"):
            _run([aten.mm])

    assert not _watched(tmp_path, work).policies
