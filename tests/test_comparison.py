"""Two runs side by side: the data, its document, and its renderings."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from msgspec import structs

import recompute_scan as rs
from recompute_scan.cli import main
from recompute_scan.report.blocks import WIDTH, columns
from recompute_scan.report.render import render_comparison_html, render_comparison_text
from recompute_scan.result import Result
from recompute_scan.result.compare import SCHEMA, Comparison, compare, json_schema, to_json
from tests.present import present
from tests.report.page_reader import Page
from tests.report.sample_results import (
    HOSTILE,
    clean,
    doubled,
    full,
    hostile,
    inconclusive,
    verified,
)

_SCHEMAS = Path(__file__).parent.parent / "docs" / "schemas"

TRACES = Path(__file__).parents[1] / "traces"
Output = pytest.CaptureFixture[str]


def with_step(result: Result, step_ms: float) -> Result:
    return structs.replace(result, cost=structs.replace(present(result.cost), step_ms=step_ms))


def flat(comparison: Comparison) -> str:
    return " ".join(render_comparison_text(comparison).split())


def test_a_change_is_said_in_two_ways_that_are_never_mixed() -> None:
    """The reported case, in both directions."""
    slow, fast = with_step(doubled(), 248.88), with_step(full(), 185.07)
    better, worse = compare(slow, fast), compare(fast, slow)
    assert better.time_change_pct == pytest.approx(-25.64, abs=0.01)
    assert better.throughput_change_pct == pytest.approx(34.48, abs=0.01)
    assert "25.6 % less time, 34.5 % more throughput." in flat(better)
    assert "34.5 % more time, 25.6 % less throughput." in flat(worse)


def test_what_went_away_and_what_is_new() -> None:
    fixed = compare(doubled(), full())
    assert [mark.code for mark in fixed.findings_gone] == ["RS001"]
    (gone,), (kept,) = fixed.checkpoints_gone, fixed.checkpoints_kept
    assert (gone.variant, gone.call_site, gone.blocks_before, gone.blocks_after) == (
        *("reentrant", "train.py:24"),
        *(8, 0),
    )
    assert (kept.mechanism, kept.blocks_before, kept.blocks_after) == ("fsdp-wrapper", 8, 8)
    back = compare(full(), doubled())
    assert (back.findings_new, back.checkpoints_new) == (
        fixed.findings_gone,
        (structs.replace(gone, blocks_before=0, blocks_after=8),),
    )
    one = on(doubled(), device="cpu", processor="EPYC")
    same = compare(one, one)
    assert [mark.code for mark in same.findings_kept] == ["RS001"]
    assert not (same.findings_gone or same.findings_new or same.calls or same.warnings)
    assert not (same.checkpoints_gone or same.checkpoints_new)
    assert "as long as before" in flat(same)


def test_what_is_not_known_is_null() -> None:
    comparison = compare(doubled(), inconclusive())
    written = json.loads(to_json(comparison))
    jsonschema.Draft202012Validator(json_schema()).validate(written)
    assert (written["time_change_pct"], written["after"]["step_ms"]) == (None, None)
    assert "cannot be compared" in flat(comparison)


def test_times_of_different_kinds_are_warned_of() -> None:
    assert full().cost is not None
    traced = structs.replace(full().cost, step_source="trace")  # type: ignore[type-var]
    comparison = compare(doubled(), structs.replace(full(), cost=traced))
    assert any("their times cannot be compared" in why for why in comparison.obstacles)
    assert doubled().cost is not None
    other = structs.replace(doubled().cost, step_source="trace")  # type: ignore[type-var]
    both = compare(structs.replace(doubled(), cost=other), structs.replace(full(), cost=traced))
    assert not both.obstacles
    assert "the profiler slows both down, not always alike" in flat(both)


def on(result: Result, **environment: str) -> Result:
    kept = {k: v for k, v in result.environment.items() if k in ("target", "torch")}
    return structs.replace(result, environment=kept | environment)


OTHER_DEVICES = {
    "One ran on the CPU and the other on a GPU (NVIDIA H200).": (
        {"device": "cpu", "processor": "EPYC"},
        {"device": "cuda", "device_name": "NVIDIA H200"},
    ),
    "They ran on different GPUs: Tesla V100 and NVIDIA H200.": (
        {"gpu": "8 x Tesla V100"},
        {"device": "cuda", "gpu": "8 x NVIDIA H200", "device_name": "NVIDIA H200"},
    ),
    "They ran on different processors: EPYC and Xeon.": (
        {"device": "cpu", "processor": "EPYC"},
        {"device": "cpu", "processor": "Xeon"},
    ),
    "They differ in platform: Linux x86_64 and Linux aarch64.": (
        {"device": "cpu", "platform": "Linux x86_64"},
        {"device": "cpu", "platform": "Linux aarch64"},
    ),
    "They differ in threads: 2 and 64.": (
        {"device": "cpu", "threads": "2"},
        {"device": "cpu", "threads": "64"},
    ),
    "They differ in number of ranks: 1 and 8.": ({"world_size": "1"}, {"world_size": "8"}),
}


@pytest.mark.parametrize("said", OTHER_DEVICES)
def test_no_change_is_said_of_steps_that_cannot_be_compared(said: str) -> None:
    one, other = OTHER_DEVICES[said]
    comparison = compare(on(doubled(), **one), on(full(), **other))
    assert comparison.obstacles == (said,)
    assert comparison.warnings[0] == said
    assert (comparison.time_change_pct, comparison.throughput_change_pct) == (None, None)
    written = flat(comparison)
    assert written.startswith(f"The step times cannot be compared. - {said} Before: before ")
    assert written.count(said) == 1
    elements = Page(render_comparison_html(comparison)).elements
    assert sum(said in element.text for element in elements if element.tag == "li") == 1
    assert not any("chart" in element.classes for element in elements)
    for rendered in (written, render_comparison_html(comparison)):
        assert not re.search(r"less time|more time|throughput", rendered, re.I)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"gpu": "8 x Tesla V100"}, {"gpu": "4 x Tesla V100"}),
        ({"device": "cpu", "processor": "EPYC"}, {"device": "cpu", "processor": "EPYC"}),
        ({"target": "a.py"}, {"target": "b.py"}),
    ],
)
def test_the_same_device_is_no_obstacle(one: dict[str, str], other: dict[str, str]) -> None:
    comparison = compare(on(doubled(), **one), on(full(), **other))
    assert (comparison.obstacles, comparison.same_forward_work) == ((), True)
    assert "less time" in flat(comparison)
    assert "their processor" not in flat(comparison)


def test_processors_without_a_name_are_said() -> None:
    comparison = compare(on(doubled(), device="cpu"), on(full(), device="cpu"))
    assert comparison.obstacles == ()
    assert "Not both recordings name their processor" in flat(comparison)


def test_another_model_is_no_change() -> None:
    gemm, *others = full().families
    smaller = structs.replace(gemm, forward_per_step=1.0)
    comparison = compare(doubled(), structs.replace(full(), families=(smaller, *others)))
    (said,) = comparison.obstacles
    assert said.endswith("different work, in calls per step: gemm 57 and 1.")
    assert comparison.same_forward_work is False
    assert "Only before - RS001" in flat(comparison)
    assert "Went away" not in flat(comparison)


def test_the_same_calls_on_larger_inputs_are_another_model_too() -> None:
    flops = present(full().flops)
    larger = structs.replace(flops, forward_per_step=2 * present(flops.forward_per_step))
    comparison = compare(doubled(), structs.replace(full(), flops=larger))
    assert "of other sizes: 3.77e+09 and 7.54e+09" in comparison.obstacles[0]
    unknown = structs.replace(larger, uncounted=("aten::new",))
    comparison = compare(doubled(), structs.replace(full(), flops=unknown))
    assert not comparison.obstacles
    assert "The sizes of inputs and weights are not in both recordings" in flat(comparison)
    assert "The sizes of inputs" not in flat(compare(doubled(), full()))


def test_another_attention_kernel_is_the_same_model() -> None:
    families = tuple(
        structs.replace(family, family="cudnn_attention") if family.kind == "attention" else family
        for family in full().families
    )
    other = structs.replace(full(), families=families)
    assert compare(doubled(), other).same_forward_work is True


def test_work_that_cannot_be_seen_is_not_said_to_be_the_same() -> None:
    comparison = compare(doubled(), inconclusive())
    assert comparison.same_forward_work is None
    assert "do not show whether both do the same forward work" in flat(comparison)
    assert "Went away" not in flat(comparison)


def timed(result: Result, middle: float, low: float, high: float, steps: int = 10) -> Result:
    cost = structs.replace(
        present(result.cost), step_ms=middle, step_low_ms=low, step_high_ms=high, steps=steps
    )
    return structs.replace(result, cost=cost)


@pytest.mark.parametrize(
    ("spread", "difference", "said"),
    [
        ((80.0, 79.0, 81.0), "sure", "20.0 % less time, 25.0 % more throughput"),
        ((80.0, 70.0, 99.0), "none", "lies within the spread of the step times (99.0 to 101.0 ms"),
        ((60.0, 50.0, 70.0), "direction", "A step takes less time than before, 60.0 ms instead"),
        ((80.0, 79.0, 81.0, 5), None, "With fewer than six steps on a side"),
    ],
)
def test_only_what_the_spread_leaves_is_said(
    spread: tuple[float, float, float], difference: str | None, said: str
) -> None:
    comparison = compare(timed(doubled(), 100.0, 99.0, 101.0), timed(full(), *spread))
    assert comparison.difference == difference
    written = flat(comparison)
    assert said in written
    (title,) = (e for e in Page(render_comparison_html(comparison)).elements if e.tag == "h1")
    assert said in title.text
    assert ("% less time" in written) == (difference in ("sure", None))


def test_a_measured_side_is_compared_by_the_step_of_its_headline() -> None:
    measured = timed(verified(), 200.0, 199.0, 201.0)
    section, cost = present(measured.verified), present(measured.cost)
    side = compare(measured, full()).before
    assert (side.step_ms, side.step_source, side.steps) == (296.1, "measured", 20)
    assert (side.step_low_ms, side.step_high_ms) == (294.0, 299.5)
    assert side.recompute_ms == pytest.approx(cost.recompute_ms * 296.1 / 200)
    assert "20 steps of --verify" in flat(compare(measured, full()))
    # Nothing was measured of it: the headline predicts, of the timed step.
    unclear = structs.replace(measured, verified=structs.replace(section, outcome="unclear"))
    assert compare(unclear, full()).before.step_ms == 200.0


def test_the_shipped_schema_is_the_generated_one() -> None:
    shipped = (_SCHEMAS / "comparison.json").read_text("utf-8")
    assert json.loads(shipped) == json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_harmless(name: str) -> None:
    comparison = compare(hostile(name), clean(), (name, name))
    page = Page(render_comparison_html(comparison))
    assert not page.stray
    assert not page.unclosed
    plain = Page(render_comparison_html(compare(hostile("a"), clean(), ("a", "a"))))
    assert {item.tag for item in page.elements} == {item.tag for item in plain.elements}
    for line in render_comparison_text(comparison).split("\n"):
        assert columns(line) <= WIDTH
        assert line.isprintable()


def test_the_command(tmp_path: Path, capsys: Output) -> None:
    """Real recordings: the doubled example and its repaired twin."""
    names = [str(TRACES / f"{name}_llama_fsdp") for name in ("doubled", "repaired")]
    page = tmp_path / "compared.html"
    assert main(["compare", *names, "--format", "json", "--html", str(page)]) == 0
    written = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(json_schema()).validate(written)
    assert written["schema"] == SCHEMA
    assert [written[side]["verdict"] for side in ("before", "after")] == ["doubled", "full"]
    assert [mark["code"] for mark in written["findings_gone"]] == ["RS001"]
    (kept,), (gone,) = written["checkpoints_kept"], written["checkpoints_gone"]
    assert (kept["mechanism"], gone["variant"]) == ("fsdp-wrapper", "reentrant")
    # Each of 4 layers calls attention once, and again once for each recompute.
    (attention,) = (calls for calls in written["calls"] if "attention" in calls["family"])
    assert [attention[f"recomputed_{side}"] for side in ("before", "after")] == [8, 4]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")

    assert main(["compare", *names]) == 0
    printed = capsys.readouterr().out
    assert "RS001" in printed.partition("Went away")[2].partition("New")[0]
    assert all(columns(line) <= WIDTH for line in printed.splitlines())


def test_results_are_taken_as_they_stand(tmp_path: Path) -> None:
    """A run's folder gives what `run` wrote there; so does the file; so does a scan."""
    scan = rs.analyze(TRACES / "repaired_llama_fsdp")
    (tmp_path / "result.json").write_text(scan.to_json())
    by_folder = rs.compare(tmp_path, tmp_path / "result.json")
    assert by_folder.before.verdict == by_folder.after.verdict == "full"
    assert by_folder.time_change_pct == 0
    assert rs.compare(scan, scan).before == structs.replace(by_folder.before, name="before")


def test_the_shipped_twins_agree_with_the_prediction() -> None:
    """They were recorded in turn, so that one may be held against the other."""
    doubled, repaired = (
        rs.analyze(Path(__file__).parents[1] / "traces" / name).result
        for name in ("doubled_llama_fsdp", "repaired_llama_fsdp")
    )
    assert doubled.cost is not None
    found = compare(doubled, repaired, ("doubled", "repaired"))
    assert found.after.step_ms is not None
    assert doubled.cost.predicted_low_ms <= found.after.step_ms <= doubled.cost.predicted_high_ms
    assert found.difference == "sure"
    assert not found.obstacles
