"""Many ranks as one result, and results without a trace.

Those are of runs that failed or that only compared a step, of compilers' logs, and of memory
snapshots: who held the peak, by line and by kind. The kinds rest on torch's own frames alone: files
of ``torch/`` and C++ names of its engine. Kinds that look the same there (weights or their copies,
gradients or workspace) are one kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan._version import __version__
from recompute_scan.analysis.headline import headline
from recompute_scan.compiled.code import answer_alone, graphs_from
from recompute_scan.compiled.logs import CompilerLog
from recompute_scan.crash import RankEnd
from recompute_scan.errors import InputError
from recompute_scan.files import is_file, opened
from recompute_scan.findings.base import Evidence
from recompute_scan.findings.registry import check_all, check_ranks
from recompute_scan.frameworks.pytorch import CHECKPOINT_FILE
from recompute_scan.result import (
    DOUBLED_LEAD,
    Checked,
    EvidenceLevel,
    HeldBy,
    HeldKind,
    Level,
    MemorySnapshot,
    Rank,
    Result,
    Step,
    Verdict,
)
from recompute_scan.result.fidelity import SAME, Fidelity, in_words
from recompute_scan.result.run_record import RunInfo, run_records_in, stacks_text_name
from recompute_scan.trace import Address
from recompute_scan.trace.allocations import DeviceHistory, Stack, read_snapshot
from recompute_scan.trace.columns import Limits
from recompute_scan.units import size

_LONGEST_STACKS = 1 << 20
INTERRUPTED = 130


class Ends(Struct, frozen=True):
    """The run records of a run and the end of every rank that left word, both by rank."""

    records: tuple[RunInfo, ...] = ()
    ranks: tuple[RankEnd, ...] = ()

    @property
    def failed(self) -> bool:
        """Did some rank raise, exit with a failure, hang, or end from outside?

        Not where somebody interrupted the run, and the rest followed from that.
        """
        if all(end.ending == "ended" for end in self.ranks):
            return False
        from recompute_scan.diagnose.outcome import own_failure  # noqa: PLC0415 - most end well

        interrupted = any(one.exit_status == INTERRUPTED for one in self.records)
        return not interrupted or own_failure(self.ranks)

    def with_crash(self, result: Result) -> Result:
        """The result with what is known of the failure, the finding on it first."""
        from recompute_scan.diagnose.outcome import (  # noqa: PLC0415
            crash_of,
            findings_of,
        )

        findings = findings_of(self.ranks)
        known = {finding.code for finding in findings}
        checked = [Checked(one.code, one.name, "found") for one in findings]
        return replace(
            result,
            crash=crash_of(self.ranks),
            findings=findings + tuple(f for f in result.findings if f.code not in known),
            checked=(*(c for c in result.checked if c.code not in known), *checked),
        )


def ends_in(addresses: Sequence[Address]) -> Ends:
    """The ends of the run in a folder that ``run`` wrote; empty for anything else."""
    if len(addresses) != 1 or not (folder := Path(addresses[0])).is_dir():
        return Ends()
    records = run_records_in(folder)
    world = max((info.world_size for info in records), default=0)
    by_rank = {info.rank: info for info in records}
    written = {path.name for path in folder.iterdir()}
    ends = [_end(folder, rank, by_rank.get(rank), written) for rank in range(world)]
    known = Ends(records, tuple(end for end in ends if end is not None))
    if not known.failed:
        return known
    # In a run that failed, who left nothing did not end well either.
    told = (end or RankEnd(rank=rank, ending="killed") for rank, end in enumerate(ends))
    return Ends(records, tuple(told))


def _end(folder: Path, rank: int, info: RunInfo | None, files: Collection[str]) -> RankEnd | None:
    end = None
    if info is not None:
        end = info.end or RankEnd(rank=rank, ending="ended")
        if end.ending != "killed":
            return end
    # A launcher ended it before it could write its run record; its stacks may be there.
    written = folder / stacks_text_name(rank)
    if written.name not in files or not is_file(written):
        return end
    from recompute_scan.diagnose.tracebacks import (  # noqa: PLC0415
        main_stack,
        user_frame,
    )

    try:
        with opened(written) as file:
            stack = main_stack(file.read(_LONGEST_STACKS).decode("utf-8", "replace"))
    except OSError:
        return end
    if not stack:
        return end
    end = end or RankEnd(rank=rank, ending="killed")
    frame = user_frame(stack)  # none where its script had already ended
    return replace(end, place=frame.place if frame is not None else None, stack=stack)


# Which rank's answer stands for the run when they differ: the worst, the last of these.
_SEVERITY: tuple[Verdict, ...] = ("inconclusive", "none", "partial", "full", "doubled")


class Piece(Struct, frozen=True):
    """The answer for one rank."""

    name: str
    rank: int
    result: Result


def merge(pieces: Sequence[Piece], failures: Sequence[InputError]) -> Result:
    """One result for all ranks: the worst one, and a row for each.

    Raises:
        InputError: There is no piece; the first failure.
    """
    if not pieces:
        raise failures[0] if failures else InputError("E308", "No trace was named.")
    main = worst(pieces)
    verdicts = sorted({piece.result.verdict for piece in pieces})
    warnings = [f"Left out: {error.what} {error.why or ''}".strip() for error in failures]
    if len(verdicts) > 1:
        said = f"The ranks differ ({', '.join(verdicts)}); this report shows the worst."
        warnings.insert(0, said)
    result = replace(
        main.result,
        ranks=tuple(_rank(piece) for piece in sorted(pieces, key=lambda piece: piece.rank)),
        warnings=(*warnings, *main.result.warnings),  # the last may say what to record
    )
    if len(verdicts) > 1:
        result = replace(result, headline=headline(result))
    return check_ranks(result)


def worst(pieces: Sequence[Piece]) -> Piece:
    """The piece that stands for the run: the worst verdict, and of equal ones wrong gradients."""

    def badness(piece: Piece) -> tuple[int, bool, int]:
        wrong = any(finding.wrong_gradients for finding in piece.result.findings)
        return _SEVERITY.index(piece.result.verdict), wrong, -piece.rank

    return max(pieces, key=badness)


def _rank(piece: Piece) -> Rank:
    cost, verdict = piece.result.cost, piece.result.verdict
    each = [region.recompute_runs_per_backward for region in piece.result.regions]
    return Rank(
        rank=piece.rank,
        trace=piece.name,
        verdict=verdict,
        step_ms=cost.step_ms if cost else None,
        recomputes_per_block=float(np.mean(each)) if each and verdict != "inconclusive" else None,
        recompute_ms=cost.recompute_ms if cost else None,
    )


_SAYS = (
    "There is no trace with the compiler's logs: times, how often each graph runs, and all that "
    "was not compiled are unknown."
)
_ONLY_COMPARED = (
    "No step was profiled: recomputes were compared with their forward, and not counted."
)
_ONLY_COUNTED = (
    "{why} Hooks had counted the runs of checkpointed blocks in step {step}. The cost is not "
    "known, nor whether other work runs again."
)
_TOO_SHORT = "The run ended before a step was profiled whole."
_SURROUNDED = "Checkpoints around compiled code were read from the stack of its first compilation."
_UNSURROUNDED = (
    "These logs do not show whether checkpoints are around compiled code, which would run all of "
    "it once more."
)


def bare_result(
    reason: str | None,
    headline: str,
    *,
    verdict: Verdict = "inconclusive",
    evidence_level: EvidenceLevel = "annotated",
    confidence: Level = "low",
    environment: Mapping[str, str] | None = None,
    warnings: tuple[str, ...] = (),
) -> Result:
    """A result without steps, regions and cost."""
    return Result(
        tool_version=__version__,
        verdict=verdict,
        evidence_level=evidence_level,
        confidence=confidence,
        reason=reason,
        headline=headline,
        recompute_per_backward=None,
        mean_recompute=None,
        recomputed_share=None,
        attention=None,
        steps=(),
        families=(),
        regions=(),
        cost=None,
        findings=(),
        checked=(),
        ranks=(),
        health={},
        environment=dict(environment or {}),
        warnings=warnings,
    )


def result_without_trace(info: RunInfo) -> Result:
    """The result of a run that failed before anything could be recorded."""
    return bare_result(
        # The record says how recording ended, and not why steps are missing.
        "The run ended before a step was recorded.",
        "The run ended before a step was recorded: no verdict on checkpointing.",
        environment=info.environment,
        warnings=info.warnings,
    )


def result_by_hooks(info: RunInfo, trace: Result | None = None) -> Result | None:
    """The result of a run without a whole step in a trace: by recomputes that were compared with
    their forward, or counted in an early step; ``None`` where neither was done. It has steps where
    the run has profiled some whole, and its trace, with this result, does not show them whole.

    Blocks without a checkpoint are known where they have the same classes, and other work that runs
    again is not seen. So what is not doubled is ``full`` or ``partial``, and never ``none``.
    """
    counted, fidelity = info.counted, info.fidelity or Fidelity()
    steps: tuple[Step, ...] = ()
    why = _TOO_SHORT
    if trace is not None and info.profiled_steps and trace.reason:
        steps, why = trace.steps, trace.reason
    if info.fidelity is not None and (counted is None or info.trace is None):
        bare = bare_result(_ONLY_COMPARED, f"{SAME} {in_words(fidelity)}")
    elif counted is not None:
        ratios, said = counted.ratios, f"{counted.described}."
        most = max(ratios, default=0.0)
        verdict: Verdict = "full" if set(ratios) == {1.0} and not counted.others else "partial"
        if not most or not all(ratio.is_integer() for ratio in ratios):
            verdict = "inconclusive"
        elif most >= 2:
            verdict = "doubled"
        elif counted.nested:
            verdict = "inconclusive"
            said = f"{said} Those passes may have run forward work again, too."
        said = f"{DOUBLED_LEAD}{said}" if verdict == "doubled" else f"{said[0].upper()}{said[1:]}"
        told = verdict != "inconclusive"
        bare = bare_result(
            None if told else said,
            said,
            verdict=verdict,
            evidence_level="hooks",
            confidence="medium" if told and (most >= 2 or counted.nested is not None) else "low",
            warnings=tuple(
                filter(None, (_ONLY_COUNTED.format(step=counted.step, why=why), info.message))
            ),
        )
        bare = replace(bare, recompute_per_backward=most if told else None, steps=steps)
    else:
        return None
    seen = Evidence(
        sources=info.sources, untrained=info.untrained, fidelity=fidelity, watched=info.watched
    )
    findings, checked = check_all(seen)
    return replace(
        bare,
        findings=findings,
        checked=checked,
        fidelity=info.fidelity,
        watched=info.watched,
        environment=info.environment,
        warnings=(*info.warnings, *bare.warnings),
    )


def result_of_log(log: CompilerLog) -> Result:
    """The result of the graphs in a log; times are unknown."""
    graphs = graphs_from(log.records)
    alone = answer_alone(graphs)
    judgement = alone.judgement
    environment = {"torch": graphs.torch} if graphs.torch else {}
    # One account, so never ``high``; ``low`` where checkpoints around the code are not known.
    told = alone.surrounded and judgement.verdict != "inconclusive"
    sure: Level = "medium" if told else "low"
    seen = Evidence(confidence=sure, environment=environment, graphs=alone.code)
    findings, checked = check_all(seen)
    warnings = [_SAYS, _SURROUNDED if alone.surrounded else _UNSURROUNDED]
    if log.others:
        warnings.append(f"Of {log.others + 1} logs of this rank in the folder, the last was read.")
    bare = bare_result(
        judgement.reason,
        "",
        verdict=judgement.verdict,
        evidence_level="graphs",
        confidence=sure,
        environment=environment,
        warnings=tuple(warnings),
    )
    result = replace(
        bare,
        recompute_per_backward=judgement.highest,
        mean_recompute=judgement.mean,
        recomputed_share=judgement.share,
        findings=findings,
        checked=checked,
        compiled=alone.code,
    )
    return replace(result, headline=headline(result))


_TORCH = re.compile(r"(?:^|.*/)torch/.{0,400}\.py$")
_PYTHON = re.compile(r".*\.py$|<.*>$|.*ipykernel.*")
_MOST_LINES = 30


def snapshots_at(paths: list[Path], limits: Limits) -> tuple[MemorySnapshot, ...]:
    """The contents of the snapshots, one entry a device.

    Raises:
        InputError: See :func:`recompute_scan.trace.allocations.read_snapshot`.
    """
    return tuple(
        _shown(path.name, device)
        for path in paths
        for device in read_snapshot(path, limits)
        if device.peak or device.reserved
    )


def snapshots_among(paths: list[Path], limits: Limits) -> tuple[MemorySnapshot, ...]:
    """The same for the files that are snapshots; a pickle may be anything else."""
    found: list[MemorySnapshot] = []
    for path in paths:
        with suppress(InputError):
            found.extend(snapshots_at([path], limits))
    return tuple(found)


def result_of_snapshots(snapshots: tuple[MemorySnapshot, ...]) -> Result:
    """The result of snapshots alone: memory, and no word on recomputes."""
    why = "A memory snapshot has allocations but no operators."
    said = f"No verdict on checkpointing: {why}"
    if snapshots:
        most = max(snapshots, key=lambda one: one.peak_bytes)
        said = (
            f"GPU {most.device}: {size(most.peak_bytes)} in use at the peak ({most.file}). A "
            "snapshot does not show recomputes."
        )
    bare = bare_result(why, said)
    return replace(bare, snapshots=snapshots)


def _shown(file: str, device: DeviceHistory) -> MemorySnapshot:
    sizes: Counter[tuple[HeldKind, str]] = Counter()
    blocks: Counter[tuple[HeldKind, str]] = Counter()
    kinds: Counter[str] = Counter()
    known: dict[int, tuple[HeldKind, str]] = {}
    for block in device.blocks:
        who = known.get(id(block.stack))
        if who is None:
            who = known[id(block.stack)] = kind_of_stack(block.stack), _site(block.stack)
        sizes[who] += block.size
        blocks[who] += 1
        kinds[who[0]] += block.size
    return MemorySnapshot(
        file=file,
        device=device.device,
        peak_bytes=device.peak,
        end_bytes=device.in_use,
        reserved_bytes=device.reserved,
        events=device.events,
        out_of_memory=device.out_of_memory,
        by_kind=dict(kinds.most_common()),
        held=tuple(
            HeldBy(kind, site, size, blocks[kind, site])
            for (kind, site), size in sizes.most_common(_MOST_LINES)
        ),
    )


def kind_of_stack(stack: Stack) -> HeldKind:
    """The use of memory with this stack, as far as torch's own frames show it."""
    checkpointed = module = python = False
    for frame in stack:
        python |= bool(_PYTHON.match(frame.file))
        if frame.file.endswith(CHECKPOINT_FILE):
            if "_CachingTorchDispatchMode" in frame.name or frame.name == "__torch_dispatch__":
                return "kept"
            if frame.name in ("unpack_hook", "recompute_fn", "backward"):
                return "recompute"
            checkpointed = True
        elif "torch/optim/" in frame.file and frame.name != "zero_grad":
            return "optimizer"
        elif frame.name.startswith("torch::autograd::Engine::evaluate_function"):
            return "backward"
        elif frame.file.endswith("torch/nn/modules/module.py"):
            module |= frame.name in ("_call_impl", "_wrapped_call_impl")
    if checkpointed:
        return "checkpoint"
    if module:
        return "forward"
    return "other" if python else "unknown"


def _site(stack: Stack) -> str:
    """The innermost line of Python outside torch; empty where there is none."""
    inner = (f for f in stack if _PYTHON.match(f.file) and not _TORCH.match(f.file))
    return next((f"{frame.file}:{frame.line}" for frame in inner), "")
