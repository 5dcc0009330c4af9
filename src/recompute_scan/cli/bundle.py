"""``recompute-scan bundle``: one archive that a stranger may have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from recompute_scan.cli.analyze import lifted, limit_options
from recompute_scan.cli.output import (
    clear,
    debug_option,
    files,
    force_option,
    newest,
    progress,
    say,
    tell,
)
from recompute_scan.errors import UsageError
from recompute_scan.files import refuse_existing, written
from recompute_scan.terminal import inert

if TYPE_CHECKING:
    from recompute_scan.bundle import Archive


@click.command(short_help="Pack a cleaned archive for a bug report.")
@click.argument("traces", nargs=-1, required=True, callback=newest, shell_complete=files)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The archive to write, a .zip file.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Replace the names of modules, kernels, files and own operators as well.",
)
@click.option("--show", is_flag=True, help="Only list what would go in, with every name.")
@click.option(
    "--max-bytes",
    "size",
    type=click.IntRange(10_000),
    help="Largest archive.  [default: 25,000,000, what GitHub takes]",
)
@force_option
@debug_option
@limit_options
def bundle(
    traces: tuple[str, ...],
    output: Path | None,
    strict: bool,
    show: bool,
    size: int | None,
    force: bool,
    **limits: int | None,
) -> int:
    """Pack what TRACES show into one archive that a stranger may have.

    It holds the result, the report, a filled-in bug report and the trace, cut to what proves the
    verdict and built anew from listed fields: no paths, no host or user names, no values, no
    source lines. What goes in is listed before the archive is written. TRACES are as for
    `analyze`; `recompute-scan analyze FILE.zip` gives the same answer from the archive.
    """
    from recompute_scan.bundle import GITHUB_LIMIT, pack
    from recompute_scan.bundle.pack import listing

    def make(target: Path) -> Archive:
        return pack(
            traces,
            target,
            strict=strict,
            limit=size or GITHUB_LIMIT,
            on_progress=progress,
            limits=lifted(limits),
        )

    if show:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            contents = make(Path(folder) / "bundle.zip")
        clear()
        say("\n".join(listing(contents, every_name=True)) + "\n")
        return 0
    if output is None:
        raise UsageError("E210", "Where the archive should go is not given.", hint="-o FILE.zip")
    if output.suffix != ".zip":
        raise UsageError(
            "E210",
            f"{output} does not end in .zip.",
            why="issue trackers take an archive by its name",
        )
    refuse_existing(output, force=force)
    with written(output, force=force) as partial:
        contents = make(partial)
        clear()
        say("\n".join(listing(contents, every_name=False)) + "\n")
    tell(f"recompute-scan: wrote {inert(str(output))}")
    return 0
