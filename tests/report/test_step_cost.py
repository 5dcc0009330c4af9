"""How sure a step time is, said alike in every rendering."""

import json
from typing import Literal

from examples.read_results import step_figures, step_lines
from msgspec import structs

import recompute_scan as rs
from recompute_scan.report.layout import measured_sentences
from recompute_scan.report.render import render_html, render_markdown, render_text
from recompute_scan.report.sections.cost import step_time_sentences
from recompute_scan.result import from_json, to_json
from tests.present import present
from tests.report.sample_results import doubled, measurement, verified


def spread(
    low: float | None, high: float | None, steps: int, source: Literal["timed", "trace"] = "timed"
) -> str:
    """What the renderings say of the doubled result's step times, all the same."""
    result = doubled()
    assert result.cost is not None
    cost = structs.replace(
        result.cost,
        step_source=source,
        step_ms=100.0,
        step_low_ms=low,
        step_high_ms=high,
        steps=steps,
    )
    result = structs.replace(result, cost=cost)
    said = " ".join(step_time_sentences(result))
    assert said in " ".join(render_text(result, color=False).split())
    assert said in render_markdown(result)
    assert said.replace("--timing-steps", "<code>--timing-steps</code>") in render_html(result)
    return said


def test_a_step_time_says_how_many_steps_it_is_of_and_how_far_they_lie_apart() -> None:
    head = "Step time on the CPU"
    assert spread(99.0, 102.5, 10) == (
        f"{head}: median of 10 steps without the profiler; likely between 99.0 and 102.5 ms."
    )
    # The range of five times holds their median less surely than with 95 %.
    assert spread(99.0, 102.5, 5, "trace") == (
        f"{head}: median of 5 recorded steps, slowed down by the profiler; all between 99.0 and "
        "102.5 ms."
    )
    assert spread(None, None, 1) == (
        f"{head}: 1 step without the profiler; how far step times vary is not known."
    )
    # A result of an older version.
    assert spread(None, None, 0) == f"{head}, timed without the profiler."


def test_step_times_that_vary_too_much_are_said_to() -> None:
    assert "vary too much" not in spread(90.0, 115.0, 10)
    assert "The step times vary too much to rely on" in spread(90.0, 115.1, 10)


def test_results_of_older_versions_are_still_read() -> None:
    written = json.loads(to_json(doubled()))
    for name in ("step_low_ms", "step_high_ms", "steps"):
        del written["cost"][name]
    cost = present(from_json(json.dumps(written)).cost)
    assert (cost.step_low_ms, cost.step_high_ms, cost.steps) == (None, None, 0)


def test_what_was_measured_has_a_table_of_its_own() -> None:
    assert "Step time on" not in render_text(verified(), color=False)
    assert "Step time on" not in render_markdown(verified())


def test_a_measured_saving_known_to_half_of_itself_is_said_without_digits() -> None:
    """Seen while three other processes were busy: 517.3 ms before, 429.6 after."""
    measured = structs.replace(
        measurement(), saving_ms=87.8, saving_pct=17.0, saving_low_ms=23.2, saving_high_ms=177.5
    )
    assert measured.saving_is_rough
    result = structs.replace(doubled(), verified=measured)
    for said in (render_text(result, color=False), render_markdown(result), render_html(result)):
        assert "17.0 %" not in said
        assert "about a fifth" in said
        assert "vary too much to say how much" in " ".join(said.split())
    again = rs.Scan(from_json(to_json(result)))
    assert step_figures(again) is None
    assert "too noisy" in step_lines(again)[0]
    assert "likely 23.2 to 177.5 ms" in measured_sentences(result)[0]


def test_a_measured_saving_known_better_than_that_has_its_digits() -> None:
    result = verified()
    assert not present(result.verified).saving_is_rough
    assert "16.6 %" in render_text(result, color=False)
    assert step_figures(rs.Scan(result)) is not None
