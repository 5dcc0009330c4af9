"""Sections on layers: each block, each run, call sites, recomputes by design, families."""

from __future__ import annotations

from recompute_scan.report import words
from recompute_scan.report.blocks import (
    BlockGroup,
    Page,
    Section,
    analysed,
    block_groups,
    checkpoint_stacks,
)
from recompute_scan.report.figures import family_table, timeline
from recompute_scan.report.templating import markdown_code, markdown_prose, proof_trace, visible
from recompute_scan.report.words import COLUMNS, HOW, plain_count_table
from recompute_scan.result import ByDesign, Checkpoint, Result
from recompute_scan.units import ms, plural, times

# Rows of the table of blocks: shown at once, and folded away below it.
MOST_ROWS, MOST_FOLDED = 60, 2000
_MOST_GROUPS_TEXT = 8
_MOST_GROUPS_MARKDOWN = 12
# From here on a block ran again more often than once.
_MORE_THAN_ONCE = 1.005


def _block_by_block_text(page: Page, result: Result) -> None:
    groups = block_groups(result.regions)
    page.title("Blocks")
    for group in groups[:_MOST_GROUPS_TEXT]:
        more = group.first.recompute_runs_per_backward >= _MORE_THAN_ONCE
        page.prose(_group_words(group, more=more), "    ", "  ", fg="red" if more else None)
    if len(groups) > _MOST_GROUPS_TEXT:
        page.prose(f"and {len(groups) - _MOST_GROUPS_TEXT} more kinds of block (see the report)")


def _group_words(group: BlockGroup, *, more: bool) -> str:
    kind = f" ({visible(group.first.module_class, 30)})" if group.first.module_class else ""
    each = " each" if len(group.regions) > 1 else ""
    redundant = f", {ms(group.redundant_ms)} redundant per step" if more else ""
    recomputes = times(group.first.recompute_runs_per_backward)
    return f"{visible(group.label, 60)}{kind}: {recomputes} recomputes{each}{redundant}"


def _block_by_block_markdown(result: Result) -> str:
    groups = block_groups(result.regions)
    rows = [
        f"| {markdown_code(group.label, 80)} | {len(group.regions)} "
        f"| **{times(group.first.recompute_runs_per_backward)}** "
        f"| {ms(group.recompute_ms)} | {ms(group.redundant_ms)} |"
        for group in groups[:_MOST_GROUPS_MARKDOWN]
    ]
    head = ["| Block | Number | Recomputes each | Recomputes per step | Redundant per step |"]
    table = "\n".join([*head, "| --- | ---: | ---: | ---: | ---: |", *rows])
    more = len(groups) - _MOST_GROUPS_MARKDOWN
    return table + (f"\n\n{plural(more, 'more kind')} of block left out." if more > 0 else "")


BLOCK_BY_BLOCK = Section(
    anchor="modules",
    title="Block by block",
    template="block_by_block.html",
    present=lambda result: analysed(result) and bool(result.regions),
    html=lambda result: {
        "groups": block_groups(result.regions),
        "most_rows": MOST_ROWS,
        "most_folded": MOST_FOLDED,
    },
    text=_block_by_block_text,
    markdown=_block_by_block_markdown,
    link="Blocks",
    help=(
        "Block by block",
        "counts every block. 0 did not run again, 1 is ordinary, 2 and more is doubled. With "
        "several ranks, those alike share a row.",
    ),
)


def _is_drawn(result: Result) -> bool:
    return result.proof is not None and bool(result.proof.lanes)


def _title(result: Result) -> str:
    return (
        "The proof: one block, run by run"
        if _is_drawn(result)
        else "The count that anyone can redo"
    )


RUN_BY_RUN = Section(
    anchor="proof",
    title=_title,
    template="run_by_run.html",
    present=lambda result: (
        analysed(result) and (_is_drawn(result) or bool(plain_count_table(result)))
    ),
    html=lambda result: {
        "proof": timeline(result),
        "families": family_table(result.proof) if result.proof else [],
        "excerpt": proof_trace(result.proof) if result.proof else "",
        "plain_rows": plain_count_table(result),
        "plain_columns": COLUMNS,
        "plain_how": HOW,
    },
    link="Proof",
    help=(
        "The proof",
        "puts the runs of one block under one another: what ran in the forward pass, and what of "
        "it ran again in each recompute. `Enlarge` widens the drawing.",
    ),
)


_CHECKPOINT_SITES_TITLE = "Checkpoint call sites"
# A statement is shown on one line of a terminal, which ends so many columns before its edge.
_MARGIN = 12
_MOST_TEXT = 3
_MOST_MARKDOWN = 6


def _checkpoint_sites_text(page: Page, result: Result) -> None:
    stacks = checkpoint_stacks(result.regions)
    if not stacks:
        return
    page.title(f"{_CHECKPOINT_SITES_TITLE}, outer to inner")
    for stack in stacks[:_MOST_TEXT]:
        page.prose(f"{visible(stack.label, 120)}:")
        for number, checkpoint in enumerate(stack.checkpoints, start=1):
            _checkpoint_text(page, number, checkpoint)
    if len(stacks) > _MOST_TEXT:
        page.prose(f"and {len(stacks) - _MOST_TEXT} more arrangements (see the report)")


def _checkpoint_text(page: Page, number: int, checkpoint: Checkpoint) -> None:
    mechanism = visible(words.mechanism_words(checkpoint), 60)
    page.prose(f"{number}. {words.variant_words(checkpoint)}: {mechanism}", "     ", "  ")
    if not checkpoint.call_site:
        return
    page.written.append(" " * 5 + page.style(visible(checkpoint.call_site, 200), fg="cyan"))
    if source := words.one_line(checkpoint.source):
        longest = page.width - _MARGIN
        cut = source if len(source) <= longest else source[:longest] + "…"
        page.verbatim(visible(cut, 200), "       ", dim=True)


def _checkpoint_sites_markdown(result: Result) -> str:
    stacks = checkpoint_stacks(result.regions)
    if not stacks:
        return ""
    written = [f"#### {_CHECKPOINT_SITES_TITLE}, outer to inner"]
    for stack in stacks[:_MOST_MARKDOWN]:
        items = [
            f"{number}. {_checkpoint_markdown(checkpoint)}"
            for number, checkpoint in enumerate(stack.checkpoints, start=1)
        ]
        written.append("\n".join([f"Blocks {markdown_code(stack.label, 120)}:", "", *items]))
    return "\n\n".join(written)


def _checkpoint_markdown(checkpoint: Checkpoint) -> str:
    mechanism = markdown_prose(words.mechanism_words(checkpoint)[:200])
    text = f"{words.variant_words(checkpoint)}: {mechanism}"
    if checkpoint.call_site:
        text += f", {markdown_code(checkpoint.call_site)}"
    if checkpoint.source:
        text += f": {markdown_code(words.one_line(checkpoint.source), 200)}"
    return text


def _checkpoint_sites_present(result: Result) -> bool:
    named = any(region.checkpoints for region in result.regions)
    return analysed(result) and (named or words.by_checkpoints(result))


CHECKPOINT_SITES = Section(
    anchor="who",
    title=_CHECKPOINT_SITES_TITLE,
    template="checkpoint_sites.html",
    present=_checkpoint_sites_present,
    html=lambda result: {"stacks": checkpoint_stacks(result.regions)},
    text=_checkpoint_sites_text,
    markdown=_checkpoint_sites_markdown,
    link="Call sites",
    help=(
        _CHECKPOINT_SITES_TITLE,
        "name the lines of the script that switched checkpointing on, outermost first.",
    ),
)


_RECOMPUTED_BY_DESIGN_TITLE = "Recomputed by the model's own design"
_MOST_ROWS = 50
_MOST_NAMES = 3
_OTHERS = (
    "Functions that run parts of themselves again in their own backward, as chunked losses and "
    "fused activations do, are not counted."
)


def _count(number: float) -> str:
    return f"{number:.0f}" if number == int(number) else f"{number:.1f}"


def _inside(one: ByDesign) -> str:
    names = [visible(name, 80) for name in one.inside[:_MOST_NAMES]]
    rest = len(one.inside) - len(names)
    said = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{said}, and {plural(rest, 'other')}" if rest else said


def _sentence(one: ByDesign) -> str:
    again, forward = _count(one.recomputed_per_step), _count(one.forward_per_step)
    took = ms(one.recompute_ms_per_step)
    if one.kernels_per_step:
        took = f"{_count(one.kernels_per_step)} kernels, {took}"
    if one.with_gradients:
        return (
            f"{visible(one.function, 80)} runs its own block once more in {again} of its gradients "
            f"per step ({took}). It is written that way; checkpoints around it come on top."
        )
    if one.inside == (one.function,):
        return (
            f"{visible(one.function, 80)} runs its own block once more without gradients in "
            f"{again} backward calls per step, as a reversible layer does to get its input back, "
            f"and then again with gradients, which is its one recompute ({took} for the former)."
        )
    return (
        f"{visible(one.function, 80)} runs {again} times again per step in the gradients of "
        f"{_inside(one)}, and {forward} times in the forward pass ({took})."
    )


RECOMPUTED_BY_DESIGN = Section(
    anchor="by-design",
    title=_RECOMPUTED_BY_DESIGN_TITLE,
    template="recomputed_by_design.html",
    present=lambda result: bool(result.by_design),
    lead=lambda result: [*map(_sentence, result.by_design[:_MOST_ROWS]), _OTHERS],
    link="By design",
    help=(
        _RECOMPUTED_BY_DESIGN_TITLE,
        "lists functions that other functions run again in their own gradients, and "
        "reversible layers, which run theirs once to get their input back: forward work that runs "
        "again without a checkpoint.",
    ),
)


STEPS_AND_FAMILIES = Section(
    anchor="steps",
    title="Steps and operator families",
    template="steps_and_families.html",
    present=lambda result: analysed(result) and bool(result.steps or result.families),
)
