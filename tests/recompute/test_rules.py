"""What each rule of the table of roles is worth: without it, the case that it names goes wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from recompute_scan import trace
from recompute_scan.recompute import alignment, roles, study
from recompute_scan.recompute.roles import RULES, Rule, classify
from recompute_scan.recompute.sequences import ForwardSequence, Matcher
from recompute_scan.trace.calls import nest
from tests.cases.case import record
from tests.cases.equal import EQUAL
from tests.cases.recorded import BY_NAME, recorded
from tests.cost.test_own_copies import Notes

ROOT = Path(__file__).parents[2]
WIDTH, STEPS = 16, 2


def notes(blocks: nn.ModuleList, x: Tensor) -> None:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    x.square().mean().backward()


def hook_before_recompute(blocks: nn.ModuleList, x: Tensor) -> None:
    """A hook looks at a gradient, by a block, before the node behind it asks for a recompute."""
    linear = blocks[0].get_submodule("linear")
    y = checkpoint(lambda x: torch.tanh(linear(x)), x, use_reentrant=False)
    y.register_hook(lambda grad: blocks[1](grad.detach()).detach() * 0 + grad)
    y.square().mean().backward()


def gradient_caching(blocks: nn.ModuleList, x: Tensor) -> None:
    """All blocks run without gradients, and again in the hook that gets those of the result."""
    with torch.no_grad():
        y = x
        for block in blocks:
            y = block(y)
    y.requires_grad_()

    def again(grad: Tensor) -> None:
        with torch.enable_grad():
            z = x
            for block in blocks:
                z = block(z)
        torch.autograd.backward(z, grad)

    y.register_hook(again)
    (y * y).mean().backward()


SCRIPTS: dict[str, Callable[[nn.ModuleList, Tensor], None]] = {
    each.__name__: each for each in (notes, hook_before_recompute, gradient_caching)
}


def trace_of(case: str, folder: Path) -> Path:
    if case in BY_NAME:
        return recorded(case)[0]
    if case not in SCRIPTS:
        return ROOT / "traces" / case / "trace-rank0.json.gz"
    torch.manual_seed(0)
    blocks = nn.ModuleList([Notes(WIDTH), Notes(WIDTH), Notes(WIDTH)])
    sgd = torch.optim.SGD(blocks.parameters(), 0.01)
    path = folder / "trace.json"
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(STEPS):
            SCRIPTS[case](blocks, torch.ones(4, WIDTH, requires_grad=True))
            sgd.step()
            sgd.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


def answer(path: Path, rules: tuple[Rule, ...], patch: pytest.MonkeyPatch) -> tuple[object, ...]:
    patch.setattr(study, "classify", lambda calls: classify(calls, rules))
    found = study.study(trace.load(path))
    counts, judgement = found.counts, found.judgement
    return (
        judgement.verdict,
        judgement.highest,
        len(counts.rows),
        int(counts.runs.sum()),
        int(counts.designed.sum()),
        len(found.designed_runs),
        len(found.alignment.unexplained),
    )


@pytest.mark.parametrize("rule", RULES[:-1], ids=lambda rule: rule.name)
def test_the_case_that_a_rule_names_fails_without_it(
    rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trace_of(rule.case, tmp_path)
    without = tuple(each for each in RULES if each is not rule)
    assert answer(path, RULES, monkeypatch) != answer(path, without, monkeypatch)


def test_the_last_rule_leaves_no_operator_without_a_role() -> None:
    calls = nest(trace.load(recorded("no_checkpoint")[0]))
    formula = classify(calls).role == roles.Role.FORMULA
    bare = classify(calls, RULES[:-1]).role == roles.Role.INNER
    assert (bare & formula).any()
    assert not (classify(calls).role[bare & ~formula] != roles.Role.INNER).any()


@pytest.mark.parametrize(
    ("script", "verdict", "again", "by_design"),
    [
        (notes, "full", 3, 0),
        (hook_before_recompute, "partial", 1, 0),
        (gradient_caching, "partial", 3, 3),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_runs_again_is_counted_as_by_hand(
    script: Callable[[nn.ModuleList, Tensor], None],
    verdict: str,
    again: int,
    by_design: int,
    tmp_path: Path,
) -> None:
    found = study.study(trace.load(trace_of(script.__name__, tmp_path)))
    linear = [name == "aten::linear" for name in found.counts.names(found.calls, slice(None))]
    assert found.counts.runs[linear].sum() == again * STEPS
    assert found.counts.designed[linear].sum() == by_design * STEPS
    assert found.judgement.verdict in (verdict, "full")


EQUAL_CASES = {case.name: case for case in EQUAL}


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("n_in_n_late_2", (alignment, "_heights", lambda *_: {})),
        ("n_in_n_late_in_n_stack", (Matcher, "_behind_next", lambda *_: -1)),
        ("n_halves_in_n_late_3", (ForwardSequence, "_shared_out", lambda *a: [a[3], a[2]])),
    ],
)
def test_the_case_that_a_rule_of_places_names_fails_without_it(
    case: str, rule: tuple[object, str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(EQUAL_CASES[case], tmp_path / "trace.json.gz")
    found = trace.load(tmp_path / "trace.json.gz")
    whole = study.study(found).counts.runs.tolist()
    monkeypatch.setattr(*rule)
    assert study.study(found).counts.runs.tolist() != whole
