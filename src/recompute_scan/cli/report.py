"""``recompute-scan report``: the page again, from a result."""

from __future__ import annotations

from pathlib import Path

import click

from recompute_scan.cli.output import debug_option, force_option, open_option, say, show_page
from recompute_scan.files import read, write
from recompute_scan.terminal import inert


@click.command(short_help="Make the HTML report again from a result.")
@click.argument("result", type=click.Path(path_type=Path))
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it.  [default: report.html beside the result]",
)
@force_option
@open_option
@debug_option
def report(result: Path, html: Path | None, force: bool, open_page: bool, debug: bool) -> int:
    """Make the HTML report again from RESULT, the JSON that `run` or `analyze` wrote."""
    from recompute_scan.report.render import render_html
    from recompute_scan.result import from_json

    text = read(result, held=True)
    target = html or result.with_name("report.html")
    # The page beside a result is ours to make again.
    known = result.parent if result.name == "result.json" else result
    page = render_html(from_json(text), folder=str(known))
    write(target, page, force=force or html is None)
    say(f"{inert(str(target))}\n")
    if open_page:
        show_page(target)
    return 0
