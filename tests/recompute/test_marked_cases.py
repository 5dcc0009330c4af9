"""Every case with ``run``'s annotations: they agree with the operators, both with the truth."""

from pathlib import Path

import pytest
from benchmarks._frame import call
from benchmarks.accuracy import main

from recompute_scan import trace as traces
from recompute_scan.recompute.study import study
from tests.cases.case import Case, record
from tests.cases.groups import GROUPS, HIDDEN, highest
from tests.cases.marked import annotating

# What others wrote bears marks where it happens to: ``test_functions_others.py``.
CASES = {case.name: case for name, group in GROUPS.items() if name != "others" for case in group}

# Their own recompute is in a gradient hook, which no probe sees; or their function gets what it
# runs in a way that cannot be replaced: in a list, or by a context that is set up apart.
UNSEEN = {name for name in CASES if name.startswith(("discarded_", "lean"))}
UNSEEN |= {"reversible_chain", "every_second"}
# Their own function is handed a module, and a module is never replaced: who gets it may look at it.
UNSEEN |= {
    "grad_ckpt",
    "remat",
    "run_twice",
    "stash",
    "to_host",
    "reversible_blocks",
    "product",
    "many",
}
UNSEEN |= {"gradient_in_forward_once", "half_kept"}


pytestmark = pytest.mark.usefixtures("alone_again")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_marks_and_operators_agree(case: Case, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    with annotating() as probe:
        truth = record(case, trace)
    assert probe.warnings == []
    facts = study(traces.load(trace))
    if case.name in HIDDEN and facts.judgement.verdict == "inconclusive":
        assert "compiled" in (facts.judgement.reason or "")
    else:
        assert facts.judgement.verdict == (case.verdict or facts.judgement.verdict)
        assert facts.judgement.highest == highest(truth)
    if facts.annotations is None:
        # No call of a checkpoint function was seen: nothing ran again, or all was compiled.
        assert highest(truth) == 0 or case.name in HIDDEN | UNSEEN
        assert facts.level == "autograd"
        return
    assert facts.annotations.disagreeing == 0
    assert facts.level == "annotated" or facts.judgement.verdict == "inconclusive"


def test_the_benchmark_prints_truth_beside_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(main, ["r_in_wrapper", "n_in_wrapper", "first_half_only"]) == 0
    first, head, *lines, sure, alarms, last = capsys.readouterr().out.splitlines()
    assert first == "on CPU"
    assert head.split() == [
        "case", "torch", "attention", "evidence", "times", "truth", "answer", "right",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[::4]] == [
        "r_in_wrapper", "n_in_wrapper", "first_half_only",
    ]  # fmt: skip
    assert [line.split()[3] for line in lines[::2]] == ["autograd", "annotated"] * 3
    assert [line.split()[4] for line in lines] == ["ns", "µs"] * 6
    assert sure == "high confidence: 12 of 12, 0 of them wrong"
    assert alarms == "the plain count disagrees with a right answer: 0 of 12"
    assert last == "12 of 12 right"
