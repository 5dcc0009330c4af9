"""RS401 to RS406 on trainings whose gradients are known to be wrong, and on their right twins."""

import functools
import re

import pytest
from msgspec.structs import replace

from recompute_scan.advise.choice import place
from recompute_scan.analysis.pipeline import result_of
from recompute_scan.analysis.ranks import Piece, merge, result_by_hooks
from recompute_scan.check.policy import Policy, judge
from recompute_scan.findings.registry import settle
from recompute_scan.result import Finding, Result
from recompute_scan.result.fidelity import (
    ComparedGradients,
    ComparedRegion,
    Difference,
    Fidelity,
    KeptState,
    Operation,
)
from recompute_scan.result.run_record import RunInfo
from tests.fidelity.cases import CASES
from tests.fidelity.compare import compare
from tests.present import present
from tests.recompute.training import plain_step
from tests.trace_builder import loaded, thread

pytestmark = pytest.mark.filterwarnings("ignore")
CODES = {"RS401", "RS402", "RS403", "RS404", "RS405", "RS406"}
BY_NAME = {case.name: case for case in CASES}


def info(fidelity: Fidelity | None) -> RunInfo:
    return RunInfo(0, 1, "complete", 0, "cpu", 1, (), 1, "t.json", None, fidelity=fidelity)


def result(fidelity: Fidelity | None) -> Result:
    return result_of(loaded(thread(plain_step(0))), info(fidelity))


@functools.cache
def of_case(name: str) -> tuple[Finding, ...]:
    fidelity, _, _ = compare(BY_NAME[name])
    return tuple(one for one in result(fidelity).findings if one.code in CODES)


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("dropout, state dropped, non-reentrant", "RS401", "torch (cpu)"),
        ("a generator of one's own", "RS401", "a generator of the script's own"),
        ("random.random() as a factor", "RS401", "random"),
        ("autocast forgotten by a hand-written checkpoint", "RS402", "bfloat16"),
        ("a Python counter as a factor", "RS403", "1.0 where the forward had 0.5"),
        ("another branch each time", "RS403", "another branch was taken"),
        ("a cache that grows", "RS403", "(16, 32)"),
        ("a factor that changes before the backward", "RS403", "has changed since the forward"),
        ("BatchNorm in training, reentrant", "RS404", "running statistics"),
        ("keyword tensors that lose their gradient", "RS405", "positional"),
        ("a hand-written checkpoint without autograd in its recompute", "RS405", "autograd is off"),
    ],
)
def test_each_fault_has_its_finding(name: str, code: str, said: str) -> None:
    of_gradients = {"RS406"} if code == "RS404" else {"RS404", "RS406"}
    found = [one for one in of_case(name) if one.code not in of_gradients]
    assert {one.code for one in found} == {code}
    assert all(one.wrong_gradients for one in found)
    # Before gradients were compared nobody knows by how much.
    assert {(one.severity, one.confidence) for one in found} == {
        ("warning", "high" if code == "RS404" else "medium")
    }
    assert code == "RS404" or all("--verify" in one.detail for one in found)
    assert any(said in one.detail for one in found), [one.detail for one in found]
    fixes = [one.fix for one in found]
    assert all(fix is not None and fix.disposition == "review" and fix.reason for fix in fixes)


@pytest.mark.parametrize(
    "name", ["dropout, state kept, reentrant", "mixture of experts", "a policy that keeps products"]
)
def test_a_faithful_recompute_has_none(name: str) -> None:
    assert of_case(name) == ()


def test_the_same_fault_in_many_blocks_is_one_finding() -> None:
    where = Operation("aten.bernoulli_", "layers.0.drop", "Dropout", "train.py:7")
    regions = tuple(
        ComparedRegion(
            f"layers.{n}",
            "Block",
            "reentrant",
            "direct",
            "train.py:9",
            calls=1,
            recomputes=1,
            differences=(Difference("random", where, generator="torch (cuda)", distance=1.0),),
        )
        for n in range(40)
    )
    (finding,) = [one for one in result(Fidelity(regions)).findings if one.code == "RS401"]
    assert finding.title.startswith("Recomputes of 40 of 40 blocks start from")
    assert place("train.py:7") in finding.detail
    assert "its result differs, and a gradient" in finding.detail
    assert "and 37 more" in finding.evidence


def test_what_was_not_compared_is_not_called_clean() -> None:
    for fidelity in (None, Fidelity(), Fidelity(untold="Part of the step is compiled.")):
        checked = {one.code: one.status for one in result(fidelity).checked}
        assert {checked[code] for code in CODES} == {"not-applicable"}
    reason = {one.code: one.why for one in result(Fidelity(untold="Compiled.")).checked}["RS401"]
    assert reason == "Compiled."


_NORM = ComparedRegion("norm", "BatchNorm", "reentrant", "", "", calls=1, recomputes=1)
_UPDATED = replace(_NORM, states=(KeptState("norm.running_mean", True, "0", "1", "2"),))


def test_check_refuses_wrong_gradients_and_says_where_they_were_not_looked_for() -> None:
    policy = Policy(doubled=False, wrong_gradients=True)
    assert judge(result(Fidelity((_UPDATED,))), policy).status == 1
    assert judge(result(Fidelity((_NORM,))), policy).status == 0
    assert judge(result(None), policy).status == 4
    assert judge(result(Fidelity((_UPDATED,))), Policy()).status == 0


def test_the_headline_says_that_training_changes() -> None:
    assert "The trained model also changes: RS404." in result(Fidelity((_UPDATED,))).headline
    assert "trained" not in result(Fidelity()).headline


def _settled(name: str, gradients: ComparedGradients) -> Finding:
    fidelity, _, _ = compare(BY_NAME[name])
    settled = settle(result(fidelity), gradients, {})
    (finding,) = [one for one in settled.findings if one.code in ("RS401", "RS403", "RS405")]
    return finding


@pytest.mark.parametrize(
    "name",
    ["dropout, state dropped, reentrant", "a Python counter as a factor"],
)
def test_compared_gradients_decide(name: str) -> None:
    differ = ComparedGradients(
        9, ("layers.0.up.weight", "layers.1.lin.weight", "layers.0.lin.bias")
    )
    wrong = _settled(name, differ)
    assert (wrong.severity, wrong.confidence, wrong.wrong_gradients) == ("error", "high", True)
    assert "3 of 9 differ" in wrong.detail
    equal = _settled(name, ComparedGradients(9))
    assert (equal.severity, equal.wrong_gradients) == ("info", False)
    assert "all 9 are equal to the last bit" in equal.detail
    elsewhere = _settled(name, ComparedGradients(9, ("head.weight",)))
    assert (elsewhere.severity, elsewhere.confidence) == ("warning", "medium")
    assert "--verify --without-checkpointing" in elsewhere.detail


def test_gradients_of_another_function_than_was_taken_out_decide_nothing() -> None:
    gradients = ComparedGradients(9, functions=("Tiled",))
    region = ComparedRegion("layers.0", "Block", "reentrant", "", "", function="Tiled")
    assert gradients.tell(region) == "equal"
    assert gradients.tell(replace(region, function="Other")) is None
    assert gradients.tell(replace(region, function="")) == "equal"


def test_a_check_that_is_off_is_told_with_what_the_step_has_shown() -> None:
    (silent,) = [o for o in of_case("dropout, check off, state kept") if o.code == "RS406"]
    assert not silent.wrong_gradients
    assert "no recompute differed" in silent.detail
    wrong = of_case("a cache that grows")
    assert {one.code for one in wrong} == {"RS403", "RS404", "RS406"}
    assert "do differ" in wrong[-1].detail


def test_what_keeping_the_random_state_takes_is_told() -> None:
    (finding,) = of_case("dropout, state dropped, non-reentrant")
    assert re.search(r"takes about 0\.\d+ ms of a step", present(finding.fix).reason or "")


def test_of_several_ranks_the_one_with_wrong_gradients_speaks() -> None:
    state = KeptState("norm.running_mean", True, "0", "1", "2")
    right = ComparedRegion("norm", "BatchNorm", "reentrant", "", "", calls=1, recomputes=1)
    wrong = replace(right, states=(state,))
    pieces = [Piece(f"{n}", n, result(Fidelity((one,)))) for n, one in enumerate([right, wrong])]
    merged = merge(pieces, ())
    assert "RS404" in {one.code for one in merged.findings}


def test_where_nothing_else_was_done_the_rules_on_the_run_answer() -> None:
    fidelity, _, untrained = compare(BY_NAME["dropout, state dropped, reentrant"])
    found = present(result_by_hooks(replace(info(fidelity), trace=None, untrained=untrained)))
    assert found.verdict == "inconclusive"
    assert {one.code for one in found.findings} == {"RS401"}
    assert "No: the recomputes of" in found.headline
    status = {one.code: one.status for one in found.checked}
    assert status["RS401"] == "found"
    assert status["RS402"] == status["RS104"] == "clean"
    assert status["RS001"] == status["RS302"] == "not-applicable"


def test_a_gate_on_gradients_alone_needs_no_count() -> None:
    fidelity, _, _ = compare(BY_NAME["dropout, state kept, reentrant"])
    found = present(result_by_hooks(info(fidelity)))
    assert judge(found, Policy(doubled=False, wrong_gradients=True)).status == 0
    assert judge(found, Policy(wrong_gradients=True)).status == 4
    unseen = replace(
        fidelity.regions[0], untold=("The region ran while a CUDA graph was captured.",)
    )
    partly = present(result_by_hooks(info(Fidelity((unseen,)))))
    assert judge(partly, Policy(doubled=False, wrong_gradients=True)).status == 4
