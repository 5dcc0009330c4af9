"""``run`` and ``plan``: commands that start a script.

``run`` records a few steps and reports, or guards all of them. ``plan`` says which layers to
recompute within a limit, and proves it.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from recompute_scan.cli.options import (
    Configured,
    Grouped,
    machine_options,
    module_option,
    output_folder,
    processes_option,
    recording_options,
    timeout_option,
    typed,
    with_fidelity,
)
from recompute_scan.cli.output import (
    Answer,
    Number,
    announce,
    answer_options,
    debug_option,
    ended,
    events_option,
    files,
    follow,
    followed_at,
    hand_on,
    open_option,
    print_document,
    print_report,
    progress,
    seen_from_here,
    sending,
    showing,
    tell,
    told_change,
)
from recompute_scan.errors import UsageError
from recompute_scan.files import HOME, content, is_run, new_run, remove_if_empty
from recompute_scan.units import plural

if TYPE_CHECKING:
    from recompute_scan.cost.flops import Machine
    from recompute_scan.guarding.guard import StandingGuard
    from recompute_scan.record.finish import Handed, Reporting, Way
    from recompute_scan.record.options import RunOptions
    from recompute_scan.result.run_record import NextCommand

_TIMES = {1: "once", 2: "twice"}
_AFTER = "-after"
_MEASURING = ("--verify", "--without-checkpointing")


class Target(NamedTuple):
    """A script, and what starts it.

    Attributes:
        script: Its path, or the name of a module.
        args: What follows it.
        is_module: Whether it is a module.
        launcher: Path of the launcher that starts it; ``None`` without one.
        nproc_per_node: Processes to start; ``None`` for this one.
    """

    script: str
    args: tuple[str, ...]
    is_module: bool
    launcher: str | None = None
    nproc_per_node: int | None = None

    @property
    def starts_others(self) -> bool:
        """Whether other processes than this one run it."""
        return self.launcher is not None or self.nproc_per_node is not None

    def begin(self, announced: bool = True) -> None:
        """Say that it starts, before torch is imported, which takes seconds."""
        if announced:
            announce(f"starting {self.script}")
        if not self.starts_others and not self.is_module:
            set_early(Path(self.script))


def run_guarded_script(target: Target, folder: Path, *, verify: bool) -> int:
    """The script's exit status; the guard's messages are in the folder.

    Raises:
        UsageError: A launcher or ``verify`` is asked for as well (``E233``).
    """
    if target.launcher is not None or verify:
        raise UsageError(
            "E233",
            "--guard goes with a script, and not with a launcher or --verify.",
            hint="below a launcher: torchrun --no-python recompute-scan run --guard train.py",
        )
    folder, script, args = folder.absolute(), target.script, target.args
    if target.nproc_per_node is not None:
        from recompute_scan.record.launch import launch

        events = ["--events", followed_at()] if followed_at() else []
        words = ["-m"] * target.is_module + [script, *args]
        options = ["run", "--guard", *events, "-o", str(folder), *words]
        return launch(target.nproc_per_node, options)
    from recompute_scan.guarding.guard import run_guarded

    standing, ended = run_guarded(
        script, target.is_module, args, folder, [told_change] if followed_at() else []
    )
    if standing is None:  # the reason is printed already
        return ended.exit_status
    tell(f"{plural(standing.steps, 'step')} guarded: {_closing(standing)}")
    for change in standing.changes:
        tell(change.text)
    return ended.exit_status


def _closing(standing: StandingGuard) -> str:
    """The changes, and how often blocks are recomputed: a guard that sees no change may have
    seen a training that was doubled from its first step on.
    """
    from recompute_scan.guarding.judge import count

    usual = standing.stored.modules
    if not usual:
        return "nothing was recomputed"
    changes = len(standing.changes)
    said = f"{plural(changes, 'change')}, above and below" if changes else "nothing changed"
    numbers = Counter(count(parts) for parts in usual.values())
    counted = ", ".join(
        f"{plural(blocks, 'block')} recomputed {_TIMES.get(number, f'{number} times')}"
        for number, blocks in sorted(numbers.items())
    )
    said = f"{said}; for each forward, {counted}"
    if max(numbers) > 1:
        said += ". More than once may be waste: recompute-scan run says"
    return said


def launcher_in(whole: Sequence[str], script: str, args: Sequence[str]) -> str | None:
    """The launcher's path where one comes after ``--``; ``None`` for a script.

    ``whole`` is the command line, ``script`` the first word in it that is no option.
    """
    # As in a shell, a folder of the launcher's name is not in its way.
    if Path(script).suffix == ".py" or not _behind_dashes(whole, args):
        return None
    # An environment that is used without being activated has its launchers next to its Python.
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
            why="it is not a file here, and not a command on the PATH",
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


def script_folder(script: str, args: Sequence[str], *, launched: bool, ending: str = "") -> Path:
    """The folder of a script's runs, named after it.

    Raises:
        UsageError: A link is there that the command line does not name (``E206``).
    """
    if launched:
        script = next((one for one in args if one.endswith(".py")), script)
    folder = HOME / (Path(script).stem.replace("/", "-") + ending)
    for one in (folder.parent, folder):
        if one.is_symlink():
            what = f"Cannot write to the output folder {folder}."
            hint = f"name the folder: -o {folder}"
            raise UsageError("E206", what, why=f"{one} is a link", hint=hint)
    return folder


def _behind_dashes(whole: Sequence[str], args: Sequence[str]) -> bool:
    before = len(whole) - len(args) - 2
    return before >= 0 and whole[before] == "--"


_LONGEST = 1 << 22


def set_early(script: Path) -> None:
    """Set what the script's first lines set, in the order in which they do.

    Under ``run`` torch, which reads some of it when it is imported, is there before the script
    begins: ``os.environ["OMP_NUM_THREADS"] = "1"`` would come too late, and other numbers of
    threads add floats up in another order. These lines end at the
    first that is neither an import from the standard library nor a constant nor a variable of the
    environment that is given one: nothing can have looked at the environment in between. Others are
    left to the script, and so is a script that cannot be read.
    """
    with suppress(OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        text = content(script, _LONGEST)
        with warnings.catch_warnings():  # the script's own come when it runs
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
        for name, value, only_if_missing in _settings(tree.body):
            if not (only_if_missing and name in os.environ):
                os.environ[name] = value


def _settings(body: list[ast.stmt]) -> Iterator[tuple[str, str, bool]]:
    """Name, value, and whether it is set only where it is missing."""
    for statement in body:
        match statement:
            case ast.Import(names=names) if all(_is_standard(one.name, one) for one in names):
                continue
            case ast.ImportFrom(module=str(module), level=0) if _is_standard(module):
                continue
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant()) if name != "os":
                continue
            case ast.Assign(
                targets=[ast.Subscript(value=place, slice=ast.Constant(value=str(name)))],
                value=ast.Constant(value=str(value)),
            ) if ast.unparse(place) == "os.environ":
                yield name, value, False
            case ast.Expr(
                value=ast.Call(
                    func=function,
                    args=[ast.Constant(value=str(name)), ast.Constant(value=str(value))],
                    keywords=[],
                )
            ) if ast.unparse(function) == "os.environ.setdefault":
                yield name, value, True
            case _:
                return


def _is_standard(module: str, alias: ast.alias | None = None) -> bool:
    """Is it of the standard library, and does it leave the name ``os`` alone?"""
    renamed = alias is not None and alias.asname == "os" and module != "os"
    return module.partition(".")[0] in sys.stdlib_module_names and not renamed


def commands_after(
    words: Sequence[str],
    output: Path | None,
    folder: Path,
    *,
    verify: bool,
    script: str = "",
    is_module: bool = False,
) -> tuple[NextCommand, ...]:
    """Commands that may come next: see and apply the fix, record again and compare the two
    recordings, measure the fix, compare gradients, plan.

    The last three are there only where ``verify`` says that they can be done. The command that
    records again writes into another folder, so that the recording before the fix stays.

    Args:
        words: The command line behind the program's name, ``run`` first.
        output: The folder that was asked for, if one was.
        folder: The folder that was written.
        verify: Whether the script can be run with the fix in memory.
        script: The script: what is before it are options of ours.
        is_module: Whether that is a module.
    """
    from recompute_scan.result.run_record import NextCommand

    begin, *rest = words
    before = seen_from_here(folder)
    own = output is None and is_run(folder, alone=True)  # and so has the next run
    after = str(before.parent) if own else f"{before}{_AFTER}"
    measuring = _recording(rest, script)
    again = rest if own else _into(rest, output, after)
    found = [
        NextCommand("see", _command("fix", [str(before)])),
        NextCommand("apply", _command("fix", [str(before), "--apply"])),
        NextCommand("record", _command(begin, _recording(again, script))),
        NextCommand("compare", _command("compare", [str(before), after])),
    ]
    if verify:
        target = measuring[measuring.index(script) :] if script in measuring else [script]
        found += [
            NextCommand("measure", _command(begin, [_MEASURING[0], *measuring])),
            NextCommand("compare-gradients", _command(begin, [*_MEASURING, *measuring])),
            NextCommand("plan", _command("plan", ["-m"] * is_module + target)),
        ]
    return tuple(found)


def _command(begin: str, words: Sequence[str]) -> str:
    return shlex.join(["recompute-scan", begin, *words])


def _recording(words: Sequence[str], script: str) -> list[str]:
    """The words without what measures a fix, which takes many runs."""
    end = words.index(script) if script in words else len(words)
    return [*(word for word in words[:end] if word not in _MEASURING), *words[end:]]


def _into(rest: Sequence[str], output: Path | None, after: str) -> list[str]:
    """The words with another output folder; the first that names it is the option's."""
    if output is not None:
        for at, word in enumerate(rest):
            option, joined, value = word.partition("=")
            if option == "--output" and joined and Path(value) == output:
                return [*rest[:at], f"--output={after}", *rest[at + 1 :]]
            if word in ("-o", "--output") and Path(*rest[at + 1 : at + 2]) == output:
                return [*rest[: at + 1], after, *rest[at + 2 :]]
            if word.startswith("-o") and Path(word[2:]) == output:
                return [*rest[:at], f"-o{after}", *rest[at + 1 :]]
    return ["-o", after, *rest]


def _ending(script: str, args: Sequence[str], *, launched: bool) -> str:
    """How a command ends that gives the script its arguments: these, and the blank before."""
    if launched:
        at = next((at for at, one in enumerate(args) if one.endswith(".py")), len(args))
        args = args[at + 1 :]
    return f" {shlex.join(args)}" if args else ""


@click.command(
    cls=Configured,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a training script for a few steps and report on it.",
)
@recording_options
@answer_options("text", "json")
@events_option
@machine_options
@open_option
@debug_option
@click.argument("script", shell_complete=files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    script: str,
    args: tuple[str, ...],
    is_module: bool,
    output: Path | None,
    nproc_per_node: int | None,
    verify: bool,
    guard: bool,
    without_checkpointing: bool,
    handed_on: str | None,
    events: str,
    answer: Answer,
    machine: Machine,
    open_page: bool,
    **recorded: Any,
) -> int:
    """Run SCRIPT unchanged for a few steps, find what runs again, and report on it.

    Options of recompute-scan go before SCRIPT; everything after it belongs to the script.
    The script is ended after the last recorded step.

    A launcher goes after two dashes: recompute-scan run -- torchrun --nproc-per-node 4 train.py.
    The scripts that it starts are recorded.
    """
    context = click.get_current_context()
    launcher = launcher_in(context.obj, script, args)
    if "RANK" in os.environ and not typed(context, "nproc_per_node"):
        nproc_per_node = None  # a setting for whoever starts processes, not for each of them
    target = Target(script, args, is_module, launcher, nproc_per_node)
    folder = output or script_folder(script, args, launched=launcher is not None)
    try:
        recorded = _checked(context, target, recorded)
    except Exception:
        follow(events, command="run")  # the error is an event too
        raise
    if output is None and handed_on is None and not guard:  # a guard goes on from run to run
        folder = new_run(folder.absolute(), several=launcher is None and "RANK" in os.environ)
        context.call_on_close(partial(remove_if_empty, folder))
    follow(events, command="run", folder=folder)
    target.begin(announced=handed_on is None and os.environ.get("RANK", "0") == "0")
    if guard:
        return run_guarded_script(target, folder, verify=verify)
    from recompute_scan.record.finish import Handed, Way
    from recompute_scan.record.options import beside

    if handed_on is not None:
        way, handed = Way(launcher), _taken_up(target, handed_on)
        return _record(target, way, handed, answer, open_page=open_page, launched=True)
    folder = folder.absolute()  # the script may change the current directory
    after = None
    if recorded["steps"] or recorded["timing_steps"]:
        may_verify = launcher is None and not verify and "RANK" not in os.environ
        after = commands_after(
            context.obj, output, folder, verify=may_verify, script=script, is_module=is_module
        )
    recorded.update(measure=verify, quiet=answer.quiet)
    handed = Handed(_options(target, *beside(folder), **recorded), machine, after)
    hand_on(answer, launched=target.starts_others)
    way = Way(launcher, nproc_per_node, verify, without_checkpointing)
    return _record(target, way, handed, answer, open_page=open_page, launched=False)


def _checked(context: click.Context, target: Target, recorded: dict[str, Any]) -> dict[str, Any]:
    """The options for the recording, once there is a script."""
    if target.launcher is None and not target.is_module:
        check_script(context.obj, target.script, target.args)
    return with_fidelity(context, recorded)


def _options(target: Target, place: Path, earlier: Path | None, **recorded: Any) -> RunOptions:
    """The options of a recording of the target into this place, or next to an earlier one."""
    from recompute_scan.record.options import RunOptions

    return RunOptions(
        target.script,
        target.is_module,
        target.args,
        place,
        events=followed_at(),
        takes_place_of=earlier,
        **recorded,
    )


def _taken_up(target: Target, handed_on: str) -> Handed:
    """The options that the process which started the launcher has handed on."""
    from msgspec.structs import replace

    from recompute_scan.record.finish import Handed
    from recompute_scan.record.options import decode

    try:
        handed = decode(handed_on, Handed)
    except ValueError:
        from recompute_scan.startup import run_as_it_is

        run_as_it_is()
    options = replace(
        handed.options, target=target.script, args=target.args, is_module=target.is_module
    )
    follow(options.events)
    return replace(handed, options=options)


def _record(
    target: Target, way: Way, handed: Handed, answer: Answer, *, open_page: bool, launched: bool
) -> int:
    from recompute_scan.record.finish import run_and_report

    options, whole = handed.options, click.get_current_context().obj
    way.check(options)
    # One process prints the document: of several, the one that started the others.
    by_another = answer.style == "json" and (target.starts_others or launched)
    reporting = _reporting(
        options,
        handed.machine,
        partial(print_report, answer=answer, open_page=open_page, silent=by_another),
        after=handed.after,
        launched=launched,
        arguments=_ending(target.script, target.args, launched=target.launcher is not None),
        root=Path.cwd(),
    )
    status = run_and_report(way, options, reporting, ["--debug"] * ("--debug" in whole))
    if by_another and not launched:
        print_document(options.takes_place_of if status == 0 else None, options.output)
    return status


def _reporting(
    options: RunOptions, machine: Machine, show: Callable[..., None], **more: Any
) -> Reporting:
    """How it is reported on; with no more, nothing is known but the result."""
    from recompute_scan.record.finish import Reporting

    return Reporting(
        options.output,
        machine,
        show=showing(show),
        print_line=sending("WarningTold", tell),
        progress=sending("ProgressTold", progress),
        leaving=ended,
        takes_place_of=options.takes_place_of,
        **{"after": None, "launched": False, **more},
    )


@click.command(
    cls=Grouped,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Say which layers to checkpoint within a memory limit, and prove it.",
)
@click.option(
    "--memory",
    metavar="AMOUNT|N%|free",
    help="Memory limit: 60GB, 80% of today's peak, or free (today's peak + 90% of the rest).  "
    "[default: 100%]",
)
@click.option(
    "--step-time",
    "step_time_ms",
    metavar="MS",
    type=Number(min=0, min_open=True),
    help="Limit the step time instead, for the least memory.",
)
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Apply the plan in memory and measure it.",
)
@click.option(
    "--timing-steps", default=10, show_default=True, help="Steps to time per arrangement."
)
@click.option("--steps", default=3, show_default=True, help="Steps to profile.")
@output_folder
@processes_option
@timeout_option
@module_option
@answer_options("text", "json")
@events_option
@debug_option
@click.argument("script", shell_complete=files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def plan(
    script: str,
    args: tuple[str, ...],
    memory: str | None,
    step_time_ms: float | None,
    verify: bool,
    is_module: bool,
    output: Path | None,
    nproc_per_node: int | None,
    events: str,
    answer: Answer,
    **recorded: Any,
) -> int:
    """Find the fastest way to checkpoint SCRIPT's layers within a memory limit.

    SCRIPT runs several times: as it is, then with checkpoints put on and taken off in memory from
    step to step, then with the plan. Nothing is edited. On a GPU the limit is on what torch
    allocates there, on a CPU on what is saved for the backward pass.
    """
    from recompute_scan.cost.plan import read_wish

    folder = output or script_folder(script, args, launched=False, ending="-plan")
    wish = read_wish(memory, step_time_ms)
    if not is_module:
        check_script(click.get_current_context().obj, script, args)
    target = Target(script, args, is_module, None, nproc_per_node)
    folder = (output or new_run(folder)).absolute()
    click.get_current_context().call_on_close(partial(remove_if_empty, folder))
    follow(events, command="plan", folder=folder)
    target.begin()
    from recompute_scan.cost.flops import UNKNOWN_MACHINE
    from recompute_scan.record.finish import Way, run_and_report
    from recompute_scan.record.options import beside
    from recompute_scan.record.verify import Asked

    place, earlier = beside(folder, plans=True)
    if folder not in (place, earlier):
        tell(f"recompute-scan: {folder} keeps the result of a run; the plan goes to {place}")
    options = _options(target, place, earlier, quiet=answer.quiet, **recorded)
    way = Way(None, nproc_per_node)
    way.check(options)
    reporting = _reporting(options, UNKNOWN_MACHINE, partial(print_report, answer=answer))
    return run_and_report(way, options, reporting, plan=Asked(wish, verify))
