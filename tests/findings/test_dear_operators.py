"""RS503 and RS505: operators whose recompute costs more than it should under a policy."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from recompute_scan.findings.base import NotApplicable
from recompute_scan.findings.registry import RULES
from recompute_scan.result import Finding
from recompute_scan.result.fidelity import DecidedOperator, WatchedPolicy

MB = 1 << 20
KEPT = DecidedOperator(
    "aten.mm.default", 4, {"MUST_SAVE": 4}, 4, 8 * MB, served=4, forward_ms_per_step=2.0
)
# As large, and three times as dear.
LEFT_OUT = DecidedOperator(
    "aten.bmm.default",
    4,
    {"PREFER_RECOMPUTE": 4},
    result_bytes=8 * MB,
    recomputed=4,
    recompute_ms_per_step=6.0,
)


def found(code: str, *operators: DecidedOperator, step_ms: float = 100.0) -> list[Finding]:
    policy = WatchedPolicy("keep", "train.py:3", True, "train.py:9", "", 4, 4, operators=operators)
    cost = SimpleNamespace(step_ms=step_ms)
    evidence = SimpleNamespace(decided=(policy,), sources={}, confidence="high", cost=cost)
    (rule,) = (one for one in RULES if one.code == code)
    return list(rule.check(cast("Any", evidence)))


def test_the_dear_operator_that_is_left_out_is_named() -> None:
    (finding,) = found("RS503", KEPT, LEFT_OUT)
    assert (
        finding.title
        == "aten.bmm.default is recomputed under the policy keep, for 6.00 ms per step"
    )
    assert (finding.saving_ms, finding.saving_pct, finding.confidence) == (6.0, 6.0, "medium")
    assert finding.fix is not None
    assert finding.fix.summary == "Keep torch.ops.aten.bmm.default too, if its 8.0 MiB fit."


@pytest.mark.parametrize(
    "operators",
    [
        (LEFT_OUT,),
        (KEPT, replace(LEFT_OUT, recompute_ms_per_step=1.5)),
        (KEPT, replace(LEFT_OUT, recomputed=3)),
        (KEPT, replace(LEFT_OUT, recompute_ms_per_step=None)),
        (replace(KEPT, served=0), LEFT_OUT),
    ],
    ids=["nothing kept", "cheaper", "not always", "no time", "kept for nothing"],
)
def test_nothing_is_said_of_others(operators: tuple[DecidedOperator, ...]) -> None:
    assert found("RS503", *operators) == []


def test_what_is_in_memory_anyhow_need_not_be_recomputed() -> None:
    held = replace(LEFT_OUT, held_bytes=8 * MB)
    (finding,) = found("RS505", KEPT, held)
    assert finding.title == "Recomputing aten.bmm.default costs 6.00 ms per step and frees nothing"
    assert (finding.saving_ms, finding.saving_pct) == (6.0, 6.0)
    assert found("RS505", KEPT, LEFT_OUT) == []
    assert found("RS505", KEPT, replace(held, held_bytes=4 * MB)) == []


@pytest.mark.parametrize("code", ["RS503", "RS505"])
def test_small_ones_are_passed_over(code: str) -> None:
    assert found(code, KEPT, replace(LEFT_OUT, held_bytes=8 * MB), step_ms=10_000.0) == []


@pytest.mark.parametrize("code", ["RS503", "RS505"])
def test_without_a_step_time_they_do_not_apply(code: str) -> None:
    (rule,) = (one for one in RULES if one.code == code)
    evidence = SimpleNamespace(decided=(), cost=None)
    with pytest.raises(NotApplicable):
        list(rule.check(cast("Any", evidence)))
