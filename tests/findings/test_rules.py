"""Each rule fires on the state that it is named for, and stays silent on the others."""

import re
from pathlib import Path

import pytest
from msgspec import structs

from recompute_scan.cost.price import price
from recompute_scan.findings import registry
from recompute_scan.findings.base import Evidence, NotApplicable, Rule
from recompute_scan.findings.policies import memory_headroom
from recompute_scan.findings.registry import RULES, check_all
from recompute_scan.frameworks.detect import NAMES
from recompute_scan.lint.rules import RULES as LINT_RULES
from recompute_scan.recompute.checks import confidence
from recompute_scan.recompute.regions import list_regions
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Finding
from recompute_scan.result.run_record import Source
from tests.cost.test_price import gpu_step
from tests.present import present
from tests.recompute.training import checkpointed_step, marked_step
from tests.trace_builder import op, step, studied, thread

PAGES = Path(__file__).parents[2] / "docs" / "findings"
SOURCES = {
    "train.py:24": Source(
        first=23,
        text="model.train()\nmodel.gradient_checkpointing_enable()\nmodel = FSDP(model)",
        begin=24,
        end=24,
        alone=False,
        whole_lines=True,
    ),
}


def evidence(facts: RecomputeFacts, sources: dict[str, Source] | None = None) -> Evidence:
    return Evidence(facts, list_regions(facts), None, confidence(facts), sources or {})


def marked(
    recomputes: int, variants: tuple[str, str] = ("non-reentrant", "reentrant")
) -> RecomputeFacts:
    return studied(thread(marked_step(0, recomputes, variants)))


def found(
    facts: RecomputeFacts, code: str, sources: dict[str, Source] | None = None
) -> list[Finding]:
    findings, checked = check_all(evidence(facts, sources))
    mine = [finding for finding in findings if finding.code == code]
    (status,) = [one.status for one in checked if one.code == code]
    assert (status == "found") == bool(mine)
    return mine


def statuses(facts: RecomputeFacts) -> dict[str, str]:
    return {one.code: one.status for one in check_all(evidence(facts))[1]}


def test_a_gpu_that_idles_is_not_taken_for_a_cpu() -> None:
    """Its step is priced on the host, and its memory is still the GPU's."""
    idle = studied(thread(step(0, gpu_step(0), us=90_000.0)))
    cost = present(price(idle, ()))
    assert cost.device == "cpu"
    for facts, why in ((idle, "does not show memory"), (marked(recomputes=2), "ran on the CPU")):
        with pytest.raises(NotApplicable, match=why):
            memory_headroom.look(structs.replace(evidence(facts), cost=cost))


def test_doubled_checkpoint_names_both_and_gives_the_diff() -> None:
    (finding,) = found(marked(recomputes=2), "RS001", SOURCES)
    assert finding.severity == "error"
    assert finding.title.startswith("3 of 3 blocks run their forward again 2 times")
    assert any("non-reentrant at train.py:31" in line for line in finding.evidence)
    assert any("reentrant at train.py:24" in line for line in finding.evidence)
    assert finding.fix is not None
    assert "-model.gradient_checkpointing_enable()" in present(finding.fix.diff).splitlines()
    assert "+++ b/train.py" in present(finding.fix.diff)
    assert "train.py:24" in finding.fix.remove


def test_doubled_checkpoint_is_found_without_marks() -> None:
    facts = studied(thread(checkpointed_step(0, recomputes=dict.fromkeys(range(3), 2))))
    (finding,) = found(facts, "RS001")
    assert finding.title.startswith("3 of 3 blocks")


def test_a_doubled_layer_among_others_is_found_alone() -> None:
    facts = studied(thread(checkpointed_step(0, layers=4, recomputes={2: 2})))
    (finding,) = found(facts, "RS001")
    assert finding.title.startswith("1 of 4 blocks")


def test_nested_checkpoint_is_found_where_two_marks_recompute_once() -> None:
    facts = marked(recomputes=1, variants=("non-reentrant", "non-reentrant"))
    (finding,) = found(facts, "RS002", SOURCES)
    assert finding.severity == "info"
    assert (finding.saving_ms, finding.saving_pct) == (0.0, 0.0)
    assert finding.title.startswith("3 of 3 blocks have 2 checkpoints")
    assert found(facts, "RS001") == []


def test_without_a_verdict_no_rule_applies() -> None:
    facts = studied(thread(step(0, op("aten::mm"))))
    assert set(statuses(facts).values()) == {"not-applicable"}


def test_a_broken_rule_costs_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Evidence) -> list[Finding]:
        raise KeyError("no such layer")

    unbroken = list(statuses(marked(recomputes=2)).values())
    rules = (Rule("RS900", "broken-rule", broken), *RULES)
    monkeypatch.setattr(registry, "RULES", rules)
    findings, checked = check_all(evidence(marked(recomputes=2)))
    assert [finding.code for finding in findings] == ["RS001"]
    assert (checked[0].status, checked[0].why) == ("error", "KeyError: 'no such layer'")
    assert [one.status for one in checked[1:]] == unbroken


def test_codes_names_and_pages_agree() -> None:
    assert [rule.code for rule in RULES] == sorted({rule.code for rule in RULES})
    titles = {page.stem: page.read_text().splitlines()[0] for page in PAGES.glob("RS*.md")}
    linted = {code: name for code, (name, _) in LINT_RULES.items()}
    known = {rule.code: rule.name for rule in RULES} | NAMES | linted
    assert titles == {code: f"# {code} {name}" for code, name in known.items()}
    for rule in RULES:
        assert re.fullmatch(r"RS\d{3}", rule.code)
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name)


@pytest.mark.parametrize("facts", [marked(2), marked(1, ("non-reentrant", "non-reentrant"))])
def test_a_finding_bears_its_rules_code_and_name(facts: RecomputeFacts) -> None:
    names = {rule.code: rule.name for rule in RULES}
    findings, _ = check_all(evidence(facts))
    assert findings
    for finding in findings:
        assert names[finding.code] == finding.name
        assert all(value != "" for value in structs.asdict(finding).values())


def test_untrained_weights_are_named() -> None:
    seen = structs.replace(evidence(marked(recomputes=2)), untrained=("layers.0", "layers.1"))
    (finding,) = [one for one in check_all(seen)[0] if one.code == "RS104"]
    assert (finding.severity, finding.confidence) == ("warning", "high")
    (rule,) = [one for one in RULES if one.code == "RS104"]
    assert (rule.name, rule.severity) == (finding.name, finding.severity)
    assert "layers.0, layers.1" in finding.evidence[0]


def test_untrained_weights_are_silent_where_all_have_a_gradient() -> None:
    seen = structs.replace(evidence(marked(recomputes=2)), untrained=())
    findings, checked = check_all(seen)
    assert "RS104" not in {one.code for one in findings}
    assert {one.code: one.status for one in checked}["RS104"] == "clean"
