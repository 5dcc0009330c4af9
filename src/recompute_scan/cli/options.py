"""Options that several commands share."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from recompute_scan.cli.output import Number
from recompute_scan.errors import UsageError
from recompute_scan.terminal import colored

# Under which headings help lists options, by parameter; all others come last.
_GROUPS = {
    "Recording": "steps warmup timing_steps quick device fidelity work timeout_s keep_going guard "
    "memory step_time_ms is_module",
    "Processes": "nproc_per_node ranks workers dask",
    "Measuring the fix": "verify without_checkpointing",
    "Output": "output html style verbose quiet perfetto events open_page force",
}
_HELP = {
    "theme": "default-slim",
    "enable_theme_env_var": False,
    "max_width": 100,
    "style_helptext": "",
    "padding_helptext_first_line": (0, 0, 1, 0),
    "text_paragraph_linebreaks": "\n\n",
    "options_panel_title": "Other options",
    "option_groups": {
        "*": [{"name": title, "options": names.split()} for title, names in _GROUPS.items()]
    },
}
# In fewer columns rich cuts words that click wraps.
_RICH_COLUMNS = 66


class Grouped(click.Command):
    """A command with its options in groups in its help, which rich-click shows in colour.

    It is imported for that alone: it takes 0.1 s, and a recorded script may use it too, with other
    settings. Where there is no colour, click shows the help.
    """

    groups: Mapping[str, Iterable[str]] = {}

    def get_help(self, ctx: click.Context) -> str:
        if not colored(sys.stdout) or shutil.get_terminal_size().columns < _RICH_COLUMNS:
            return super().get_help(ctx)
        from rich_click import RichCommand, RichContext, RichGroup

        given: dict[str, Any] = {"name": self.name, "params": self.params, "help": self.help}
        shown = RichCommand(**given)
        if isinstance(self, click.Group):
            names = self.list_commands(ctx)
            given["commands"] = {one: self.get_command(ctx, one) for one in names}
            shown = RichGroup(**given)
        panels = [{"name": title, "commands": [*names]} for title, names in self.groups.items()]
        how = {**_HELP, "command_groups": {"*": panels}}
        about: dict[str, Any] = {"info_name": ctx.info_name, "parent": ctx.parent}
        about["help_option_names"] = ctx.help_option_names
        with RichContext(shown, rich_help_config=how, **about) as inner:
            return shown.get_help(inner)


class Configured(Grouped):
    """A command with options that a project's ``pyproject.toml`` may set."""

    def make_context(
        self, info_name: str | None, args: list[str], *others: Any, **extra: Any
    ) -> click.Context:
        if args[:1] not in (["-h"], ["--help"]):  # which is at once there
            from recompute_scan.project_file import run_settings

            names = {
                option.removeprefix("--"): str(param.name)
                for param in self.params
                if isinstance(param, click.Option) and not param.hidden
                for option in param.opts
                if option.startswith("--")
            }
            extra["default_map"] = run_settings(Path.cwd(), names)
        return super().make_context(info_name, args, *others, **extra)


# Options without a meaning where a step is compared and none is timed or profiled.
_NOT_ALONE = ("steps", "timing_steps", "verify", "guard")
# The options that `--quick` sets: one step is profiled, and nothing else is done.
_QUICK = {"steps": 1, "warmup": 1, "timing_steps": 0, "fidelity": False, "stacks": False}
_FEWEST_TIMED = 3

output_folder = click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for traces and report.  [default: a new one below recompute-scan-out]",
)
processes_option = click.option(
    "--nproc-per-node", type=int, help="Start that many processes with torchrun."
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    default=600.0,
    show_default=True,
    type=Number(0),
    help="Seconds without progress after which a hanging run is ended; 0 for never.",
)
module_option = click.option(
    "-m",
    "is_module",
    is_flag=True,
    help="SCRIPT is a module, as with `python -m`.",
)
_OPTIONS = (
    click.option("--steps", default=5, show_default=True, help="Steps to profile."),
    click.option(
        "--warmup",
        default=3,
        help="Steps before anything is recorded.  [default: 3, or 1 where a step takes over 2 s]",
    ),
    click.option(
        "--timing-steps",
        default=10,
        show_default=True,
        help="Unprofiled steps to time, at most; ends early once the median is precise.",
    ),
    click.option(
        "--quick",
        is_flag=True,
        help="Warm up once and profile one step: the verdict and the fix, without times.",
    ),
    output_folder,
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="The device to record.",
    ),
    processes_option,
    click.option(
        "--ranks",
        metavar="0|all|LIST",
        default="0,last",
        show_default=True,
        help="Ranks to record, such as 0,8-15; all stop after the same step.",
    ),
    click.option(
        "--verify",
        is_flag=True,
        help="Run the script again with the fix applied in memory, and measure the difference.",
    ),
    click.option(
        "--without-checkpointing",
        is_flag=True,
        help="With --verify: also measure the script without any checkpoint, if it fits.",
    ),
    click.option(
        "--fidelity/--no-fidelity",
        default=None,
        help="Only compare one step's recomputes with their forward, or leave that out. "
        " [default: profile, then compare]",
    ),
    click.option(
        "--work",
        is_flag=True,
        help="Watch two more steps for repeated and unused work and memory.",
    ),
    click.option(
        "--guard",
        is_flag=True,
        help="Instead of recording, watch the whole training for recomputes that change.",
    ),
    click.option("--keep-going", is_flag=True, help="Let the script run on after the last step."),
    timeout_option,
    module_option,
    # From the process that started this one's launcher: it has read all the others.
    click.option("--handed-on", hidden=True),
)


def with_fidelity(context: click.Context, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The options for the recording, with what ``--quick``, ``--fidelity`` or its absence means for
    them.

    Raises:
        UsageError: One step alone is asked for, and something else too (``E236``).
    """
    quick, recorded = recorded["quick"], {**recorded}
    del recorded["quick"]
    if not (quick or recorded["fidelity"]):
        chosen = context.get_parameter_source("warmup") is not ParameterSource.DEFAULT
        warmup = recorded["warmup"] if chosen else 1
        if recorded["timing_steps"] > _FEWEST_TIMED:
            recorded["fewest"] = (min(warmup, recorded["warmup"]), _FEWEST_TIMED)
        return {**recorded, "fidelity": recorded["fidelity"] is None}
    alone = (*_NOT_ALONE, *(("warmup", "fidelity") if quick else ("work",)))
    others = [name for name in alone if typed(context, name)]
    if others:
        name, does, hint = "--fidelity", "compares", "a step is compared after the profiled ones"
        if quick:
            name, does, hint = "--quick", "profiles", "all this is recorded"
        raise UsageError(
            "E236",
            f"{name} {does} one step and does nothing else: --{others[0].replace('_', '-')} "
            "does not go with it.",
            hint=f"leave {name} out: {hint} anyway",
        )
    return {**recorded, **(_QUICK if quick else {"steps": 0, "timing_steps": 0})}


def typed(context: click.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def recording_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options to a command, in the order in which its help lists them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_GIB = 2**30


def machine_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options to a command, which gets them as one argument: ``machine``."""

    @click.option(
        "--peak-tflops",
        type=Number(min=0, min_open=True),
        help="Peak of one device in TFLOP/s, for MFU.  [default: the peak of the GPU found]",
    )
    @click.option(
        "--memory-gib",
        type=Number(min=0, min_open=True),
        help="Memory of one GPU in GiB, to plan with.  [default: the memory of the GPU found]",
    )
    @functools.wraps(command)
    def with_machine(
        *args: Any, peak_tflops: float | None, memory_gib: float | None, **others: Any
    ) -> int:
        from recompute_scan.cost.flops import Machine

        memory = round(memory_gib * _GIB) if memory_gib else None
        return command(*args, machine=Machine(peak_tflops, memory), **others)

    return with_machine
