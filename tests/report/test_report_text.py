import re
import unicodedata
from collections.abc import Callable

import click
import pytest
from msgspec import structs

from recompute_scan.report.blocks import WIDTH, columns, wrap
from recompute_scan.report.finding_words import explanation
from recompute_scan.report.render import render_answer, render_text
from recompute_scan.report.sections.answer import MOST_LINES
from recompute_scan.report.templating import sentence, visible
from recompute_scan.result import CrossCheck, PlainCount, Result
from recompute_scan.result.run_record import NextCommand
from tests.present import present
from tests.report.pages import RESULTS, recorded, traced
from tests.report.sample_results import (
    DIFF,
    HOSTILE,
    clean,
    doubled,
    full,
    hostile,
    inconclusive,
    many,
    partial,
    verified,
)
from tests.report.test_sentences import results

CASES = [doubled, verified, full, clean, partial, inconclusive, lambda: many(200)]


@pytest.mark.parametrize("case", CASES)
def test_fits_a_terminal(case: Callable[[], Result]) -> None:
    result = case()
    report = "/a/" + "deep/" * 30 + "report.html"
    for line in render_text(result, color=False, report=report).splitlines():
        to_copy = line.strip() == report or line[4:] in DIFF.splitlines() or "train.py:31 " in line
        to_copy = to_copy or "  recompute-scan " in line
        assert columns(line) <= WIDTH or to_copy, line
        assert not any(unicodedata.category(char) in ("Cc", "Cf", "Cs") for char in line)


def test_the_answer_has_at_most_15_lines_of_80_columns() -> None:
    """Of every kind of result, also of such as no analysis gives; `-v` is there for the rest."""
    kinds = (*results(), *(case() for case in (*CASES, *RESULTS.values())))
    for result in (*kinds, *map(hostile, HOSTILE)):
        written = render_answer(result, color=False, report="out/train/report.html", folder="t")
        lines = written.splitlines()
        assert len(lines) <= MOST_LINES, written
        copied: tuple[str, ...] = (
            "  record ",
            "  compare ",
            "  measure ",
            "  gradients ",
            "  plan ",
        )
        copied = ("    ",) if result.plan is not None else copied  # code
        assert all(columns(line) <= WIDTH or line.startswith(copied) for line in lines), written
        coloured = render_answer(result, color=True, report="out/train/report.html", folder="t")
        assert click.unstyle(coloured) == written


def test_a_log_is_explained_in_15_lines() -> None:
    (finding,) = doubled().findings
    words = "word " * 200
    fix = structs.replace(present(finding.fix), summary=words)
    wordy = structs.replace(finding, title=words, detail=words, evidence=(words,) * 9, fix=fix)
    for causes, first in (([wordy] * 2, words), ([], words), ([wordy], None), ([], None)):
        said = explanation(causes, [wordy] * 9, first, color=False, verbose=False)
        assert all(columns(line) <= WIDTH for line in said.splitlines())
        assert len(said.splitlines()) <= MOST_LINES, said


def test_the_answer_has_what_to_do() -> None:
    """The two steps, both call sites, the line to delete, what to look at and the next command."""
    written = render_answer(traced("doubled_llama_fsdp"), color=False, report="r.html", folder="t")
    for wanted in (
        "Verdict: doubled. Every block runs its forward 2 more times",
        "A step takes 281.0 ms, with the fix about 225.9 ms (likely 215.4 to 236.4 ms).",
        "  examples/doubled_llama_fsdp.py:79  non-reentrant: PyTorch's checkpoint wrapper\n",
        "  examples/doubled_llama_fsdp.py:95  reentrant: Hugging Face's gradient_",
        "    - model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={",
        "  Risk: review it before you apply it. With a KV cache",
        "  report   r.html\n  see      recompute-scan fix t\n",
    ):
        assert wanted in written, written
    assert "confidence" not in written


def _commands(measure: str, record: str, compare: str) -> tuple[NextCommand, ...]:
    return (
        NextCommand("see", f"{record}: see"),
        NextCommand("apply", f"{record}: apply"),
        NextCommand("measure", measure),
        NextCommand("record", record),
        NextCommand("compare", compare),
    )


_AFTER = _commands("measure", "do it", "compare")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_on_their_line(name: str) -> None:
    result = hostile(name)
    plain = hostile("a plain name")
    written = render_text(result, color=False, report=name, after=_commands(name, name, name))
    copied = (visible(name, 200)[:20], visible(name, 4096)[:20], "-" + name[:5], "+" + name[:5])
    for line in written.split("\n"):
        command = line.strip().partition("  ")[2].strip()
        to_copy = name and (line.strip().startswith(copied) or command.startswith(copied))
        assert columns(line) <= WIDTH or to_copy, line
        assert line.isprintable()
    sections = [line for line in written.split("\n") if line and line[0].isalpha()]
    known = render_text(plain, color=False, report="x", after=_commands("x", "y", "z")).split("\n")
    titles = {line for line in known if line and line[0].isalpha() and line != "a plain name"}
    assert titles <= set(sections)


def test_calls_in_the_backward_pass_that_never_ran_are_not_said_to_have_run() -> None:
    """One linear layer in a checkpoint: its recompute stops before the product is worked out."""
    counts = (PlainCount("aten::addmm", outside=6, inside=4, in_hooks=0, matched=4),)
    result = structs.replace(clean(), cross_check=CrossCheck(True, counts))
    text = " ".join(render_text(result, color=False, report="report.html").split())
    assert "4 calls of addmm inside the backward pass that all stopped before their end" in text


@pytest.mark.parametrize("case", [*CASES, lambda: hostile(HOSTILE[6])])
def test_colour_changes_nothing_but_codes(case: Callable[[], Result]) -> None:
    plain = render_text(case(), color=False, report="report.html", after=_AFTER[1:])
    coloured = render_text(case(), color=True, report="report.html", after=_AFTER[1:])
    assert "\x1b" not in plain
    assert "\x1b[" in coloured
    assert click.unstyle(coloured) == plain


def test_doubled_says_it_all() -> None:
    after = _commands("run --verify x.py", "run -o after x.py", "compare out after")
    written = render_text(doubled(), color=False, report="out/report.html", after=after)
    flat = " ".join(written.split())
    for wanted in (
        "Verdict: doubled",
        doubled().headline,
        "Recomputes per layer 2.0",
        "Share of the step 16.3 %",
        "Step time after 247.7 ms 295.9 ms now; likely 240.5 to 257.3 ms after the fix",
        "With the fix a step takes about 247.7 ms instead of 295.9 ms: 16.3 % less time, 19.5 % "
        "more throughput.",
        "model.layers.0-7 (LlamaDecoderLayer): 2.0 recomputes each, 49.6 ms redundant per step",
        "train.py:31 apply_activation_checkpointing(",
        "train.py:24 model.gradient_checkpointing_enable(",
        "RS001 doubled-checkpoint (error, high confidence)",
        "The last recorded step was cut short",
    ):
        assert wanted in flat, wanted
    assert flat.index("train.py:31 ") < flat.index("train.py:24 ")
    for line in DIFF.splitlines():
        assert f"    {line}\n" in written
    assert written.endswith(
        "Report\n  out/report.html\n\n"
        "Next\n"
        "  see      run -o after x.py: see\n"
        "  measure  run --verify x.py\n"
        "  apply    run -o after x.py: apply\n"
    )
    assert "events without duration" not in written


def test_what_was_measured_stands_before_what_was_predicted() -> None:
    flat = " ".join(render_text(verified(), color=False).split())
    for wanted in (
        "Share of the step 16.6 % saved by the fix (measured)",
        "Step time after 246.9 ms measured with the fix applied; 296.1 ms now; 247.9 ms was",
        "The fix saves 49.2 ms per step (likely 45.2 to 54.4 ms)",
        "16.6 % less time, 19.9 % more throughput",
        "Step time 296.1 ms 246.9 ms",
        "Predicted - 247.9 ms",
        "Process memory 869.8 MiB 868.8 MiB",
        "all 13 losses are equal to the last bit",
        "247.9 ms (likely 240.6 to 257.5 ms) instead of the 296.1 ms measured unchanged",
    ):
        assert wanted in flat, wanted
    assert "(predicted)" not in flat


def test_the_plan_stands_beside_the_fix() -> None:
    """Four ways are too wide for one table."""
    result = verified()
    section = present(result.verified)
    section = structs.replace(section, without_checkpointing=section.after)
    result = structs.replace(result, verified=section)
    written = render_text(result, color=False)
    assert all(columns(line) <= WIDTH for line in written.splitlines() if "train" not in line)
    flat = " ".join(written.split())
    for wanted in (
        "Unchanged With the fix With the plan Step time 296.1 ms 246.9 ms 221.4 ms",
        "Predicted - 247.9 ms 217.1 ms",
        "GPU memory, allocated not known not known 65.0 GiB",
        "No checkpoints Step time 246.9 ms",
        "With the plan of RS301 (1 layer without checkpoints) a step takes 221.4 ms, predicted "
        "217.1 ms; at most 65.0 GiB are allocated, predicted 66.0 GiB. Its losses equal the",
        "in turn (unchanged, with the fix, with the plan, without checkpoints)",
    ):
        assert wanted in flat, wanted


def test_the_prediction_is_of_the_step_that_was_measured() -> None:
    """Twice as slow an hour as the one that the prediction was made in."""
    result = verified()
    section = present(result.verified)
    slower = structs.replace(
        section,
        before_step_ms=592.2,
        after_step_ms=493.8,
        after=structs.replace(present(section.after), step_ms=493.8),
    )
    result = structs.replace(result, verified=slower)
    flat = " ".join(render_text(result, color=False).split())
    assert "592.2 ms now; 495.7 ms was predicted" in flat
    assert "Predicted - 495.7 ms" in flat
    assert "measured unchanged. The measured step is in that range" in flat


def test_deep_models_take_a_line_a_kind() -> None:
    written = render_text(many(200), color=False)
    assert "model.layers.0-198 (LlamaDecoderLayer): 2.0 recomputes each" in written
    assert "model.layers.199 (LlamaDecoderLayer): 1.0 recomputes\n" in written
    assert len(written.splitlines()) < 85


def test_clean_result_is_calm() -> None:
    written = render_text(clean(), color=False)
    assert "No checkpoint needs a change" in " ".join(written.split())
    assert "redundant per step" not in written
    assert "more time" not in written
    assert "Finding" not in written


def test_inconclusive_says_why_and_what_to_do() -> None:
    flat = " ".join(render_text(inconclusive(), color=False).split())
    assert "The trace holds no backward pass." in flat
    assert "recompute-scan run --steps 5 train.py" in flat
    assert flat.count("not known") == 3
    assert " 0" not in flat.split("Why,")[0]


def test_broken_rule_is_worth_knowing() -> None:
    rule = structs.replace(doubled().checked[0], status="error", why="division by zero")
    written = render_text(structs.replace(clean(), checked=(rule,)), color=False)
    assert "RS001 could not be checked: division by zero" in written


def test_wrapping_counts_columns_and_cuts_long_words() -> None:
    for text in ("字" * 300, "a" * 300, "wide 字字 and " * 40, ""):
        written = wrap(text, "    ", "  - ")
        assert all(columns(line) <= WIDTH for line in written)
        joined = "".join(line[4:] for line in written)
        assert joined.replace(" ", "") == text.replace(" ", "")


def test_a_number_and_its_unit_stay_on_one_line() -> None:
    for length in range(60, 80):
        lines = wrap(f"{'x' * length} 32.6 % more, 12 ms; of 4 layers", "", "")
        assert any("32.6 %" in line for line in lines)
        assert any("12 ms;" in line for line in lines)
        assert all(columns(line) <= WIDTH for line in lines)


def test_a_statement_over_several_lines_takes_one() -> None:
    region = doubled().regions[0]
    outer = structs.replace(region.checkpoints[0], source="apply(\n    model,\n)")
    result = structs.replace(doubled(), regions=(structs.replace(region, checkpoints=(outer,)),))
    assert "train.py:31\n       apply(model)\n" in render_text(result, color=False)


def test_a_sentence_is_cut_at_the_end_of_a_word() -> None:
    text = "Keep the wrapper, and delete the call of gradient_checkpointing_enable at train.py:31."
    for limit in range(12, len(text)):
        cut = sentence(text, limit)
        assert len(cut) <= limit
        kept = cut.removesuffix(" …")
        assert kept != cut
        assert re.match(r"[ ,;:(]", text[len(kept) :]), cut
    assert sentence(text, len(text)) == text
    assert sentence("x" * 50, 11) == "xxxxx…xxxxx"
    assert "\x1b" not in sentence("a \x1b[31m b", 40)


def test_a_plan_that_is_the_scripts_own_arrangement_promises_nothing() -> None:
    """However much two measurements of it differ; but of two checkpoints around each module, which
    hold what one does, the plan is faster.
    """
    result = recorded("planned")
    plan = present(result.plan)
    modules = tuple(structs.replace(one, recompute=one.checkpointed) for one in plan.modules)
    own = structs.replace(plan, modules=modules, plan=plan.today)
    faster = structs.replace(plan.today, step_ms=0.8 * plan.today.step_ms)
    doubled = structs.replace(own, plan=faster)
    said, other = (
        " ".join(render_text(structs.replace(result, plan=one), color=False).split())
        for one in (own, doubled)
    )
    assert "Against today: nothing changes." in said
    assert "Against today: nothing changes." not in other
    assert "Proof The script already does this." in said


def test_a_plan_tells_of_selective_checkpoints() -> None:
    result = recorded("planned")
    assert result.plan is not None
    first, *others = result.plan.modules
    modules = (structs.replace(first, selective=True), *others)
    written = render_text(
        structs.replace(result, plan=structs.replace(result.plan, modules=modules)), color=False
    )
    assert "checkpoint 2 of 4 layers, 1 selectively" in written
    for words in ("Recompute: blocks.1", "Recompute selectively: blocks.0", "Keep: blocks[2-3]"):
        assert words in written


@pytest.mark.parametrize(
    ("parts", "headline", "groups"),
    [
        (("mlp",) * 4, "checkpoint mlp of all 4 layers", ("Recompute mlp: blocks[0-3]",)),
        (
            ("", "", "mlp", "mlp"),
            "checkpoint 2 of 4 layers, mlp of 2 more",
            ("Recompute: blocks[0-1]", "Recompute mlp: blocks[2-3]"),
        ),
        (
            (None, None, "mlp", "attention"),
            "checkpoint parts of 2 of 4 layers",
            ("Keep: blocks[0-1]", "Recompute attention: blocks.3", "Recompute mlp: blocks.2"),
        ),
        ((None, None, None, "\x1b[31m"), "of 1 of 4 layers", ("Keep: blocks[0-2]",)),
    ],
)
def test_a_plan_tells_of_parts(
    parts: tuple[str | None, ...], headline: str, groups: tuple[str, ...]
) -> None:
    """A layer without a name of a part is recomputed whole where that is empty, else kept."""
    result = recorded("planned")
    modules = tuple(
        structs.replace(one, recompute=part == "", parts=(part,) if part else ())
        for one, part in zip(present(result.plan).modules, parts, strict=True)
    )
    plan = structs.replace(present(result.plan), modules=modules)
    written = render_text(structs.replace(result, plan=plan), color=False)
    assert headline in " ".join(written.split())
    assert "\x1b" not in written
    for words in groups:
        assert words in written


def test_the_weightiest_finding_comes_first() -> None:
    base = structs.replace(doubled().findings[0], fix=None, saving_ms=None)
    low, high, saving = (
        structs.replace(base, code=code, severity=severity, saving_ms=ms)
        for code, severity, ms in (("RS313", "info", None), ("RS324", "warning", None),
                                   ("RS322", "info", 2.0))
    )  # fmt: skip
    wrong = structs.replace(base, code="RS404", severity="warning", wrong_gradients=True)
    for findings, first in (
        ((low, high), "RS324"),
        ((low, saving, high), "RS322"),
        ((saving, wrong), "RS404"),
    ):
        result = structs.replace(full(), findings=findings)
        assert f"  {first} " in render_answer(result, color=False)
