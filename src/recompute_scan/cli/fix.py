"""``fix`` and ``runs``: the fix of a result, and the folders of earlier runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from recompute_scan.cli.options import Grouped
from recompute_scan.cli.output import clear, debug_option, files, progress, say, verbose_option
from recompute_scan.errors import InputError, UsageError
from recompute_scan.terminal import colored, inert, width

if TYPE_CHECKING:
    from recompute_scan.report.blocks import Page
    from recompute_scan.result import Fix, Result


@click.command(cls=Grouped, short_help="Show the fix, apply it, measure it, or undo it.")
@click.argument("folder", shell_complete=files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--apply", "wanted", flag_value="apply", help="Change the files, and keep copies.")
@click.option("--revert", "wanted", flag_value="revert", help="Put back what --apply changed.")
@click.option(
    "--verify",
    "wanted",
    flag_value="verify",
    help="Change no file: run the script with the fix in memory, and measure it.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="Change files below this folder only.  [default: the current one]",
)
@verbose_option
@debug_option
def fix(
    folder: str, args: tuple[str, ...], wanted: str | None, yes: bool, root: Path, verbose: bool
) -> int:
    """Show the fix of FOLDER as a diff, apply it, measure it, or undo it.

    FOLDER is one that `run` wrote, a result.json, or a trace. Call `fix` where the script was
    recorded: only files below the current folder are changed, none through a link, and none that
    was changed since the recording. With --verify, ARGS after two dashes go to the script.
    """
    from recompute_scan.files import newest_run, runs_of
    from recompute_scan.result import patch

    if args and wanted != "verify":
        raise click.UsageError(f"Got unexpected extra argument ({inert(args[0])})")
    given, folder = folder, newest_run(folder)
    kept_in, root = Path(folder), root.absolute()
    kept_in = kept_in if kept_in.is_dir() else kept_in.parent
    if wanted == "revert":
        if folder != given:  # recorded again since: the copies are in the run that had the fix
            kept_in = next(filter(patch.has_copies, reversed(runs_of(Path(given)))), kept_in)
        for name in patch.revert(kept_in, root):
            say(f"put back {inert(name)}\n")
        return 0
    from recompute_scan.analysis.pipeline import result_at

    result = result_at(folder, progress)
    clear()
    if wanted == "verify":
        return _verify(result, folder, args, yes=yes)
    from recompute_scan.report.render import list_commands
    from recompute_scan.report.summary import commands_of, lack_sentence, with_next_steps

    page = _new_page()
    _show(page, result, verbose=verbose)
    if wanted is None:
        if _say_state(page, result, kept_in, root):
            steps = with_next_steps(result, folder=folder).next_steps
            steps = tuple(one for one in steps if one.purpose != "see")
            list_commands(page, steps, lack_sentence(result, steps))
    elif patch.is_applied(result, kept_in, root):
        page = _new_page()
        page.prose("The fix is already applied; --revert undoes it.", "")
    else:
        files = patch.changed(result, root)  # what does not fit is refused before anyone is asked
        if not yes:
            _ask(page, [one.fix for one in patch.fixes(result) if one.fix is not None])
        patch.apply(files, kept_in)
        page = _new_page()
        for one in files:
            page.prose(f"changed {one.name}; --revert undoes it", "")
        again = ("record", "compare")
        steps = tuple(one for one in commands_of(result, folder) if one.purpose in again)
        list_commands(page, steps, lack_sentence(result, steps))
    _print(page)
    return 0


def _new_page() -> Page:
    from recompute_scan.report.blocks import Page

    return Page(colored(sys.stdout), width(sys.stdout))


def _print(page: Page) -> None:
    say("\n".join(page.written).strip("\n") + "\n", codes=page.color)


def _show(page: Page, result: Result, *, verbose: bool) -> None:
    """Write the fix, its risks, and the diff.

    Raises:
        InputError: The result has none that could be applied (``E348``).
    """
    from recompute_scan.report.finding_words import fix_text
    from recompute_scan.result.patch import fixes

    chosen = fixes(result)
    if not chosen:
        advice = next((one.fix for one in result.findings if one.fix is not None), None)
        raise InputError(
            "E348",
            "This result has no fix that could be applied.",
            why="its advice has no diff" if advice else "nothing was found that has one",
            hint=f"{advice.summary} {advice.reason or ''}".rstrip() if advice else None,
        )
    for one in chosen:
        page.prose(f"{one.code}: {one.title}", "", bold=True)
        fix_text(page, one, verbose=verbose)
        page.written.append("")


def _say_state(page: Page, result: Result, kept_in: Path, root: Path) -> bool:
    """Say whether it can be applied here; whether it can."""
    from recompute_scan.result import patch

    if patch.is_applied(result, kept_in, root):
        page.prose("The fix is applied; --revert undoes it.", "")
        return False
    try:
        names = ", ".join(one.name for one in patch.changed(result, root))
    except InputError as error:
        page.prose(f"It cannot be applied here. {error.what} Why: {error.why}.", "")
        return False
    known = all(one.digest for one in patch.changes(result))
    same = ", unchanged since the recording" if known else ""
    page.prose(f"It is not applied. It fits {names}{same}.", "")
    return True


def _ask(page: Page, fixes: Sequence[Fix]) -> None:
    """Ask whether to apply a fix that needs a review.

    Raises:
        UsageError: There is no terminal to ask on (``E241``).
        Abort: The answer is no.
    """
    from recompute_scan.report.words import risk_words

    doubtful = [one for one in fixes if one.disposition != "safe"]
    if not doubtful:
        return
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UsageError(
            "E241",
            "Nothing was changed: review this fix first.",
            why=" ".join(map(risk_words, doubtful))[:2000],
            hint="--yes applies it; without --apply it is shown",
        )
    _print(page)
    click.confirm("Apply it?", abort=True)


def _verify(result: Result, folder: str, args: Sequence[str], *, yes: bool) -> int:
    """Run the script of a result with the fix in memory, once a person agrees.

    Raises:
        UsageError: There is no terminal to ask on (``E241``).
        InputError: The result names no script (``E349``).
    """
    from recompute_scan.cli import main
    from recompute_scan.report.summary import processes, script_of

    script = script_of(result)
    if script is None:
        raise InputError(
            "E349",
            "This result does not name a script to run again.",
            hint="recompute-scan run --verify and the script",
        )
    words = ["run", "--verify"]
    if (Path(folder) / "result.json").is_file():  # a folder of traces alone is not to lose them
        words += ["-o", folder]
    words += [*processes(result), script, *args]
    told = f"recompute-scan {' '.join(map(inert, words))}"
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("E241", f"This runs a script: {told}", hint="--yes runs it")
        click.confirm(f"Run {told}?", abort=True)
    return main(words)


@click.command(cls=Grouped, short_help="List earlier runs, or remove some.")
@click.argument("folders", nargs=-1, shell_complete=files)
@click.option("--remove", is_flag=True, help="Remove the runs in FOLDERS, with their folders.")
@debug_option
def runs(folders: tuple[str, ...], remove: bool) -> int:
    """List the runs below recompute-scan-out, oldest first, or those in FOLDERS alone.

    Each has its verdict, or how it failed; `latest` is the run read for the parent folder.
    FOLDERS are folders of runs, or of scripts for all their runs.
    """
    from recompute_scan.files import all_runs, newest_run
    from recompute_scan.files import remove as remove_run

    wanted = {Path(one).absolute() for one in folders}
    chosen = [
        one for one in all_runs() if not wanted or {one.absolute(), one.absolute().parent} & wanted
    ]
    if (not chosen and folders) or (remove and not folders):
        raise UsageError(
            "E242",
            f"There is no run in {', '.join(folders)}."
            if folders
            else "No run to remove is named.",
            why="runs are below recompute-scan-out",
            hint="recompute-scan runs lists them",
        )
    for run in chosen:
        mark = "  latest" * (newest_run(str(run.parent)) == str(run))
        said = f"removed {run}" if remove else f"{run}  {_outcome(run)}{mark}"
        if remove:
            remove_run(run)
        say(f"{inert(said)}\n")
    return 0


def _outcome(run: Path) -> str:
    """The run's verdict, or how it failed, in a word."""
    from recompute_scan.analysis.pipeline import written_result
    from recompute_scan.report.summary import shortest_answer

    try:
        result = written_result(run / "result.json")
    except InputError:
        return "not readable"
    return shortest_answer(result) if result else "no result"
