"""What a recommended change does to gradients: measured on models, and said with every fix."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recompute_scan.diagnose.outcome import HANGS, IN_RUNS, SIGNATURES, Diagnosis, finding_of
from recompute_scan.frameworks.base import RANDOM_STATE
from recompute_scan.frameworks.detect import Signature
from tests.present import present

Step = Callable[[nn.Sequential, Tensor], Tensor]
ALL = (*SIGNATURES, *IN_RUNS, *HANGS)
TOUCHES = re.compile(
    r"preserve_rng_state|determinism_check|use_reentrant|reentrant (variant|checkpoint)"
    r"|[Cc]heckpoint whole|BatchNorm|running statistics"
    r"|summon_full_params|to the model's dtype|an 8-bit one"
)


def touches_gradients(fix: str) -> bool:
    """Does it recommend such a change? What it warns of is none."""
    sentences = re.split(r"(?<=[.;]) ", fix)
    return any(TOUCHES.search(s) and not s.startswith(("Do not ", "Nor ")) for s in sentences)


@pytest.mark.parametrize("known", ALL, ids=lambda known: f"{known.code}-{known.cause_name}")
def test_a_fix_that_touches_gradients_says_what_it_does_to_them(known: Signature) -> None:
    assert bool(known.gradients) is touches_gradients(known.fix)
    if "preserve_rng_state=False" in known.fix:
        assert known.gradients == RANDOM_STATE
        assert "nothing in" in known.fix
    fix = present(finding_of(Diagnosis(known, "high", ())).fix)
    assert fix.reason == (known.gradients or None)


def trained(model: nn.Sequential, step: Step) -> list[Tensor | None]:
    """Gradients of a seeded step."""
    torch.manual_seed(1)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    step(model, x).square().sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def block(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), *layers)


def plainly(model: nn.Sequential, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def checkpointed(*, reentrant: bool, keep: bool = True) -> Step:
    def step(model: nn.Sequential, x: Tensor) -> Tensor:
        out = checkpoint(model[1:], model[0](x), use_reentrant=reentrant, preserve_rng_state=keep)
        assert isinstance(out, Tensor)
        return out

    return step


def alike(one: list[Tensor | None], two: list[Tensor | None]) -> bool:
    return all(
        a is not None and b is not None and torch.equal(a, b) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("layers", "keep", "same"),
    [
        ((nn.Dropout(0.5),), True, True),
        ((nn.Dropout(0.5),), False, False),
        ((nn.GELU(),), False, True),
    ],
)
def test_random_state(
    layers: tuple[nn.Module, ...], keep: bool, same: bool, reentrant: bool
) -> None:
    # A layer behind, so that the mask bears on gradients in front of it.
    layers = (*layers, nn.Linear(8, 8))
    without = trained(block(*layers), plainly)
    for parameter in layers[-1].parameters():
        parameter.grad = None
    assert (
        alike(without, trained(block(*layers), checkpointed(reentrant=reentrant, keep=keep)))
        is same
    )


def test_what_got_no_gradient_gets_its_own() -> None:
    def inside(model: nn.Sequential, x: Tensor, *, reentrant: bool) -> Tensor:
        out = checkpoint(model, x, use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        return out

    without = trained(block(), plainly)
    assert alike(without, trained(block(), lambda m, x: inside(m, x, reentrant=False)))
    with pytest.warns(UserWarning, match="requires_grad"), pytest.raises(RuntimeError):
        trained(block(), lambda m, x: inside(m, x, reentrant=True))


def test_a_recompute_that_differs_goes_on_reentrantly_alone() -> None:
    runs = 0

    def run(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return x.square() if runs % 2 else torch.cat([x, x]).square()[:3].square()

    x = torch.full((3,), 2.0, requires_grad=True)
    out = checkpoint(run, x, use_reentrant=True)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert present(x.grad).tolist() == [32.0] * 3  # of the fourth power; that of the square is 4
    again = checkpoint(run, x, use_reentrant=False)
    assert isinstance(again, Tensor)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        again.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_running_statistics_are_updated_once_more(reentrant: bool) -> None:
    norm = nn.BatchNorm1d(8)
    trained(block(norm, nn.Linear(8, 8)), checkpointed(reentrant=reentrant))
    assert int(present(norm.num_batches_tracked)) == 2
