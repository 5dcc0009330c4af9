"""``recompute-scan lint``: what scripts and configurations switch on, without running them."""

from __future__ import annotations

from pathlib import Path

import click

from recompute_scan.cli.output import (
    announce,
    ci_format_option,
    debug_option,
    force_option,
    output_option,
    put,
)
from recompute_scan.files import refuse_existing


@click.command(short_help="Read scripts and configurations, run nothing.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--diff", "as_diff", is_flag=True, help="Print the edits as one diff, for patch -p1.")
@click.option("--list", "as_list", is_flag=True, help="Print what is switched on, doubled or not.")
@ci_format_option
@output_option
@force_option
@debug_option
def lint(
    paths: tuple[Path, ...],
    as_diff: bool,
    as_list: bool,
    style: str,
    output: Path | None,
    force: bool,
) -> int:
    """Say which checkpoints PATHS will switch on twice, without running anything.

    PATHS are Python scripts, shell scripts, YAML, JSON and TOML, or folders of them. Ends with 0,
    with 1 when something is certainly wrong, with 4 when a file named here was not read. What
    only may be wrong is a warning; `recompute-scan run` counts. What a project wants otherwise
    is read from [tool.recompute-scan.lint] of its pyproject.toml.
    """
    from recompute_scan.lint import lint as read
    from recompute_scan.lint.library_calls import installed_version
    from recompute_scan.lint.output import RENDERINGS, closing, diff, listed
    from recompute_scan.project_file import lint_settings

    if output is not None:
        refuse_existing(output, force=force)
    report = read(paths, lint_settings(Path.cwd()), installed_version())
    if not report.read and not report.unread:
        from recompute_scan.lint.engine import nothing_to_read

        raise nothing_to_read(*paths, excluded=True)
    rendered = RENDERINGS[style](report)
    if as_list:
        rendered, style = listed(report), "text"
    if as_diff:
        rendered, style = diff(report.found), "diff"
        announce(closing(report))
    put(rendered, output, style, force=force)
    return report.status
