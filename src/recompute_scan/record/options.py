"""The options of a run, the folder that it writes to, and its run record.

Processes that the script starts get the options as text, and decode it where they have imported
torch. A run that fails replaces no result of one that succeeded: where the folder holds one, a run
records next to it, and its files take the place of the earlier ones once there is a new result.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import Distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.crash import RankEnd
from recompute_scan.errors import UsageError
from recompute_scan.files import content, is_run, make_newest, newest_run, write, write_whole
from recompute_scan.frameworks.registry import PACKAGES
from recompute_scan.record.launch import RankFacts, has_process_group, number_in, rank_facts
from recompute_scan.record.recorder import Recorder
from recompute_scan.record.steps import COMMAND, DEFAULT, Plan, Wording, shortfall
from recompute_scan.record.torch_versions import compiled_something
from recompute_scan.result.run_record import (
    CLAIM,
    PATCH,
    STOPPED,
    WORD,
    ArmWanted,
    NextCommand,
    RunInfo,
    compiled_name,
    run_info_name,
    so_far_name,
    stacks_text_name,
)

if TYPE_CHECKING:
    from recompute_scan.record.origins import Origin, Variant
    from recompute_scan.result import Result


_T = TypeVar("_T")


class RemovalOptions(Struct, frozen=True):
    """Which checkpoint calls to take out: the ones with this mechanism, call site and variant,
    around all modules or some.

    Attributes:
        mechanism: As written into the annotations.
        site: ``file:line``; empty where it is not known.
        variant: ``reentrant`` or ``non-reentrant``.
        depth: Number of checkpoints around it, only where one of the same mechanism, site and
            variant is around it or inside it and must stay; else ``None``.
        modules: Names below the model of the modules that lose theirs; empty for all.
    """

    mechanism: str
    site: str
    variant: str
    depth: int | None = None
    modules: tuple[str, ...] = ()

    def takes(self, variant: Variant, origin: Origin, depth: int) -> bool:
        """Whether a call of this origin, inside so many checkpoints, is one of these."""
        return (
            (self.mechanism, self.site, self.variant) == (origin.mechanism, origin.site, variant)
            and self.depth in (None, depth)
            and (not self.modules or origin.module.name in self.modules)
        )


class RunOptions(Struct, frozen=True):
    """The script to run, and how much of it to record.

    Attributes:
        target: Path of the script, or name of the module.
        is_module: Whether ``target`` is a module, as with ``python -m``.
        args: The script's own arguments.
        output: Folder for the traces and the run record; made when missing.
        takes_place_of: The folder of an earlier result, which gets all that is in ``output`` once
            there is a new one.
        steps: Steps profiled without stacks, at least 1; where steps are measured, 0 will do.
        warmup: Steps before anything is recorded, at least 1.
        timing_steps: Steps timed without the profiler; 0 for none.
        device: What to record; ``auto`` records the GPU where the script uses one.
        keep_going: Let the script run to its end after the last recorded step.
        measure: Measure memory and losses too, from seeds that are the same in every run.
        removals: Checkpoints to take out in memory.
        switching: Take them out in some steps only, as
            :class:`recompute_scan.record.bypass.Alternation` does.
        without_checkpointing: Take out every checkpoint.
        arms: Arrangements of checkpoints to switch between from step to step; none to leave them.
        timeout_s: Seconds without progress after which a run is ended; 0 for never.
        ranks: The ranks to record, as :func:`recompute_scan.record.steps.chosen` reads them; the
            others count and time their steps, and stop with them.
        fidelity: Whether to compare the recomputes of one more step with their forward.
        events: File that gets an event for each step and phase; empty for none.
        quiet: Print no progress.
        stacks: Whether to profile one more step with Python stacks.
        work: Whether to watch two more steps for unused work.
        fewest: As for :class:`recompute_scan.record.steps.Plan`; ignored in runs that measure a
            change.
    """

    target: str
    is_module: bool
    args: tuple[str, ...]
    output: Path
    steps: int = 5
    warmup: int = 3
    timing_steps: int = 10
    device: Literal["auto", "cpu", "cuda"] = "auto"
    keep_going: bool = False
    measure: bool = False
    removals: tuple[RemovalOptions, ...] = ()
    switching: bool = False
    without_checkpointing: bool = False
    arms: tuple[ArmWanted, ...] = ()
    timeout_s: float = 0.0
    ranks: str = DEFAULT
    fidelity: bool = True
    events: str = ""
    quiet: bool = False
    takes_place_of: Path | None = None
    stacks: bool = True
    work: bool = False
    fewest: tuple[int, int] | None = None

    @property
    def is_special(self) -> bool:
        """Whether it measures a change: each run then makes the same steps, and its reader has the
        answer.
        """
        changed = self.removals or self.arms or self.switching or self.without_checkpointing
        return bool(changed or self.measure)

    @property
    def plan(self) -> Plan:
        return Plan(
            warmup=self.warmup,
            timing=self.timing_steps,
            steps=self.steps,
            fidelity=self.fidelity,
            stacks=self.stacks,
            watched=self.work and not self.is_special and bool(self.steps),
            fewest=None if self.is_special else self.fewest,
        )


def encode(options: object) -> str:
    """A data class of options as JSON text, for a command line, the environment or a pickle."""
    # Names that are no UTF-8 have lone surrogates, which only `json` writes, escaped.
    return json.dumps(msgspec.to_builtins(options, enc_hook=str))


def decode(text: str, kind: type[_T]) -> _T:
    """The options of one kind that :func:`encode` wrote.

    Raises:
        ValueError: It is no JSON, a field is missing, or one is not of its type.
    """
    return msgspec.convert(json.loads(text), kind, dec_hook=lambda kind, value: kind(value))


# Kinds of files that ranks leave there, and the folders of further runs.
_KINDS = (
    *("trace", "stacks", "flight", "compiled", "where", "run", "so-far"),
    *("gradients", "rehearsal"),
)
_BELOW = ("verify", "plan")


def check_plan(plan: Plan, *, measuring: bool = False) -> None:
    """Refuse impossible step counts (``E204``); a run that measures steps, or compares one, may
    do without profiled ones.
    """
    fewest = 0 if plan.only_compares or (measuring and plan.timing) else 1
    if plan.steps < fewest or plan.warmup < 1 or plan.timing < 0:
        raise UsageError(
            "E204",
            "At least 1 warm-up step and 1 profiled step are needed, and no fewer than 0 timed.",
        )


def check_device(device: Literal["auto", "cpu", "cuda"]) -> None:
    # Counted without starting CUDA, which would break a script that forks later.
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise UsageError(
            "E205",
            "There is no GPU that torch can use here.",
            hint="device cpu records the CPU; auto records what the script uses",
        )


def prepare(folder: Path) -> None:
    """Make the folder, and take out what an earlier recording left there.

    Raises:
        UsageError: It cannot be written (``E206``).
    """
    facts = rank_facts()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Files of an earlier run must not pass for this one's.
        _take_out(folder, _files(facts.rank))
        if facts.rank == 0:
            _take_out(folder, (CLAIM, STOPPED, WORD))
            if _result_in(folder) is None:
                _take_out(folder, ("result.json", "report.html", PATCH))
            rank = facts.world_size
            while any((folder / name(rank)).exists() for name in (run_info_name, so_far_name)):
                _take_out(folder, _files(rank))
                rank += 1
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, os.strerror(13))
    except OSError as error:
        raise cannot_write(folder, error) from None


def beside(folder: Path, *, plans: bool = False) -> tuple[Path, Path | None]:
    """Where to record, and the folder that it replaces at the end; ``None`` where it is that
    folder.

    It is the folder itself unless a result is in it, else a sibling with ``-failed`` behind its
    name, which it keeps if there is no new result. Where there can be none, such as above a volume,
    it is a folder inside. A plan replaces plans only; its folder has ``-plan`` behind its name.

    Raises:
        UsageError: A file in it that a recording would replace is of no recording (``E206``).
    """
    _refuse_others(folder)
    earlier = _result_in(folder)
    if earlier is not None and plans and earlier.get("plan") is None:
        folder = _named(folder, "plan")
        _refuse_others(folder)
        earlier = _result_in(folder)
    if earlier is None:
        return folder, None
    number, place = 1, _named(folder, "failed")
    while _result_in(place) is not None:
        number += 1
        place = _named(folder, f"failed-{number}")
    return place, folder


def _refuse_others(folder: Path) -> None:
    if any(folder.glob("run-rank*.json")) or any(folder.glob("so-far-rank*.json")):
        return
    ours = (*(f"{kind}-rank*.json*" for kind in _KINDS), "result.json", "report.html", PATCH)
    for one in sorted(one for name in ours for one in folder.glob(name)):
        raise UsageError(
            "E206",
            f"Cannot write to the output folder {folder}.",
            why=f"{one.name} in it would be replaced, and no recording of `run` has left it",
            hint="name another folder",
        )


def _named(folder: Path, ending: str) -> Path:
    above = folder.parent
    try:
        near = above.stat().st_dev == folder.stat().st_dev and os.access(above, os.W_OK)
    except OSError:
        near = False
    near = near and folder.name not in ("", "..") and not folder.is_symlink()
    return folder.with_name(f"{folder.name}-{ending}") if near else folder / ending


def _result_in(folder: Path) -> dict[str, Any] | None:
    """The result of a run that succeeded; ``None`` where there is none."""
    try:
        if not (folder / "result.json").is_file():
            return None
        found = msgspec.json.decode(content(folder / "result.json"))
    except (OSError, ValueError, RecursionError):
        return {}  # cut off, or somebody else's: not ours to replace
    found = found if isinstance(found, dict) else {}
    return None if found.get("crash") is not None else found


def take_place(recorded: Path, folder: Path) -> None:
    """There is a new result: the files recorded next to the folder replace those that an earlier
    run has left in it.

    Raises:
        UsageError: It cannot be written (``E206``).
    """
    try:
        for kind in _KINDS:
            for one in folder.glob(f"{kind}-rank*"):
                one.unlink()
        for name in _BELOW:
            if (folder / name).is_symlink():
                (folder / name).unlink()
            for one in (folder / name).glob("*-*/output.txt"):
                shutil.rmtree(one.parent, ignore_errors=True)
            with suppress(OSError):  # somebody else's things are in it
                (folder / name).rmdir()
        (folder / PATCH).unlink(missing_ok=True)
        for one in recorded.iterdir():
            one.replace(folder / one.name)
        recorded.rmdir()
    except OSError as error:
        raise cannot_write(folder, error) from None


def came_to_an_end(run: Path, *, well: bool) -> None:
    """A run is over: from now on its script's folder stands for it, if it is a run's own.

    One that failed does not take the place of one that succeeded.
    """
    if is_run(run) and (well or not _result_in(Path(newest_run(str(run.parent))))):
        make_newest(run)


def cannot_write(folder: Path, error: OSError) -> UsageError:
    return UsageError("E206", f"Cannot write to the output folder {folder}.", why=error.strerror)


def write_report(
    folder: Path,
    result: Result,
    after: Sequence[NextCommand] | None = None,
    *,
    root: Path | None = None,
    place: Path | None = None,
) -> None:
    """Write the result, its page and its fix into the run's folder, over what an earlier one left.

    The commands that come next are as of :func:`recompute_scan.report.summary.with_next_steps`;
    ``root`` is where the recording began, and ``place`` where the folder's content will be in the
    end, if not there.
    """
    from recompute_scan.report.render import render_html  # noqa: PLC0415 - after the run, not before
    from recompute_scan.report.summary import with_next_steps  # noqa: PLC0415
    from recompute_scan.result import to_json  # noqa: PLC0415
    from recompute_scan.result.patch import patch  # noqa: PLC0415

    root, place = root or Path.cwd(), place or folder
    named = str(place.relative_to(root) if place.is_relative_to(root) else place)
    result = with_next_steps(result, after, named)
    write(folder / "result.json", to_json(result), force=True)
    write(folder / "report.html", render_html(result, after, named), force=True)
    fix = patch(result, root)
    if fix is not None:
        write_whole(folder / PATCH, fix)
    else:
        (folder / PATCH).unlink(missing_ok=True)


def _take_out(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def _files(rank: int) -> tuple[str, ...]:
    return (
        f"trace-rank{rank}.json.gz",
        f"stacks-rank{rank}.json.gz",
        f"flight-rank{rank}.json",
        compiled_name(rank),
        stacks_text_name(rank),
        run_info_name(rank),
        so_far_name(rank),
    )


_PACKAGES = (*PACKAGES, "flash-attn")


def environment(target: str, device: Literal["cpu", "cuda"], ranks: RankFacts) -> dict[str, str]:
    """Versions and settings of this process, all text. The script's arguments are left out:
    they may hold secrets.
    """
    facts = {
        "target": target,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "device": device,
        "world_size": str(ranks.world_size),
        "torch_compile": "used" if compiled_something() else "not used",
    }
    if (here := number_in("LOCAL_WORLD_SIZE", 1)) > 1:
        facts["local_world_size"] = str(here)
    budget = getattr(sys.modules.get("torch._functorch.config"), "activation_memory_budget", 1.0)
    if budget != 1.0:  # the compiler recomputes by itself
        facts["activation_memory_budget"] = str(budget)
    if device == "cuda":
        with suppress(RuntimeError):  # a GPU that has failed
            facts["device_name"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda or torch.version.hip or "")
    else:
        facts["processor"] = _processor()
        facts["threads"] = str(torch.get_num_threads())
    if has_process_group():
        facts["backend"] = str(torch.distributed.get_backend())
    path = [one for one in sys.path if isinstance(one, str)]  # Python allows bytes
    for package in _PACKAGES:
        found = next(iter(Distribution.discover(name=package, path=path)), None)
        if found is not None:
            facts[package] = found.version
    return facts


def _processor() -> str:
    """The model of the processor, as the system names it."""
    with suppress(OSError):
        for line in content(Path("/proc/cpuinfo")).decode(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def make_run_record(
    recorder: Recorder,
    target: str,
    *,
    failure: str | None = None,
    status: int = 0,
    end: RankEnd | None = None,
    wording: Wording = COMMAND,
) -> RunInfo:
    """The run record: the script as it was named, or ``-m`` and the module.

    ``failure`` is one sentence, for a script that failed.
    """
    kept, ranks, probe, plan = recorder.kept, recorder.ranks, recorder.probe, recorder.plan
    if not recorder.membership.chosen:
        plan = replace(plan, steps=0)
    missing = kept.failure or shortfall(plan, recorder.seen, wording)
    outcome: Literal["complete", "ended-early", "failed"] = "ended-early" if missing else "complete"
    return RunInfo(
        bug=recorder.bug,
        rank=ranks.rank,
        world_size=ranks.world_size,
        status="failed" if failure is not None else outcome,
        exit_status=status,
        message=" ".join(filter(None, (failure, missing))) or None,
        device=kept.device,
        warmup_steps=kept.warmup_steps,
        timed_steps_ms=kept.timed_ms,
        profiled_steps=kept.profiled,
        trace=kept.trace,
        stacks=kept.stacks,
        chosen=recorder.membership.chosen,
        sources=probe.sites.sources(),
        functions=probe.functions,
        environment=environment(target, kept.device, ranks),
        warnings=(*kept.warnings, *probe.warnings),
        switched_on=probe.switched_on,
        end=replace(end, rank=ranks.rank) if end is not None else None,
        untrained=probe.untrained.names,
        fidelity=kept.fidelity,
        policies=kept.policies,
        counted=kept.counted,
        watched=kept.watched,
    )
