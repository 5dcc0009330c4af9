"""``check``: what it refuses, what a baseline accepts, how it ends, and what it prints."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import xmlschema
from msgspec.structs import replace

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.check import Policy, Ruling, judge
from recompute_scan.check.formats import RENDERINGS
from recompute_scan.check.policy import baseline_json, parse_baseline
from recompute_scan.cli import main
from recompute_scan.result import Checkpoint, Cost, Finding, Result, from_json, to_json
from tests.present import present

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = Path(__file__).parent / "schemas"
DOUBLED = ROOT / "traces" / "doubled_llama_fsdp"
REPAIRED = ROOT / "traces" / "repaired_llama_fsdp"
UNDECIDED = ROOT / "traces" / "public" / "h100-qwen-inference.json.gz"
HOSTILE = "::error::%0A##[add-mask]x\x1b[31m\r\n::set-env name=A::b <script>&\u202e\"'"
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def doubled() -> Result:
    return analyse([DOUBLED])


@pytest.fixture(scope="module")
def repaired() -> Result:
    return analyse([REPAIRED])


def hostile(result: Result) -> Result:
    """The same, with every name that a trace can hold an attack."""
    checkpoint = Checkpoint(0, "reentrant", None, f"{HOSTILE}.py:7")
    regions = tuple(
        replace(r, module=HOSTILE, module_class=HOSTILE, checkpoints=(checkpoint,) * 2)
        for r in result.regions
    )

    def spoiled(finding: Finding) -> Finding:
        fix = present(finding.fix)
        return replace(
            finding,
            title=f"{HOSTILE} {finding.title}",
            detail=HOSTILE,
            evidence=(f"depth 0: {HOSTILE} at {HOSTILE}.py:7",),
            fix=replace(fix, summary=HOSTILE, removes=checkpoint),
        )

    return replace(
        result,
        reason=HOSTILE,
        headline=HOSTILE,
        regions=regions,
        findings=tuple(map(spoiled, result.findings)),
    )


# What is refused


@pytest.mark.parametrize(
    ("policy", "status"),
    [
        (Policy(), 1),
        (Policy(doubled=False), 0),
        (Policy(doubled=False, any=True), 1),
        (Policy(doubled=False, codes=frozenset({"RS001"})), 1),
        (Policy(doubled=False, codes=frozenset({"RS002"})), 0),
        (Policy(doubled=False, max_recompute=1), 1),
        (Policy(doubled=False, max_recompute=2), 0),
        (Policy(doubled=False, max_cost=5), 1),
        (Policy(doubled=False, max_cost=20), 0),
        (Policy(max_cost_of={"RS001": 5}), 1),
        (Policy(max_cost_of={"RS001": 20}), 0),
    ],
)
def test_thresholds(doubled: Result, policy: Policy, status: int) -> None:
    assert judge(doubled, policy).status == status


def test_the_repaired_twin_passes_them_all(repaired: Result) -> None:
    policy = Policy(any=True, max_recompute=1, max_cost=0.5)
    assert judge(repaired, policy) == Ruling(repaired, (), (), ())


def test_no_verdict_is_no_pass() -> None:
    assert judge(analyse([UNDECIDED]), Policy()).status == 4
    assert judge(analyse([UNDECIDED]), Policy(doubled=False)).status == 4


def test_an_unknown_cost_is_no_pass(repaired: Result) -> None:
    unknown = replace(repaired, cost=None)
    assert judge(unknown, Policy(max_cost=5)).status == 4
    assert judge(unknown, Policy()).status == 0


def test_doubled_without_its_finding_is_refused(doubled: Result) -> None:
    bare = replace(doubled, findings=())
    (refusal,) = judge(bare, Policy()).refused
    assert refusal.why == doubled.headline


def test_a_rule_that_was_asked_for_and_could_not_look_is_a_doubt(repaired: Result) -> None:
    blind = replace(
        repaired,
        checked=tuple(
            replace(r, status="not-applicable", why="no marks") for r in repaired.checked
        ),
    )
    assert judge(blind, Policy()).status == 0
    assert judge(blind, Policy(codes=frozenset({"RS002"}))).status == 4


# What is accepted


def test_a_baseline_accepts_what_is_known(doubled: Result) -> None:
    no_utf8 = replace(doubled, findings=(replace(doubled.findings[0], title="tr\udcffin.py"),))
    known = parse_baseline(baseline_json(no_utf8).encode(), "known")
    outcome = judge(doubled, Policy(), known)
    assert outcome.status == 0
    assert len(outcome.accepted) == 1
    moved = json.loads(to_json(doubled).replace("fsdp.py:95", "fsdp.py:120"))
    assert moved["regions"][0]["checkpoints"][1]["call_site"].endswith(":120")
    assert judge(_decoded(moved), Policy(), known).status == 0


def test_a_baseline_does_not_accept_more_recomputes(doubled: Result) -> None:
    known = parse_baseline(baseline_json(doubled).encode(), "known")
    worse = replace(doubled, recompute_per_backward=3.0)
    assert judge(worse, Policy(), known).status == 1


def test_a_baseline_does_not_accept_another_place(doubled: Result) -> None:
    known = parse_baseline(baseline_json(doubled).encode(), "known")
    other = _decoded(json.loads(to_json(doubled).replace("doubled_llama_fsdp.py", "other.py")))
    assert judge(other, Policy(), known).status == 1


def _decoded(document: Any) -> Result:
    return from_json(json.dumps(document))


# The command


@pytest.mark.parametrize(
    ("trace", "status"), [(DOUBLED, 1), (REPAIRED, 0), (UNDECIDED, 4)], ids=lambda v: str(v)[-20:]
)
def test_exit_statuses(trace: Path, status: int, capsys: Output) -> None:
    assert main(["check", str(trace)]) == status
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[-1].startswith("recompute-scan check: ")


def test_a_result_can_be_checked_again(doubled: Result, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(to_json(doubled))
    assert main(["check", str(file)]) == 1
    assert main(["check", str(file), "--fail-on", "none"]) == 0


def test_a_baseline_is_written_and_read(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "baseline.json"
    assert main(["check", str(DOUBLED), "--write-baseline", str(file)]) == 0
    assert main(["check", str(DOUBLED)]) == 1
    assert main(["check", str(DOUBLED), "--baseline", str(file)]) == 0
    assert "accepted: RS001" in capsys.readouterr().out
    assert main(["check", str(DOUBLED), "--write-baseline", str(file)]) == 2
    file.write_text("{}")
    assert main(["check", str(DOUBLED), "--baseline", str(file)]) == 3
    assert "[E328]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--fail-on", words] for words in ("tripled", "", ",", "any,RS999", "RS601", "none,any")),
        *(["--max-cost", words] for words in ("RS1=2", "x", "101", "RS999=5")),
    ],
)
def test_thresholds_that_make_no_sense(arguments: list[str], capsys: Output) -> None:
    assert main(["check", str(DOUBLED), *arguments]) == 2
    assert "[E211]" in capsys.readouterr().err


def test_thresholds_of_the_command_line(capsys: Output) -> None:
    assert main(["check", str(DOUBLED), "--max-cost", "20"]) == 0
    assert main(["check", str(DOUBLED), "--max-cost", "20", "--fail-on", "doubled"]) == 1
    assert main(["check", str(DOUBLED), "--max-cost", "RS001=20", "--fail-on", "any"]) == 0
    assert main(["check", str(DOUBLED), "--max-recompute", "1"]) == 1
    capsys.readouterr()


# What it prints


@pytest.mark.parametrize("style", RENDERINGS)
def test_output_goes_to_a_file(style: str, tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "output"
    assert main(["check", str(DOUBLED), "--format", style, "--output", str(file)]) == 1
    assert capsys.readouterr().out == ""
    assert main(["check", str(DOUBLED), "--format", style]) == 1
    assert capsys.readouterr().out == file.read_text(encoding="utf-8")


def outcomes(doubled: Result, repaired: Result) -> list[Ruling]:
    policy = Policy(any=True, max_recompute=1, max_cost=5)
    known = parse_baseline(baseline_json(doubled).encode(), "known")
    broken = replace(
        repaired, checked=tuple(replace(r, status="error", why=HOSTILE) for r in repaired.checked)
    )
    absolute = Checkpoint(0, None, None, "/home/a b/train.py:7")
    (finding,) = doubled.findings
    elsewhere = replace(finding, fix=replace(present(finding.fix), removes=absolute))
    results = [doubled, repaired, analyse([UNDECIDED]), hostile(doubled), broken]
    results.append(replace(doubled, findings=(elsewhere,)))
    return [judge(result, policy) for result in results] + [judge(doubled, policy, known)]


def test_sarif_is_valid(doubled: Result, repaired: Result) -> None:
    schema = json.loads((SCHEMAS / "sarif-2.1.0.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for outcome in outcomes(doubled, repaired):
        document = json.loads(RENDERINGS["sarif"](outcome))
        assert list(validator.iter_errors(document)) == []
        results = document["runs"][0]["results"]
        assert len(results) == len(outcome.refused) + len(outcome.accepted)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({"version": "2.1.0", "runs": [{}]})


def test_sarif_points_to_the_line(doubled: Result) -> None:
    document = json.loads(RENDERINGS["sarif"](judge(doubled, Policy())))
    (result,) = document["runs"][0]["results"]
    (location,) = result["locations"]
    physical = location["physicalLocation"]
    assert physical["artifactLocation"]["uri"] == "examples/doubled_llama_fsdp.py"
    assert physical["region"]["startLine"] == 95
    assert result["level"] == "error"


def test_junit_is_valid(doubled: Result, repaired: Result, tmp_path: Path) -> None:
    schema = xmlschema.XMLSchema(str(SCHEMAS / "junit-10.xsd"))
    for outcome in outcomes(doubled, repaired):
        file = tmp_path / "junit.xml"
        file.write_text(RENDERINGS["junit"](outcome), encoding="utf-8")
        schema.validate(str(file))
        root = xmlschema.XMLResource(str(file)).root
        suite = root[0]
        cases = list(suite)
        counted = {
            kind: sum(any(child.tag == kind for child in case) for case in cases)
            for kind in ("failure", "error", "skipped")
        }
        assert suite.get("tests") == str(len(cases))
        assert suite.get("failures") == str(counted["failure"])
        assert suite.get("errors") == str(counted["error"])
        assert suite.get("skipped") == str(counted["skipped"])
    file.write_text("<testsuites><testsuite/></testsuites>")
    with pytest.raises(xmlschema.XMLSchemaValidationError):
        schema.validate(str(file))


_COMMAND = re.compile(r"::(error|warning) ([^:]*)::(.*)")


def test_one_annotation_at_the_call_site(doubled: Result, repaired: Result) -> None:
    commands = [
        line
        for line in RENDERINGS["github"](judge(doubled, Policy())).splitlines()
        if line.startswith("::")
    ]
    (command,) = commands
    found = _COMMAND.fullmatch(command)
    assert found
    assert found[1] == "error"
    assert found[2].split(",")[:2] == ["file=examples/doubled_llama_fsdp.py", "line=95"]
    assert "::" not in RENDERINGS["github"](judge(repaired, Policy()))


def test_what_may_change_training_is_not_passed_over_in_silence(
    doubled: Result, repaired: Result
) -> None:
    wrong = replace(
        doubled.findings[0], code="RS401", title="Others are drawn", wrong_gradients=True
    )
    result = replace(repaired, findings=(wrong,))
    said = "Others are drawn; --fail-on wrong-gradients refuses it"
    ruling = judge(result, Policy())
    assert ruling.status == 0
    assert f"not refused: RS401: {said}" in RENDERINGS["text"](ruling).splitlines()
    assert f"::warning title=recompute-scan RS401::{said}" in RENDERINGS["github"](ruling)
    refused = judge(result, Policy(wrong_gradients=True))
    assert "refused: RS401" in RENDERINGS["text"](refused)
    assert not refused.passed_over
    known = parse_baseline(baseline_json(result).encode(), "a baseline")
    assert not judge(result, Policy(), known).passed_over


@pytest.mark.parametrize("style", ["text", "github"])
def test_names_cannot_give_commands(doubled: Result, style: str) -> None:
    """The runner takes lines that begin with `::`, after spaces too, and `##[` anywhere."""
    bad = hostile(doubled)
    printed = RENDERINGS[style](judge(bad, Policy(any=True)))
    printed += RENDERINGS[style](judge(replace(bad, verdict="inconclusive"), Policy(any=True)))
    assert "##[" not in printed
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    for line in printed.split("\n"):
        assert "\r" not in line
        ours = style == "github" and _COMMAND.fullmatch(line)
        assert ours or not line.lstrip().startswith("::"), line


def test_json_says_all(doubled: Result) -> None:
    document = json.loads(RENDERINGS["json"](judge(doubled, Policy())))
    assert document["schema"] == "recompute-scan-check/1"
    assert document["outcome"] == "refused"
    (refused,) = document["refused"]
    assert (refused["file"], refused["line"]) == ("examples/doubled_llama_fsdp.py", 95)
    cost = doubled.cost
    assert isinstance(cost, Cost)
    assert document["saving_pct"] == cost.saving_pct
