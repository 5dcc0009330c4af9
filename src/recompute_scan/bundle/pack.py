"""The archive: packed, analyzed again, packed smaller until it fits, and listed for its sender.

Each archive is analyzed as its receiver would, and every difference between both answers is
listed. The result, the page and the filled-in bug report in the archive are made from the archive,
so they cannot hold more than it does.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.advise.choice import NOT_READ
from recompute_scan.analysis.inputs import load_each
from recompute_scan.analysis.pipeline import analyse, answer_to
from recompute_scan.analysis.ranks import Piece, merge, worst
from recompute_scan.bundle.names import Names
from recompute_scan.bundle.redact import (
    Cut,
    clean_run_record,
    clean_trace,
    rows_of,
    smaller_and_smaller,
    trace_json,
)
from recompute_scan.cost.flops import UNKNOWN_MACHINE
from recompute_scan.errors import InputError
from recompute_scan.frameworks.registry import MECHANISMS
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.report import words
from recompute_scan.report.render import render_html, render_markdown
from recompute_scan.report.templating import markdown_code, markdown_prose, visible
from recompute_scan.result import Finding, Result, to_json
from recompute_scan.result.run_record import RunInfo, encode_run_info, run_info_name
from recompute_scan.trace import DEFAULT_LIMITS, Address, Limits
from recompute_scan.trace.columns import Int64


def issue_text(
    result: Result, differences: Sequence[str], dropped: Sequence[str], before: Result | None = None
) -> str:
    """A report for an issue tracker, in GitHub-flavoured Markdown.

    Args:
        result: The result as the archive gives it.
        differences: What differs from the original, one sentence each.
        dropped: What was left out of the trace, one phrase each.
        before: The original, which knows by which of a library's names the script calls it.
    """
    result = replace(result, findings=tuple(_as_called(one, before) for one in result.findings))
    facts = {"recompute-scan": result.tool_version, **result.environment}.items()
    parts = [
        f"## Activation recompute: {words.VERDICT_WORDS[result.verdict]}",
        "*What did you expect instead, and what does the training script do? (Two sentences.)*",
        "### Versions",
        "\n".join(f"- {markdown_code(name, 60)} {markdown_code(value)}" for name, value in facts),
        "### Findings",
        render_markdown(result).rstrip("\n").replace("\n#### ", "\n##### "),
        "### Call sites, relative to their packages",
        _sites(result),
        "### How to reproduce",
        "With the archive attached here, and recompute-scan "
        f"{markdown_code(result.tool_version, 20)}:\n\n"
        "```console\n$ recompute-scan analyze ARCHIVE.zip\n```\n\n"
        "With the script: `recompute-scan run SCRIPT`.",
        _left_out(differences, dropped),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _as_called(finding: Finding, before: Result | None) -> Finding:
    """The finding with the name that the script's own call has; lines are not in an archive.

    Only names that a library gave come in from the original.
    """
    fix = finding.fix
    if fix is None:
        return finding
    reason = fix.reason
    if reason:
        reason = reason.replace(NOT_READ, "The archive holds no lines of the script, so no diff.")
    summary, keep, remove = fix.summary, fix.keep, fix.remove
    said = [each.fix.summary for each in before.findings if each.fix] if before else []
    for rename in (one for mechanism in MECHANISMS for one in mechanism.renames):
        old = any(rename.old in one and rename.new not in one for one in said)
        if old and rename.old not in summary:
            summary, keep, remove = (
                text.replace(rename.new, rename.old) for text in (summary, keep, remove)
            )
    fix = replace(fix, summary=summary, keep=keep, remove=remove, reason=reason)
    return replace(finding, fix=fix)


def _sites(result: Result) -> str:
    sites = dict.fromkeys(
        checkpoint.call_site
        for region in result.regions
        for checkpoint in region.checkpoints
        if checkpoint.call_site
    )
    if not sites:
        return "Not known: only a trace that `recompute-scan run` recorded names them."
    return "\n".join(f"- {markdown_code(site)}" for site in sites)


def _left_out(differences: Sequence[str], dropped: Sequence[str]) -> str:
    if not differences and not dropped:
        return "The archive gives the verdict, the counts and the cost of the original."
    lines = [
        f"- left out to make the archive small: {markdown_prose(phrase)}" for phrase in dropped
    ]
    lines += [
        f"- differs from the original: {markdown_prose(sentence)}" for sentence in differences
    ]
    return "\n".join(["### Left out, and different", "", *lines])


# Fields to compare; names, sites and clocks may differ.
_FIELDS = (
    "verdict evidence_level confidence recompute_per_backward mean_recompute recomputed_share "
    "attention families cost"
).split()
_STEP = ("duration_ms", "micro_batches", "forward_ops", "recomputed_ops")
_REGION = (
    "forward_runs_per_step recompute_runs_per_backward mean_recompute forward_ms_per_step "
    "recompute_ms_per_step redundant_ms_per_step"
).split()
_CHECKPOINT = ("depth", "variant")
_RELATIVE = 1e-9
# Rules on what `run` compared and on policies, which no archive holds.
_STAY_OUT = ("RS4", "RS5")


def differences(before: Result, after: Result) -> Iterator[str]:
    """The differences between two results in verdict, counts and cost, one sentence each."""
    first, second = _plain(before), _plain(after)
    for name in first:
        if _alike(first[name], second[name]):
            continue
        if isinstance(first[name], (str, float, int)) or second[name] is None:
            yield f"{name}: {first[name]} in the original, {second[name]} here."
        else:
            yield f"{name}: not the same as in the original."


def untold(before: Result, after: Result) -> Iterator[str]:
    """Other answers that only the original has, one sentence each."""
    if _who(before) - _who(after):
        yield "Checkpoint call sites were read from Python frames, which stay out."
    if before.fidelity is not None and after.fidelity is None:
        yield "The comparison of recomputes with their forward stays out."
    if before.policies is not None and before.policies.policies and after.policies is None:
        yield "The decisions of selective checkpoints' policies stay out."
    if before.memory is not None and after.memory is None:
        yield "The allocations behind the answer on memory stay out."


def _who(result: Result) -> set[str]:
    return {c.mechanism for r in result.regions for c in r.checkpoints if c.mechanism}


def _plain(result: Result) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(result)
    plain = _some(fields, _FIELDS)
    cost = plain["cost"]
    if cost:
        plain["cost"] = {name: cost[name] for name in cost if name not in ("method", "assumptions")}
    plain["steps"] = [_some(step, _STEP) for step in fields["steps"] if step["complete"]]
    plain["regions"] = [
        _some(region, _REGION)
        | {"checkpoints": [_some(one, _CHECKPOINT) for one in region["checkpoints"]]}
        for region in fields["regions"]
    ]
    compared = ("code", "severity", "saving_ms", "saving_pct")
    for name, kept in (("findings", compared), ("checked", ("code", "status"))):
        plain[name] = [
            _some(one, kept) for one in fields[name] if not one["code"].startswith(_STAY_OUT)
        ]
    plain["ranks"] = [(rank["verdict"], rank["step_ms"]) for rank in fields["ranks"]]
    return plain


def _some(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names}


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=1e-12)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


# GitHub's limit for an attachment to an issue, in its smaller reading:
# https://docs.github.com/en/get-started/writing-on-github/working-with-advanced-formatting/attaching-files
GITHUB_LIMIT = 25_000_000
# The epoch of the format: the time of packing is private.
_WHEN = (1980, 1, 1, 0, 0, 0)
# Room for the document, the page and the report.
_DOCUMENTS = 0.2


class Archive(Struct, frozen=True):
    """The contents of an archive, for the person who is about to share it.

    Attributes:
        members: Name, packed and unpacked size in bytes of each file.
        before: The result for the original.
        after: The result for the archive, as its receiver will see it.
        differences: What is not the same in both, one sentence each.
        untold: Other answers that only the original has.
        dropped: What was left out to make it small, one phrase each.
        kept: Names that stay and are not torch's own.
        aliases: What was replaced, and by what; not in the archive.
    """

    members: tuple[tuple[str, int, int], ...]
    before: Result
    after: Result
    differences: tuple[str, ...]
    untold: tuple[str, ...]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]

    @property
    def size(self) -> int:
        """Size of the archive's files in bytes, packed."""
        return sum(packed for _, packed, _ in self.members)


class _Part(Struct, frozen=True):
    """One rank's share of the archive, clean."""

    rank: int
    facts: RecomputeFacts
    info: RunInfo | None

    @property
    def member(self) -> str:
        return f"trace-rank{self.rank}.json"


class _TooLarge(Exception):
    """This much does not fit."""


def pack(
    addresses: Sequence[Address],
    target: Path,
    *,
    strict: bool = False,
    limit: int = GITHUB_LIMIT,
    on_progress: Callable[[str], None] = lambda _: None,
    limits: Limits = DEFAULT_LIMITS,
) -> Archive:
    """Write the archive for the given traces, and say what is in it.

    Args:
        addresses: As for :func:`recompute_scan.analysis.pipeline.analyse`.
        target: The file to write; its folder must be there. It is overwritten.
        strict: Whether modules, kernels, files and own operators get aliases.
        limit: Most bytes that the archive may have.
        on_progress: Called with a line for the person before each long piece of work.
        limits: What is refused as too large when reading.

    Raises:
        InputError: As :func:`recompute_scan.analysis.pipeline.analyse`; or not even one block of
            one step fits (``E327``).
        OSError: The archive cannot be written.
    """
    names = Names(strict)
    failures: list[InputError] = []
    pieces: list[Piece] = []
    parts: list[_Part] = []
    for one in load_each(addresses, failures, on_progress, limits):
        answer = answer_to(one, UNKNOWN_MACHINE, limits, on_progress)
        pieces.append(Piece(one.name, one.rank, answer))
        taken = {part.rank for part in parts}
        rank = one.rank if one.rank not in taken else max(taken) + 1
        on_progress(f"building {one.name} anew")
        info = clean_run_record(one.info, f"trace-rank{rank}.json") if one.info else None
        clean = replace(clean_trace(one.trace, names), rank=rank)
        parts.append(_Part(rank, study(clean), replace(info, rank=rank) if info else None))
    before = merge(pieces, failures)
    main = parts[pieces.index(worst(pieces))]
    packing = _Packing(parts, main, before, target, limit)
    on_progress("packing")
    contents = packing.largest()
    if contents is None:
        raise InputError(
            "E327",
            f"No archive that proves this verdict fits into {limit:,} bytes.",
            hint="share the result.json alone, or lift the limit with --max-bytes",
        )
    return replace(
        contents,
        kept=tuple(sorted(names.kept | names.places.kept)),
        aliases=tuple(
            [(name, alias) for (_, name), alias in names.given.items()]
            + list(names.places.given.items())
        ),
    )


class _Packing(Struct, frozen=True):
    """The archive to write.

    Attributes:
        parts: What each rank gives.
        main: The part that has the result of all.
        before: The result for the original.
        target: The file.
        limit: Most bytes that it may have.
    """

    parts: Sequence[_Part]
    main: _Part
    before: Result
    target: Path
    limit: int

    def largest(self) -> Archive | None:
        """The one that leaves out least; ``None`` where nothing that proves the verdict fits."""
        complete = max(part.facts.complete_count for part in self.parts)
        blocks = self.main.facts.blocks
        each = len(blocks) // max(1, len({block.batch for block in blocks}))
        for cut in smaller_and_smaller(complete, each, len(self.parts)):
            with suppress(_TooLarge):
                contents = self._write(cut, complete)
                if contents.differences and cut == Cut(complete):
                    # Something outside the complete steps counts as well.
                    contents = self._whole_instead(contents)
                return contents
        return None

    def _whole_instead(self, contents: Archive) -> Archive:
        packed = self.target.read_bytes()
        with suppress(_TooLarge):
            whole = self._write(Cut(None), 0)
            if len(whole.differences) < len(contents.differences):
                return whole
        self.target.write_bytes(packed)
        return contents

    def _write(self, cut: Cut, complete: int) -> Archive:
        """Write the archive with this much of each trace, of so many ``complete`` steps.

        Raises:
            _TooLarge: It does not fit.
        """
        most = self.limit - min(int(self.limit * _DOCUMENTS), 5_000_000)
        with (
            self.target.open("w+b") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for part in self.parts if cut.all_ranks else [self.main]:
                _write_trace(archive, file, part, rows_of(part.facts, cut), most)
                if part.info is not None:
                    _write(archive, run_info_name(part.rank), encode_run_info(part.info))
        after = analyse([self.target])
        found = tuple(differences(self.before, after))
        more = tuple(untold(self.before, after))
        dropped = tuple(cut.dropped(complete, len(self.parts)))
        issue = issue_text(after, (*found, *more), dropped, self.before)
        with zipfile.ZipFile(self.target, "a", zipfile.ZIP_DEFLATED) as archive:
            _write(archive, "result.json", to_json(after).encode())
            _write(archive, "report.html", render_html(after).encode())
            _write(archive, "issue.md", issue.encode())
            members = [(one.filename, one.compress_size, one.file_size) for one in archive.filelist]
        if self.target.stat().st_size > self.limit:
            raise _TooLarge
        return Archive(tuple(members), self.before, after, found, more, dropped, (), ())


def _write_trace(
    archive: zipfile.ZipFile, file: IO[bytes], part: _Part, rows: Int64, most: int
) -> None:
    with archive.open(_member(part.member), "w", force_zip64=True) as member:
        for piece in trace_json(part.facts.trace, rows):
            member.write(piece)
            if file.tell() > most:
                raise _TooLarge


def _write(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(_member(name), data, compresslevel=9)


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _WHEN)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3
    info.external_attr = 0o644 << 16
    return info


def listing(contents: Archive, *, every_name: bool) -> Iterator[str]:
    """Lines on what is in the archive, safe to print.

    Args:
        contents: What goes in.
        every_name: Whether to list every name that stays or is replaced, or to count them.
    """
    yield f"Contents ({contents.size:,} bytes packed):"
    for name, packed, unpacked in contents.members:
        yield f"  {name:20} {packed:>12,} bytes packed {unpacked:>14,} unpacked"
    result = contents.after
    runs = result.recompute_per_backward
    counted = "" if runs is None else f", {runs:g} recomputes per backward"
    yield f"Verdict of the archive: {result.verdict}{counted}"
    for sentence in contents.differences:
        yield f"  differs from the original: {visible(sentence, 300)}"
    for sentence in contents.untold:
        yield f"  not in the archive: {sentence}"
    for phrase in contents.dropped:
        yield f"  left out to make it small: {phrase}"
    if result.environment:
        yield "Versions and devices that go in:"
        for name, value in result.environment.items():
            yield f"  {visible(name)}: {visible(value)}"
    for title, names in (
        ("Names that stay", contents.kept),
        ("Names that are replaced", [f"{name} -> {alias}" for name, alias in contents.aliases]),
    ):
        if every_name and names:
            yield f"{title} ({len(names)}):"
            for name in names:
                yield f"  {visible(name, 200)}"
        else:
            yield f"{title}: {len(names)}" + (" (--show lists them)" if names else "")
