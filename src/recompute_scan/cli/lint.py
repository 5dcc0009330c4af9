"""``recompute-scan lint``: what scripts and configurations switch on, without running them."""

from __future__ import annotations

from pathlib import Path

import click

from recompute_scan.cli.output import debug_option, force_option
from recompute_scan.files import refuse_existing, write


@click.command(short_help="Read scripts and configurations, run nothing.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json", "github", "sarif", "junit"]),
    default="text",
    show_default=True,
    help="What to print.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it to a file instead.",
)
@force_option
@debug_option
def lint(paths: tuple[Path, ...], style: str, output: Path | None, force: bool, debug: bool) -> int:
    """Say which checkpoints PATHS will switch on twice, without running anything.

    PATHS are Python scripts, shell scripts, YAML, JSON and TOML, or folders of them. Ends with 0,
    with 1 when something is certainly wrong, with 4 when a file named here was not read. What
    only may be wrong is a warning; `recompute-scan run` counts.
    """
    from recompute_scan.lint import lint as read
    from recompute_scan.lint.render import RENDERINGS

    if output is not None:
        refuse_existing(output, force=force)
    report = read(paths)
    rendered = RENDERINGS[style](report)
    if output is not None:
        write(output, rendered, force=force)
    else:
        click.echo(rendered, nl=False)
    return report.status
