"""``recompute-scan compare``: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from recompute_scan.cli.output import (
    clear,
    debug_option,
    files,
    force_option,
    newest,
    progress,
    say,
    verbose_option,
)
from recompute_scan.files import refuse_existing, write


@click.command(short_help="Set two runs side by side.")
@click.argument("before", callback=newest, shell_complete=files)
@click.argument("after", callback=newest, shell_complete=files)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page.")
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="What to print.",
)
@force_option
@verbose_option
@debug_option
def compare(
    before: str,
    after: str,
    html: Path | None,
    style: Literal["text", "json"],
    force: bool,
    verbose: bool,
) -> int:
    """Say what differs between BEFORE and AFTER: counts, step time, findings, checkpoints.

    Each is a folder that `run` wrote, a trace or a folder of traces, or a result.json.
    """
    from recompute_scan.analysis.pipeline import result_at
    from recompute_scan.result import compare

    if html is not None:
        refuse_existing(html, force=force)
    results = [result_at(address, progress) for address in (before, after)]
    clear()
    comparison = compare.compare(results[0], results[1], (before, after))
    if html is not None:
        from recompute_scan.report.compared import render_comparison_html

        write(html, render_comparison_html(comparison), force=force)
    if style == "json":
        text = compare.to_json(comparison)
    else:
        from recompute_scan.report import compared

        in_full, in_short = compared.render_comparison_text, compared.render_comparison_answer
        text = (in_full if verbose else in_short)(comparison)
    say(text, style)
    return 0
