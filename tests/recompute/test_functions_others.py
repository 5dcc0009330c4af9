"""Checkpoint functions as others write them: counted, and each named where it stands.

The names are written down here; the counts are the model's own.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from recompute_scan.analysis.pipeline import analyse, result_of
from recompute_scan.recompute.study import study
from recompute_scan.trace import load
from tests.cases.case import Case, TrainingStep, record
from tests.cases.functions_others import OTHERS, UNMARKED, _GoesThrough, _Held
from tests.cases.loops import batch, next_token_loss
from tests.cases.marked import annotating
from tests.cases.model import Model, Oracle
from tests.cases.recorded import recorded
from tests.effort import some
from tests.present import present
from tests.recompute.test_accuracy import answer

BUFFERED, QUANTISED, TREE, TILES = "PinnedStash", "Int8Input", "TreeKept", "TiledPart"
STEMS = {
    "buffered": BUFFERED,
    "afterwards": "KeptLater",
    "int8": QUANTISED,
    "prefetch": "Prefetching",
    "cold": "ColdRun",
    "two_gradients": "TwoGrads",
    "adds_itself": "AddsItself",
    "tree": TREE,
    "in_two": "HeldBlock",
    "hooked_block": "HookedBlock",
    "half_kept": "HalfKept",
    "vjp": "ByVjp",
}
# Of the functions around some block, outermost first; ``None`` where it is no function of one's own
NAMES: dict[str, list[str | None]] = {
    **{stem: [own] for stem, own in STEMS.items()},
    **{f"{stem}_in_r": [None, own] for stem, own in STEMS.items()},
    **{f"{stem}_round_r": [own, None] for stem, own in STEMS.items()},
    **{f"{stem}_round_n": [own, None] for stem, own in STEMS.items()},
    **{f"{stem}_twice": [own, own] for stem, own in STEMS.items()},
    "by_hand": [None],
    "by_hand_in_r": [None, None],
    "by_hand_round_r": [None, None],
    "by_hand_in_own": [BUFFERED, None],
    "by_hand_round_own": [None, BUFFERED],
    "by_hand_twice": [None],
    "buffered_round_int8": [BUFFERED, QUANTISED],
    "int8_round_buffered": [QUANTISED, BUFFERED],
    "fetch_round_tree": ["Prefetching", TREE],
    "in_two_round_cold": ["HeldBlock", "ColdRun"],
    "own_n_own": [BUFFERED, None, QUANTISED],
    "own_r_own": [BUFFERED, None, QUANTISED],
    "r_own_own": [None, BUFFERED, QUANTISED],
    "own_own_n": [BUFFERED, QUANTISED, None],
    "pairs_own": [BUFFERED, QUANTISED],
    "pairs_own_once": [BUFFERED],
    "pairs_own_r": [BUFFERED, None],
    "pairs_own_n": [BUFFERED, None],
    "pairs_r_own": [None, BUFFERED],
    "stack_own_r": [TREE, None],
    "stack_own_own": [TREE, TREE],
    "stack_n_own": [None, TREE],
    "halves_own": [TREE],
    "halves_in_own": [TREE, TREE],
    "mlp_in_own": [TREE, BUFFERED],
    "mlp_own_in_n": [None, BUFFERED],
    "mlp_n_in_own": [BUFFERED, None],
    "tiled_mlp": [TILES],
    "r_round_tiled_mlp": [None],
    "tiled_mlp_in_n": [None],
    "tiled_mlp_in_own": [TREE],
    "some_own_in_r": [None, BUFFERED],
    "some_own_in_own": [TREE, BUFFERED],
    "some_r_in_own": [BUFFERED, None],
    "own_in_r_accumulated": [None, BUFFERED],
    "own_own_accumulated": [TREE, QUANTISED],
}


@pytest.mark.parametrize("case", some(OTHERS, 4), ids=lambda case: case.name)
def test_the_count_is_the_truth_and_each_function_is_named_where_it_stands(case: Case) -> None:
    _, truth = recorded(case.name)
    result = answer(case.name)
    assert truth.verdict in (None, result.verdict)
    assert result.recompute_per_backward == max(map(max, truth.multiplicity()))
    assert result.confidence == "high"
    found = [[one.function for one in region.checkpoints] for region in result.regions]
    assert case.name not in NAMES or NAMES[case.name] in found


def test_two_functions_are_not_one_applied_twice() -> None:
    (finding,) = (one for one in answer("int8_round_buffered").findings if one.code == "RS001")
    assert QUANTISED in present(finding.fix).keep
    assert BUFFERED in present(finding.fix).remove


def looked_at(oracle: Oracle, device: torch.device) -> TrainingStep:
    """A hook runs each layer with gradients and goes backward through that itself."""
    model = Model(oracle).to(device)
    adamw = torch.optim.AdamW(model.parameters())
    tokens = batch(device)

    def look(layer: torch.nn.Module, x: Tensor) -> None:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.grad(layer(leaf).square().mean(), leaf)

    def step() -> None:
        x: Tensor = model.embedding(tokens)
        for layer in model.layers:
            before, x = x, layer(x)
            x.register_hook(lambda _, layer=layer, before=before: look(layer, before))
        next_token_loss(model.logits(x), tokens).backward()
        adamw.step()
        adamw.zero_grad()

    return step


def held_from_forward(oracle: Oracle, device: torch.device) -> TrainingStep:
    """A function goes through a graph that was made in the forward pass: nothing runs again."""
    model = Model(oracle).to(device)
    adamw = torch.optim.AdamW(model.parameters())
    tokens = batch(device)

    class Apart(_GoesThrough):
        @staticmethod
        def forward(ctx: object, held: _Held, x: Tensor) -> Tensor:
            del x
            ctx.held = held  # type: ignore[attr-defined]
            held.run_again()
            return present(held.output).detach()

    def step() -> None:
        x: Tensor = model.embedding(tokens)
        for layer in model.layers:
            x = Apart.apply(_Held(layer, x), x)
        next_token_loss(model.logits(x), tokens).backward()
        adamw.step()
        adamw.zero_grad()

    return step


@pytest.mark.parametrize("build", [looked_at, held_from_forward])
def test_what_no_other_node_goes_through_is_no_recompute(tmp_path: Path, build: object) -> None:
    trace = tmp_path / "trace.json.gz"
    record(Case("", "", None, build), trace)  # type: ignore[arg-type]
    result = analyse([trace])
    assert (result.verdict, result.recompute_per_backward) == ("none", 0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_marked_the_answer_is_the_truth_and_sure_only_where_marks_agree(
    case: Case, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json.gz"
    with annotating() as probe:
        truth = record(case, trace)
    assert probe.warnings == []
    result, found = result_of(load(trace)), study(load(trace)).annotations
    assert truth.verdict in (None, result.verdict)
    assert result.recompute_per_backward == max(map(max, truth.multiplicity()))
    if found is not None and found.disagreeing:
        assert case.name in UNMARKED
        assert result.confidence != "high"
