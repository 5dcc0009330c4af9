"""The run record: step times, settings and surroundings of one rank of a recorded run.

Written by ``record/`` as ``run-rank<N>.json`` into the run's folder, read by the pipeline.
A run's folder holds, for each rank N that recorded::

    trace-rank<N>.json.gz    the profiled steps, without stacks
    stacks-rank<N>.json.gz   one more step, with Python stacks (call sites only, never times)
    run-rank<N>.json         this document
    so-far-rank<N>.json      the same, of a rank that still records or that was killed

and, once analysed, ``result.json``, ``report.html`` and ``fix.patch``, where there is a fix. A run
that failed may also leave::

    where-rank<N>.txt        every thread's stack, of a rank that hung or was ended by a launcher
    flight-rank<N>.json      the last collectives of a rank that hung, by torch's flight recorder

A rehearsal has step times with modules recomputed and kept in turn, and what is saved. It is
written by ``record/arrange/`` as ``rehearsal-rank<N>.json`` into the run's folder, and read by the
plan.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from textwrap import dedent
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from recompute_scan.crash import RankEnd
from recompute_scan.errors import InputError
from recompute_scan.files import content, decoded, document, is_file, write_whole
from recompute_scan.result.fidelity import Fidelity, Policies
from recompute_scan.result.watched_step import WatchedStep

RUN_SCHEMA = "recompute-scan-run/1"
# More than any training has had.
_MOST_RANKS = 1 << 20
# Of a step: no more than some thirty years, so that sums and squares stay finite.
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
# Of a file in the record's own folder: no way out of it, and not the folder itself.
FileName = Annotated[str, Meta(pattern=r"^(?!\.\.?$)[^/\\\x00]+$")]
# Made by the one rank that reports on a failed run.
CLAIM = ".reported"
# Made by rank 0, for others to see whether they share the folder.
WORD = ".word"
# The fix as a diff, next to the report.
PATCH = "fix.patch"
# Made by a process that the script started itself, when everything was recorded.
STOPPED = ".stopped"


Purpose = Literal[
    "see", "measure", "compare-gradients", "apply", "record", "compare", "plan", "explain"
]


class NextCommand(Struct, frozen=True):
    """A command that a report ends with.

    Attributes:
        purpose: ``see`` the fix; ``measure`` it, in memory; ``compare-gradients`` with and without
            checkpoints; ``apply`` the fix; ``record`` again, once the change is made; ``compare``
            both recordings; ``plan`` checkpoints; ``explain`` a failure.
        text: The command as a shell takes it.
        what: The same in a sentence for a person.
    """

    purpose: Purpose
    text: str
    what: str = ""


def source_lines(text: str) -> list[str]:
    """The lines of a source file as Python counts them, each with its end.

    A form feed, a vertical tab or U+2028 ends none, as ``str.splitlines`` has it.
    """
    return io.StringIO(text, newline="").readlines()


def file_of_site(site: str) -> str:
    """The file of a call site, ``file:line``."""
    return site.rpartition(":")[0]


class Source(Struct, frozen=True):
    """A statement of the user's code with up to three lines around it.

    Attributes:
        first: Number of the first line of ``text``.
        text: The lines, without the last line's newline.
        begin: Number of the statement's first line.
        end: Number of its last line.
        alone: Whether it is the only statement of its block, so that deleting it would leave
            the block empty.
        whole_lines: Whether nothing else is on its lines, so that they can be deleted.
        installed: Whether the file belongs to an installed library, and is not to be changed.
        digest: SHA-256 of the file; empty where there is none.
    """

    first: int
    text: str
    begin: int
    end: int
    alone: bool
    whole_lines: bool
    installed: bool = False
    digest: str = ""

    @property
    def statement(self) -> str:
        """The statement's own lines, without common indentation."""
        lines = self.text.split("\n")[self.begin - self.first : self.end - self.first + 1]
        return dedent("\n".join(lines))


class SwitchedOn(Struct, frozen=True):
    """A way of checkpointing that was switched on and still was when recording ended.

    Attributes:
        mechanism: Its name, as in results.
        site: ``file:line`` that switched it on; empty where unknown.
    """

    mechanism: str
    site: str


class Measurements(Struct, frozen=True):
    """Measurements that only a run with ``--verify`` makes, besides the step times.

    Attributes:
        losses: Values that went through ``backward``, in order, as ``float.hex()`` gives them.
        seeded: Whether the script set torch's seed itself.
        bypassed_calls: Checkpoint calls that were taken out in memory.
        bypassed_functions: Autograd functions of the script's that were taken out too, by name.
        peak_allocated_bytes: Most that torch allocated on the GPU over the timed steps.
        peak_reserved_bytes: Most that torch reserved there.
        peak_rss_bytes: Most that the process had resident over the timed steps.
    """

    losses: tuple[str, ...]
    seeded: bool
    bypassed_calls: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_rss_bytes: int | None
    bypassed_functions: tuple[str, ...] = ()


def each_pass(most: float) -> str:
    """The words for each backward pass; how many go through one forward pass, where several."""
    return f"each of up to {most:g} backward passes" if most >= 2 else "each backward pass"


class Counted(Struct, frozen=True):
    """How often checkpointed blocks ran in one step, counted by hooks and without a profiler.

    Attributes:
        step: Which of all steps it was, 1-based.
        runs: For each block, its runs in the forward pass and those in the backward pass.
        others: Modules of the same classes without a checkpoint in or around them.
        asked: For each block, its runs in the forward pass, each counted once for every backward
            pass through it; empty if there was one each.
        nested: Backward passes inside another one that no known checkpoint started: what they go
            through may be forward work that ran again. ``None`` where they were not counted, as in
            the first step.
    """

    step: int
    runs: tuple[tuple[int, int], ...]
    others: int = 0
    asked: tuple[int, ...] = ()
    nested: int | None = None

    @property
    def ratios(self) -> tuple[float, ...]:
        """How often each block ran again in each backward pass for each run in the forward pass."""
        asked = self.asked or [forward for forward, _ in self.runs]
        return tuple(
            again / one for (_, again), one in zip(self.runs, asked, strict=False) if one > 0
        )

    @property
    def passes(self) -> float:
        """Most backward passes through one forward pass of a block."""
        pairs = zip(self.asked, self.runs, strict=False)
        return max((one / forward for one, (forward, _) in pairs if forward > 0), default=1.0)

    @property
    def described(self) -> str:
        """The count, in words that begin small and end without a stop."""
        ratios, by = self.ratios, self._by
        if not ratios:
            return f"no checkpoint was seen {by}"
        most = max(ratios)
        many = sum(ratio == most for ratio in ratios)
        which = f"{many} of {len(ratios)} checkpointed blocks"
        if many == len(ratios):
            which = f"all {many} checkpointed blocks" if many > 1 else "the checkpointed block"
        if not most:
            return f"no checkpointed block ran again {by}"
        which += " runs" if many == 1 else " run"
        if most != int(most):  # a forward pass had no backward pass, as a pipeline's first
            forward, again = [run for run in self.runs if run[0]][ratios.index(most)]
            return f"{which} {forward} times, {again} again in backward {by}"
        times = {1.0: "once", 2.0: "twice"}.get(most, f"{most:g} times")
        return f"{which} again {times} in {each_pass(self.passes)} {by}"

    @property
    def _by(self) -> str:
        """The words on how it was counted, and on passes that were not."""
        other = f"; nested backward passes of other code: {self.nested}" if self.nested else ""
        return f"(counted by hooks{other})"


def step_has_fix(number: int) -> bool:
    """Whether a run that switches the fix on and off has it in this timed step, counted from 0.

    Off, on, on, off: each pair that begins with an even number has one step of each, and neither
    way always comes first.
    """
    return number % 4 in (1, 2)


class RunInfo(Struct, frozen=True):
    """One rank's run record of its run.

    Attributes:
        rank: Global rank, 0-based.
        world_size: Number of ranks that took part.
        status: ``complete`` (every wanted step was recorded), ``ended-early`` (the script
            finished first) or ``failed`` (the script raised or exited with a failure).
        exit_status: The script's own exit status; 0 when we stopped it after the last step.
        message: One sentence for the person, when the status is not ``complete``.
        device: ``cpu`` or ``cuda``: what was recorded and timed.
        warmup_steps: Optimizer steps seen before timing began.
        timed_steps_ms: Duration of each unprofiled step, in ms, in order.
        profiled_steps: Complete steps in the trace without stacks.
        trace: Name of the trace in this folder, or ``None`` when none was written.
        stacks: Name of the trace with stacks, or ``None``.
        sources: The statement at each call site, keyed ``file:line``.
        functions: Line that calls each checkpoint function of the script's own that bears no
            annotation, by the function's name.
        environment: Versions, device, settings; all values are text.
        warnings: What the person should know, one sentence each.
        switched_on: Ways of checkpointing that were on, whether or not they did anything.
        measured: What was measured for ``--verify``, ``None`` for other runs.
        end: How the script ended, where it raised, exited with a failure or hung.
        untrained: Modules with trainable weights that got no gradient, because a reentrant
            checkpoint is around them and no input of it needs one.
        chosen: Whether this rank was one of those to record (``--ranks``); the others leave step
            times and no trace.
        bug: What ended the recording where that was a bug in it, one sentence.
        fidelity: How the recomputes of one step compare with their forward; ``None`` where no
            step was compared.
        policies: Decisions of selective checkpoints' policies in one step; ``None`` if not
            observed.
        counted: How often checkpointed blocks ran in an early step; ``None`` where no step ended.
        watched: The use of each operator of one step; ``None`` where no step was watched.
    """

    rank: Annotated[int, Meta(ge=0, le=_MOST_RANKS)]
    world_size: Annotated[int, Meta(ge=1, le=_MOST_RANKS)]
    status: Literal["complete", "ended-early", "failed"]
    exit_status: int
    device: Literal["cpu", "cuda"]
    warmup_steps: int
    timed_steps_ms: tuple[Milliseconds, ...]
    profiled_steps: int
    trace: FileName | None
    stacks: FileName | None
    message: str | None = None
    sources: dict[str, Source] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    switched_on: tuple[SwitchedOn, ...] = ()
    measured: Measurements | None = None
    end: RankEnd | None = None
    untrained: tuple[str, ...] = ()
    chosen: bool = True
    bug: str | None = None
    fidelity: Fidelity | None = None
    policies: Policies | None = None
    counted: Counted | None = None
    watched: WatchedStep | None = None
    schema: str = RUN_SCHEMA


def run_info_name(rank: int | str) -> str:
    """File name of a rank's run record in the run's folder."""
    return f"run-rank{rank}.json"


def compiled_name(rank: int) -> str:
    """File name of the compiler's graphs that a rank leaves in the run's folder."""
    return f"compiled-rank{rank}.log"


def stacks_text_name(rank: int) -> str:
    """File name of the stacks that a rank leaves when it hangs or is terminated."""
    return f"where-rank{rank}.txt"


def so_far_name(rank: int | str) -> str:
    """File name of the record that a rank leaves if it is killed now."""
    return f"so-far-rank{rank}.json"


def write_run_info(folder: Path, info: RunInfo) -> None:
    """Write the run record into the trace's folder; the file appears whole or not at all."""
    write_whole(folder / run_info_name(info.rank), encode_run_info(info))
    (folder / so_far_name(info.rank)).unlink(missing_ok=True)


def write_so_far(folder: Path, info: RunInfo) -> None:
    """Write what is to count as the run record if no other comes."""
    write_whole(folder / so_far_name(info.rank), encode_run_info(info))


def accept_so_far(folder: Path) -> None:
    """The run is over: what ranks that were killed had recorded so far is their run record."""
    for path in folder.glob(so_far_name("*")):
        target = folder / run_info_name(path.stem.rpartition("rank")[2])
        with suppress(OSError):
            if not target.exists():
                path.replace(target)


def run_records_in(folder: Path) -> tuple[RunInfo, ...]:
    """The run records in a run's folder that can be read, by rank."""
    found = []
    for path in folder.glob(run_info_name("*")):
        with suppress(InputError):
            if is_file(path):  # a pipe would be waited for
                found.append(read_run_info(path))
    return tuple(sorted(found, key=lambda info: info.rank))


def encode_run_info(info: RunInfo) -> bytes:
    """The run record as the JSON that :func:`parse_run_info` reads."""
    return document(info)


def read_run_info(path: Path) -> RunInfo:
    """Read a run record back.

    Raises:
        InputError: The file is missing, unreadable or no run record of this version (``E306``).
    """
    try:
        data = content(path)
    except OSError as error:
        raise InputError("E306", f"Cannot use {path.name}.", why=str(error)) from None
    return parse_run_info(data, path.name)


def parse_run_info(data: bytes, name: str) -> RunInfo:
    """A run record from its bytes.

    Raises:
        InputError: It is no run record of this version (``E306``).
    """
    try:
        info = decoded(data, RunInfo)
    except (UnicodeDecodeError, RecursionError, msgspec.MsgspecError) as error:
        raise InputError("E306", f"Cannot use {name}.", why=str(error)) from None
    if info.schema != RUN_SCHEMA:
        raise InputError("E306", f"Cannot use {name}.", why=f"its schema is {info.schema!r}")
    return info


Way = Literal["today", "keep", "recompute", "parts", "selective", "offload", "chosen"]


class ArmWanted(Struct, frozen=True):
    """One arrangement of checkpoints that a rehearsal switches to.

    Attributes:
        way: ``today`` leaves the script's own; ``keep`` has none, ``recompute`` one around every
            module that can have one, ``parts`` one around every part of these instead,
            ``selective`` one around the modules that keeps the results of heavy operators;
            ``offload`` has none, and copies what these modules save to the host; ``chosen`` does
            what is named.
        recomputed: Names of modules, for ``chosen``.
        selective: Names of modules with checkpoints that keep such results.
        operators: The heavy ones, where that has been found out.
        offloaded: Names of modules that send saved tensors to the host, for ``chosen``.
    """

    way: Way
    recomputed: tuple[str, ...] = ()
    selective: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()


class Candidate(Struct, frozen=True):
    """A module that can have its own checkpoint.

    Attributes:
        module: Name below the model.
        module_class: Its class.
        checkpointed: Whether the script checkpoints it.
        again_ms: What its recomputes take in a step; the median over steps in which everything
            is recomputed, or every part is.
        selective_ms: Likewise, where the results of heavy operators are kept.
        weight_bytes: Of all its weights, sharded ones as this rank has them between steps.
        part_of: Place of the candidate that it is a part of, -1 for none. Parts come after all
            others, and are recomputed alone or with the whole.
    """

    module: str
    module_class: str
    checkpointed: bool
    again_ms: float
    selective_ms: float = 0.0
    weight_bytes: int = 0
    part_of: int = -1


class ModuleRun(Struct, frozen=True):
    """One forward run of a candidate in the step that was looked at.

    Attributes:
        candidate: Its place among the candidates.
        begin: When it began; all moments are numbers of events, ascending.
        backward: When its backward pass began to release the tensors that it had saved.
        part_of: Place of the run that it is a part of, -1 for none.
    """

    candidate: int
    begin: int
    backward: int
    part_of: int = -1


class Hold(Struct, frozen=True):
    """Something that keeps one storage in memory until the backward pass needs it.

    Attributes:
        run: Place of the innermost module's run among all; -1 where it is outside of them.
        kind: ``saved`` by an operator; ``input`` of the run, which a checkpoint would keep;
            ``heavy``, the result of an operator that a selective one would keep; ``local``, of no
            run: the script still has it, whatever is kept for the backward pass.
        begin: From this moment on.
        end: Until before this moment.
    """

    run: int
    kind: Literal["saved", "input", "heavy", "local"]
    begin: int
    end: int


class Storage(Struct, frozen=True):
    """Memory that a step without checkpoints saves for its backward pass: bytes, what holds it."""

    size: int
    holds: tuple[Hold, ...]


class ArmMeasured(Struct, frozen=True):
    """The measurements of one arrangement.

    Attributes:
        way: Which one.
        steps_ms: Step times, in order; those at one place of several arms follow each other.
        saved_bytes: Most that was saved for the backward pass at once, what a recompute makes
            again included; ``None`` where it was not looked at.
        allocated_bytes: Most that torch allocated on the GPU; ``None`` on a CPU.
    """

    way: Way
    steps_ms: tuple[float, ...]
    saved_bytes: int | None
    allocated_bytes: int | None = None


class Rehearsal(Struct, frozen=True):
    """The rehearsal of one rank.

    Attributes:
        rank: Global rank, 0-based.
        device: What was timed.
        candidates: Modules that can have checkpoints, in the order in which they ran; then their
            parts.
        runs: Their runs in one step, in order.
        storages: What that step saved without checkpoints.
        arms: The arrangements, as they were asked for.
        free_bytes: Free memory of the machine behind the last step, or of the GPU with today's
            arrangement, whatever torch's cache holds; ``None`` where that is not known.
        remarks: What the person should know, one sentence each.
        operators: The heavy ones that were met, ``aten.mm.default``.
        levels: Most that torch had allocated on the GPU, behind the event before, up to each in
            the step that was looked at, where everything was recomputed; empty on a CPU.
        fullest: Before which events it was most between two runs or recomputes, and before which it
            would have been without any checkpoint.
        failed: The arrangement that the script failed in.
    """

    rank: int
    device: Literal["cpu", "cuda"]
    candidates: tuple[Candidate, ...]
    runs: tuple[ModuleRun, ...]
    storages: tuple[Storage, ...]
    arms: tuple[ArmMeasured, ...]
    free_bytes: int | None = None
    remarks: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    fullest: tuple[int, ...] = ()
    failed: Way | None = None

    def whole_run(self, run: int) -> int:
        """The run that this one is, or is a part of; -1 of none."""
        return run if run < 0 or self.runs[run].part_of < 0 else self.runs[run].part_of

    def joined(self, other: Rehearsal) -> Rehearsal:
        """This one with the step times of another of the same modules too."""
        both = list(zip(self.candidates, other.candidates, strict=False))
        if len(self.candidates) != len(other.candidates) or any(
            one.module != again.module for one, again in both
        ):
            return self
        arms = {arm.way: arm.steps_ms for arm in other.arms}
        return replace(
            self,
            candidates=tuple(
                replace(
                    one,
                    again_ms=(one.again_ms + again.again_ms) / 2,
                    selective_ms=(one.selective_ms + again.selective_ms) / 2,
                )
                for one, again in both
            ),
            arms=tuple(
                replace(arm, steps_ms=arm.steps_ms + arms.get(arm.way, ())) for arm in self.arms
            ),
        )


def usual_ms(times: Sequence[float]) -> float:
    """The median of the faster half, which other work on the machine slowed least; 0 of none."""
    return median(sorted(times)[: (len(times) + 1) // 2] or [0.0])


def fixed_places(ranks: Sequence[Rehearsal]) -> frozenset[int]:
    """Places of candidates that some rank saw no backward pass of, so that none recomputes them."""
    moved = (frozenset(run.candidate for run in one.runs if run.backward >= 0) for one in ranks)
    return frozenset(range(len(ranks[0].candidates))) - frozenset.intersection(*moved)


def whole_places(candidates: Sequence[Candidate]) -> list[int]:
    """Places of those that are no part of another."""
    return [place for place, one in enumerate(candidates) if one.part_of < 0]


def parts_of(candidates: Sequence[Candidate]) -> dict[int, list[int]]:
    """Places of each one's parts, by its own place."""
    found: dict[int, list[int]] = {place: [] for place in whole_places(candidates)}
    for place, one in enumerate(candidates):
        if one.part_of >= 0:
            found[one.part_of].append(place)
    return found


def _name(rank: int | str) -> str:
    return f"rehearsal-rank{rank}.json"


def write_rehearsal(folder: Path, rehearsal: Rehearsal) -> None:
    """Write it into the run's folder; the file appears whole or not at all."""
    write_whole(folder / _name(rehearsal.rank), msgspec.json.encode(rehearsal))


def read_rehearsals(folder: Path) -> tuple[Rehearsal, ...]:
    """The rehearsals that the ranks of a run have left, by rank.

    Raises:
        InputError: One of the files is not of this version (``E306``).
    """
    found = []
    for path in folder.glob(_name("*")):
        try:
            found.append(decoded(content(path), Rehearsal))
        except (OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError) as error:
            raise InputError("E306", f"Cannot use {path.name}.", why=str(error)) from None
    return tuple(sorted(found, key=lambda one: one.rank))
