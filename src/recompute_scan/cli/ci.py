"""``check``, ``lint`` and ``bundle``: commands for CI and for bug reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from recompute_scan.cli.analyze import lifted, limit_options
from recompute_scan.cli.options import Grouped
from recompute_scan.cli.output import (
    Number,
    announce,
    clear,
    debug_option,
    file_option,
    files,
    force_option,
    format_option,
    newest,
    output_option,
    progress,
    put,
    say,
    tell,
)
from recompute_scan.errors import UsageError
from recompute_scan.files import read, refuse_existing, write, written
from recompute_scan.terminal import inert

if TYPE_CHECKING:
    from recompute_scan.bundle import Archive
    from recompute_scan.result import Result
    from recompute_scan.trace import Limits


@click.command(cls=Grouped, short_help="Fail a CI job on doubled checkpointing.")
@click.argument("traces", nargs=-1, required=True, callback=newest, shell_complete=files)
@click.option(
    "--fail-on",
    metavar="WHAT,…",
    help="Findings to refuse: doubled, wrong-gradients, any, none, or codes such as RS001.  "
    "[default: doubled]",
)
@click.option(
    "--max-recompute",
    type=Number(0),
    help="Refuse more recomputes of a layer per backward pass than this.",
)
@click.option(
    "--max-cost",
    "costs",
    multiple=True,
    metavar="PCT|CODE=PCT",
    help="Refuse redundant recomputes, or one finding, above this share of the step.",
)
@file_option("--baseline", help_text="Accept what this file lists.")
@file_option(
    "--write-baseline", help_text="Write a file that accepts all that is found now, and pass."
)
@format_option("text", "json", "github", "sarif", "junit")
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
    """Fail if TRACES show doubled checkpointing, or what else this project refuses.

    TRACES are as for `analyze`, or one result.json. Ends with 0 when they pass, with 1 when
    something is refused, with 4 when that is not known. Without any threshold, doubled
    checkpointing is refused. [tool.recompute-scan.check] of a project's pyproject.toml can set the
    thresholds and the baseline; those given here win.
    """
    from recompute_scan.check import judge
    from recompute_scan.check.formats import RENDERINGS
    from recompute_scan.check.policy import baseline_json, parse_baseline, parse_thresholds
    from recompute_scan.findings.registry import CODES
    from recompute_scan.project_file import check_settings

    project, root = check_settings(Path.cwd())
    policy = parse_thresholds(
        ",".join(map(str, project.fail_on)) if fail_on is None and project.fail_on else fail_on,
        project.max_recompute if max_recompute is None else max_recompute,
        costs or tuple(map(str, project.max_cost)),
        CODES,
    )
    refuse_existing(output, write_baseline, force=force)
    typed = baseline is not None
    if baseline is None and project.baseline:
        baseline = root / project.baseline
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


@click.command(cls=Grouped, short_help="Read scripts and configurations, run nothing.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--diff", "as_diff", is_flag=True, help="Print the edits as one diff, for patch -p1.")
@click.option("--list", "as_list", is_flag=True, help="Print all checkpoints, doubled or not.")
@format_option("text", "json", "github", "sarif", "junit")
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
    with 1 when something is certainly wrong, with 4 when a file named here was not read. A
    checkpoint that only may be wrong is a warning; `recompute-scan run` decides. A project's own
    settings are in [tool.recompute-scan.lint] of its pyproject.toml.
    """
    from recompute_scan.lint import lint as read_all
    from recompute_scan.lint.library_calls import installed_version
    from recompute_scan.lint.output import RENDERINGS, closing, diff, listed
    from recompute_scan.lint.rules import RULES
    from recompute_scan.project_file import lint_settings

    refuse_existing(output, force=force)
    report = read_all(paths, lint_settings(Path.cwd(), RULES), installed_version())
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


@click.command(cls=Grouped, short_help="Pack a cleaned archive for a bug report.")
@click.argument("traces", nargs=-1, required=True, callback=newest, shell_complete=files)
@file_option("-o", "--output", help_text="The archive to write, a .zip file.")
@click.option(
    "--strict",
    is_flag=True,
    help="Replace the names of modules, kernels, files and custom operators as well.",
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
    """Pack what TRACES show into one archive that is safe to publish.

    It holds the result, the report, a filled-in bug report and the trace, cut to what proves the
    verdict and built anew from listed fields: no paths, no host or user names, no values, no
    source lines. The contents are listed before the archive is written. TRACES are as for
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
        raise UsageError("E210", "The archive to write is missing.", hint="-o FILE.zip")
    if output.suffix != ".zip":
        raise UsageError(
            "E210",
            f"{output} does not end in .zip.",
            why="issue trackers recognize an archive by its ending",
        )
    refuse_existing(output, force=force)
    with written(output, force=force) as partial:
        contents = make(partial)
        clear()
        say("\n".join(listing(contents, every_name=False)) + "\n")
    tell(f"recompute-scan: wrote {inert(str(output))}")
    return 0
