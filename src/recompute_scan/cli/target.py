"""What ``run`` was told to run: a script, a module, or a launcher behind two dashes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from recompute_scan.errors import UsageError


def launcher_in(whole: Sequence[str], script: str, args: Sequence[str]) -> str | None:
    """The launcher's path where one comes after ``--``; ``None`` for a script.

    Args:
        whole: The whole command line.
        script: The first word that is no option.
        args: What follows it.
    """
    # As in a shell, a folder of the launcher's name is not in its way.
    if Path(script).suffix == ".py" or not _behind_dashes(whole, args):
        return None
    # An environment that is used without being activated has its launchers beside its Python.
    beside = str(Path(sys.executable).parent)
    return shutil.which(script) or shutil.which(script, path=beside)


def check_script(whole: Sequence[str], script: str, args: Sequence[str]) -> None:
    """Refuse what is no script before anything is written.

    Raises:
        NoSuchOption: It is an option that there is not.
        UsageError: There is no such file (``E202``).
    """
    if os.path.lexists(script):  # whether it can be read is seen when it is
        return
    if _behind_dashes(whole, args):
        raise UsageError(
            "E202",
            f"There is neither a script nor a launcher named {script}.",
            why="it is no file here, and no command on the PATH",
            hint="install the launcher where recompute-scan is, or give its path",
        )
    if script.startswith("-") and script != "-":
        import difflib

        context = click.get_current_context()
        option = script.partition("=")[0]
        known = [name for param in context.command.params for name in param.opts]
        raise click.NoSuchOption(
            option, possibilities=difflib.get_close_matches(option, known, n=1), ctx=context
        )
    from recompute_scan.record.execute import cannot_open

    raise cannot_open(script, "No such file or directory")


def default_folder(script: str, args: Sequence[str], *, launched: bool, ending: str = "") -> Path:
    """Where the output goes unless something else is said: a folder named after the script."""
    if launched:
        script = next((one for one in args if one.endswith(".py")), script)
    return Path("recompute-scan-out") / (Path(script).stem.replace("/", "-") + ending)


def _behind_dashes(whole: Sequence[str], args: Sequence[str]) -> bool:
    before = len(whole) - len(args) - 2
    return before >= 0 and whole[before] == "--"
