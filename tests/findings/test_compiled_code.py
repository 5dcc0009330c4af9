"""The rules on compiled code: what the compiler leaves, repeats at a price, and draws anew."""

from pathlib import Path

import pytest
import torch
import torch._functorch.config
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.result import Finding, Result
from tests.compiled.answers import said_of, torch_trace
from tests.compiled.cases import CASES


def _codes(result: Result) -> set[str]:
    return {one.code for one in result.findings}


def _said(name: str) -> tuple[Result, Result]:
    (case,) = (one for one in CASES if one.name == name)
    both = said_of(case)
    return both.by_trace, both.by_log


def _only(result: Result, code: str) -> Finding:
    (found,) = (one for one in result.findings if one.code == code)
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_break_inside_a_checkpoint_is_named() -> None:
    for result in _said("graph break under each checkpoint"):
        found = _only(result, "RS010")
        assert "tests/compiled/cases.py:" in found.title
        assert found.evidence[0].endswith("Call to `torch._dynamo.graph_break()`")


@pytest.mark.filterwarnings("ignore")
def test_a_break_outside_checkpoints_is_not_found() -> None:
    for result in _said("graph break in each layer"):
        assert "RS010" not in _codes(result)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("memory budget of 0", True),
        ("model", False),
        pytest.param("attention, checkpoints in the model", False, marks=pytest.mark.slow),
    ],
)
def test_products_that_only_the_budget_repeats_are_found(name: str, found: bool) -> None:
    for result in _said(name):
        assert ("RS012" in _codes(result)) is found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("budget", "inside"), [(1.0, False), (0.5, False), (1.0, True)])
def test_another_mask_is_found_where_there_is_one(
    tmp_path: Path, backend: str, budget: float, inside: bool
) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x.sin().exp(), 0.5, True).cos()

    def whole(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(body, x, use_reentrant=False) if inside else body(x)
        return result

    torch._dynamo.reset()
    x = torch.ones(64, 64, requires_grad=True)
    with torch_trace(tmp_path), torch._functorch.config.patch(activation_memory_budget=budget):
        out = torch.compile(whole, backend=backend)(x)
        out.sum().backward()
    torch._dynamo.reset()
    assert x.grad is not None
    differs = not torch.equal(x.grad == 0, out == 1)  # cos(0) where the mask is off
    result = analyse([tmp_path])
    assert ("RS011" in _codes(result)) is differs
    if differs:
        assert _only(result, "RS011").wrong_gradients
