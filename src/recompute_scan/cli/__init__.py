"""The command line: parse, call, print.

Heavy imports stay inside the commands, so that ``--help`` and errors are instant.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import StringIO

import click
from click.core import ParameterSource

from recompute_scan._version import __version__
from recompute_scan.cli.options import Grouped
from recompute_scan.cli.output import PREFIX, clear, ended, failed, tell
from recompute_scan.errors import InputError, ScanError, UsageError
from recompute_scan.terminal import inert

_BUG = "https://github.com/recompute-scan/recompute-scan/issues"

# A disk or a quota that is full, a file as large as the system lets it be, a device that fails.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# The headings of the help; the module of each command.
_GROUPS = {
    "Record a script": dict.fromkeys(("run", "plan"), "run"),
    "Read what was recorded": {
        "analyze": "analyze",
        **dict.fromkeys(("report", "compare", "explain"), "show"),
    },
    "Fix and check": {"fix": "fix", "check": "ci", "lint": "ci"},
    "Housekeeping": {"runs": "fix", "bundle": "ci", "doctor": "show", "completion": "show"},
}
_MODULES = {name: module for names in _GROUPS.values() for name, module in names.items()}
NAMES = tuple(_MODULES)


class _Commands(Grouped, click.Group):
    """The commands, each loaded when it is asked for."""

    groups = _GROUPS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in NAMES:
            return None
        if cmd_name not in ("run", "plan"):
            # numpy's linear algebra starts idle threads that cost more than reading a small trace.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        command = getattr(import_module(f"{__name__}.{_MODULES[cmd_name]}"), cmd_name)
        assert isinstance(command, click.Command)
        for option in (one for one in command.params if isinstance(one, click.Option)):
            if option.opts[-1].startswith("--") and not option.hidden:
                name = f"{PREFIX}_{cmd_name}_{option.opts[-1][2:]}"
                option.envvar = name.upper().replace("-", "_")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in NAMES and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], NAMES, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="recompute-scan")
def cli() -> None:
    """Find activation checkpointing that runs the forward pass more often than needed.

    \b
    recompute-scan run train.py         record a few steps of a script, and report
    recompute-scan plan train.py        say which layers to checkpoint, and prove it
    recompute-scan analyze trace.json   say what a trace of torch.profiler shows
    recompute-scan fix FOLDER           show the fix of a run; --apply applies it
    recompute-scan explain crash.log    say what a traceback means
    """  # noqa: D301 - \\b is the character by which click keeps lines as they are


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; see the table in ``docs/messages.md``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _status(arguments)
    finally:
        clear()
    ended(status)
    return status


def _status(arguments: list[str]) -> int:
    try:
        status = cli.main(
            arguments,
            prog_name="recompute-scan",
            standalone_mode=False,
            obj=arguments,
        )
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        _name_source(error)
        failed(error)
        vars(error)["message"] = inert(error.message, keep="\n")
        shown = StringIO()
        error.show(file=shown)
        tell(shown.getvalue().rstrip("\n"))
        return error.exit_code
    except ScanError as error:
        return _given_up(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output left; nothing is wrong with it or with us.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        foreseen = _by_the_system(error)
        if foreseen is not None and "--debug" not in arguments:
            return _given_up(foreseen)
        failed(error)
        if "--debug" in arguments:
            raise
        tell(
            "recompute-scan: a bug in recompute-scan: "
            f"{inert(f'{type(error).__name__}: {error}')} [E701]\n"
            f"try: run it again with --debug and report the traceback at {_BUG}"
        )
        return 70
    return status if isinstance(status, int) else 0


def _name_source(error: click.ClickException) -> None:
    """Let an error on a wrong value name the variable or the project's setting that it is from."""
    if not isinstance(error, click.BadParameter) or error.param is None or error.ctx is None:
        return
    source = error.ctx.get_parameter_source(str(error.param.name))
    if source is ParameterSource.ENVIRONMENT:
        error.param_hint = str(error.param.envvar)
    elif source is ParameterSource.DEFAULT_MAP:
        error.param_hint = f"{error.param.opts[-1][2:]} of [tool.recompute-scan.run]"


def _by_the_system(error: Exception) -> ScanError | None:
    """The error for a failure of the system: no memory, a long name, a full disk, a lost folder."""
    if isinstance(error, MemoryError):
        return InputError("E301", "Not enough memory.", why="the machine or a limit gives no more")
    if not isinstance(error, OSError):
        return None
    if error.filename:
        what = f"Cannot use {os.fsdecode(error.filename)}."
        return InputError("E301", what, why=error.strerror)
    if error.errno in _NOT_WRITTEN:
        return UsageError("E208", "Cannot write all of the output.", why=error.strerror)
    try:
        os.getcwd()  # noqa: PTH109 - only whether there is one
    except OSError:
        what, hint = "Cannot use the current folder.", "start the command in another one"
        return InputError("E301", what, why="it was removed", hint=hint)
    return None


def _given_up(error: ScanError) -> int:
    failed(error)
    tell(f"recompute-scan: {error}")
    return error.exit_status
