"""``recompute-scan check``: refuse what a project does not want, in CI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from recompute_scan.cli.analyze import lifted, limit_options
from recompute_scan.cli.output import (
    Number,
    ci_format_option,
    debug_option,
    files,
    force_option,
    newest,
    output_option,
    progress,
    put,
)
from recompute_scan.files import read, refuse_existing, write

if TYPE_CHECKING:
    from recompute_scan.result import Result
    from recompute_scan.trace import Limits


@click.command(short_help="Refuse doubled checkpointing, in CI.")
@click.argument("traces", nargs=-1, required=True, callback=newest, shell_complete=files)
@click.option(
    "--fail-on",
    metavar="WHAT,…",
    help="What to refuse: doubled, wrong-gradients, any, none, or codes such as RS001.  "
    "[default: doubled]",
)
@click.option(
    "--max-recompute",
    type=Number(0),
    help="Refuse more recomputes per backward than this.",
)
@click.option(
    "--max-cost",
    "costs",
    multiple=True,
    metavar="PCT|CODE=PCT",
    help="Refuse redundant recomputes, or one finding, above this share of the step.",
)
@click.option(
    "--baseline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Accept what this file lists.",
)
@click.option(
    "--write-baseline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a file that accepts all that is found now, and pass.",
)
@ci_format_option
@output_option
@force_option
@debug_option
@limit_options
def check(
    traces: tuple[str, ...],
    fail_on: str | None,
    max_recompute: float | None,
    costs: tuple[str, ...],
    baseline: Path | None,
    write_baseline: Path | None,
    style: str,
    output: Path | None,
    force: bool,
    **limits: int | None,
) -> int:
    """Refuse TRACES that show what this project does not want.

    TRACES are as for `analyze`, or one result.json. Ends with 0 when they pass, with 1 when
    something is refused, with 4 when there is no verdict. Without any threshold, doubled
    checkpointing is refused. [tool.recompute-scan.check] of a project's pyproject.toml may say the
    same; options given here go before it.
    """
    from recompute_scan.check import judge
    from recompute_scan.check.formats import RENDERINGS
    from recompute_scan.check.policy import baseline_json, parse_baseline, parse_thresholds
    from recompute_scan.project_file import check_settings

    project = check_settings(Path.cwd())
    policy = parse_thresholds(
        fail_on or project.fail_on,
        project.max_recompute if max_recompute is None else max_recompute,
        costs or project.max_cost,
    )
    for target in (output, write_baseline):
        if target is not None:
            refuse_existing(target, force=force)
    typed, baseline = baseline is not None, baseline or project.baseline
    accepted = parse_baseline(read(baseline, held=typed), baseline.name) if baseline else ()
    result = _result(traces, lifted(limits))
    if write_baseline is not None:
        listed = baseline_json(result)
        write(write_baseline, listed, force=force)
        accepted = (*accepted, *parse_baseline(listed.encode(), write_baseline.name))
    outcome = judge(result, policy, accepted)
    rendered = RENDERINGS[style](outcome)
    put(rendered, output, style, force=force)
    return outcome.status


def _result(traces: tuple[str, ...], limits: Limits) -> Result:
    """The result of the traces, or the one that was written earlier."""
    from recompute_scan.analysis.pipeline import analyse, written_result

    written = written_result(Path(traces[0])) if len(traces) == 1 else None
    if written is not None:
        return written
    return analyse(traces, progress, limits)
