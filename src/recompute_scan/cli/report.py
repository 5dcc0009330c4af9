"""``recompute-scan report``: the page again, from a result."""

from __future__ import annotations

from pathlib import Path

import click

from recompute_scan.cli.output import (
    debug_option,
    files,
    force_option,
    newest,
    open_option,
    say,
    show_page,
)
from recompute_scan.files import read, write
from recompute_scan.terminal import inert


@click.command(short_help="Make the HTML report again from a result.")
@click.argument("result", callback=newest, shell_complete=files)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it.  [default: report.html beside the result]",
)
@force_option
@open_option
@debug_option
def report(result: str, html: Path | None, force: bool, open_page: bool) -> int:
    """Make the HTML report again from RESULT: a run's folder, or the JSON that `analyze` wrote."""
    from recompute_scan.report.render import render_html
    from recompute_scan.result import from_json

    source = Path(result)
    source = source / "result.json" if source.is_dir() else source
    text = read(source, held=True)
    target = html or source.with_name("report.html")
    # The page beside a result is ours to make again.
    known = source.parent if source.name == "result.json" else source
    page = render_html(from_json(text), folder=str(known))
    write(target, page, force=force or html is None)
    say(f"{inert(str(target))}\n")
    if open_page:
        show_page(target)
    return 0
