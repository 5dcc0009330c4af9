"""The fix of a result as a patch: what it makes of files, written and taken back.

A result may come from somebody else, so nothing of it is trusted with a file. A patch changes
Python and configuration files below one folder and through no link. It changes a file only if that
is the one that was recorded, and has the lines that the diff says. It takes words of a statement
out and sets settings, and in a configuration file it only switches one off; a change that brings in
another word is refused.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import re
import tokenize
import warnings
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import msgspec
from msgspec import Struct

from recompute_scan.errors import InputError
from recompute_scan.files import content, new_version, write_whole
from recompute_scan.frameworks.base import CONFIGURATIONS, is_configuration, opposite
from recompute_scan.frameworks.registry import MECHANISMS
from recompute_scan.result import Result
from recompute_scan.result.recompute import DOUBLED, Finding, Fix
from recompute_scan.result.run_record import FileName, Source, file_of_site
from recompute_scan.terminal import patch_name

# More than a statement with its surroundings has, and more than anyone writes by hand.
_MOST_DIFF, _MOST_SOURCE = 100_000, 4 << 20
_THERE = "call fix where the script was recorded, or name that folder: --root"
_HUNK = re.compile(r"@@ -(\d{1,7})(?:,(\d{1,7}))? \+\d{1,7}(?:,(\d{1,7}))? @@")
_LINES = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_ENDS = b"\r\n"
_TOKEN = re.compile(r"\w+|[^\w\s]")
# `torch.ops.aten.mm.default`: which overload of an operator is meant.
_OVERLOAD = re.compile(r"(\bops\.\w+\.\w+)\.\w+")
# The words that a change may bring in: settings of checkpoints, their values, and punctuation.
_SETTINGS = frozenset(
    word
    for mechanism in MECHANISMS
    for edit in mechanism.edits
    for word in _TOKEN.findall(f"{edit.name} {edit.value}")
) | frozenset("pass True False default preserve_rng_state determinism_check , = \" ' ( )".split())
_RECORD = "fix-applied.json"


class Change(Struct, frozen=True):
    """Lines of one file that others take the place of.

    Attributes:
        file: The file as the diff names it, without ``a/``.
        first: Number of the first line.
        lines: The diff's lines, each behind a blank, ``-`` or ``+``; the surroundings among them.
        digest: SHA-256 of the file as it was recorded, where the result has it.
    """

    file: str
    first: int
    lines: tuple[str, ...]
    digest: str | None = None

    @property
    def old(self) -> tuple[str, ...]:
        """The lines as they are."""
        return tuple(line[1:] for line in self.lines if line[0] != "+")

    @property
    def edits(self) -> list[tuple[int, int, list[str]]]:
        """First line to go, from 0, the first to stay behind it, and what comes in between."""
        found: list[tuple[int, int, list[str]]] = []
        at = self.first - 1
        for kind, run in groupby(self.lines, lambda line: line[0] == " "):
            several = list(run)
            gone = sum(line[0] != "+" for line in several)
            if not kind:
                new = [line[1:] for line in several if line[0] == "+"]
                found.append((at, at + gone, new))
            at += gone
        return found


class Changed(Struct, frozen=True):
    """One file before and after: its place below the folder, where it is, its bytes."""

    name: str
    path: Path
    before: bytes
    after: bytes

    @property
    def diff(self) -> bytes:
        """A unified diff with the bytes of the file, for ``git apply`` and ``patch -p1``."""
        old, new = (patch_name(f"{side}/{self.name}").encode("utf-8", _LOST) for side in "ab")
        before, after = (io.BytesIO(data).readlines() for data in (self.before, self.after))
        lines = difflib.diff_bytes(difflib.unified_diff, before, after, old, new)
        return b"".join(
            one if one.endswith(b"\n") else one + b"\n\\ No newline at end of file\n"
            for one in lines
        )


class Written(Struct, frozen=True):
    """One file that was changed: what it was, and how to know that it is still as it was written.

    Attributes:
        file: Its place below the folder.
        copy: Name of the copy of the file as it was.
        before: SHA-256 of the copy.
        after: SHA-256 of the written file.
        moment: When it was written, in nanoseconds since the epoch. No record that comes from
            another machine has it right.
    """

    file: str
    copy: FileName
    before: str
    after: str
    moment: int


_LOST = "surrogateescape"


def fixes(result: Result) -> tuple[Finding, ...]:
    """The findings with diffs that are applied together; the first leads.

    These are the ones that the verdict rests on: of a doubled run the findings on doubled
    checkpoints, as long as every block keeps one of its checkpoints and no two change the same
    lines. Of another run, or where they have no diff, it is the first finding that has one.
    """
    able = [one for one in result.findings if one.fix is not None and one.fix.diff]
    leading = [one for one in able if one.code == DOUBLED] or able[:1]
    chosen: list[Finding] = []
    for one in leading:
        both = [*chosen, one]
        if not chosen or (_apart(both) and _each_keeps_one(result, both)):
            chosen = both
    return tuple(chosen)


def changes(result: Result) -> tuple[Change, ...]:
    """The changes of the fix, each once.

    Raises:
        InputError: A diff of the result cannot be used (``E343``).
    """
    return tuple(dict.fromkeys(one for finding in fixes(result) for one in _parsed(_fix(finding))))


def _fix(finding: Finding) -> Fix:
    assert finding.fix is not None
    return finding.fix


def _apart(findings: Sequence[Finding]) -> bool:
    """Whether no two of them change the same lines in different ways."""
    try:
        found = {one for finding in findings for one in _parsed(_fix(finding))}
    except InputError:
        return False
    gone = Counter(
        (one.file, line)
        for one in found
        for begin, end, _ in one.edits
        for line in range(begin, end)
    )
    return all(count == 1 for count in gone.values())


def _each_keeps_one(result: Result, findings: Sequence[Finding]) -> bool:
    gone = {
        (removed.mechanism, removed.call_site) for one in findings for removed in _fix(one).removed
    }
    return all(
        any((each.mechanism, each.call_site) not in gone for each in region.checkpoints)
        for region in result.regions
        if len(region.checkpoints) > 1
    )


def _parsed(fix: Fix) -> list[Change]:
    found = _read(fix.diff or "", fix.digest)
    if any(end == at for change in found for at, end, _ in change.edits):  # it only adds
        raise _unusable("it is none that recompute-scan writes")
    return found


def _read(diff: str, digest: str | None) -> list[Change]:
    lines = diff.split("\n")
    if len(diff) > _MOST_DIFF or len(lines) < 4 or lines.pop() or "\r" in diff:
        raise _unusable("it is none that recompute-scan writes")
    name = file_of(diff)
    if not diff.startswith("--- ") or lines[1][:4] != "+++ " or _named(lines[1][4:]) != name:
        raise _unusable("its first lines do not name one file")
    found: list[Change] = []
    at = 2
    while at < len(lines):
        head = _HUNK.fullmatch(lines[at])
        if head is None:
            raise _unusable(f"line {at + 1} is no hunk header")
        most, more = int(head[2] or 1), int(head[3] or 1)
        begin = at = at + 1
        while at < len(lines) and (most > 0 or more > 0):
            kind = lines[at][:1]
            if kind not in (" ", "-", "+"):
                raise _unusable(f"line {at + 1} is cut off")
            most -= kind != "+"
            more -= kind != "-"
            at += 1
        change = Change(name, int(head[1]), tuple(lines[begin:at]), digest)
        if most or more or not change.first:
            raise _unusable("it is none that recompute-scan writes")
        found.append(change)
    return found


def change_diff(site: str, source: Source, new: Sequence[str]) -> str:
    """A diff that puts ``new`` lines in the place of one statement of the file of ``site``; none
    delete it.
    """
    return changes_diff([(site, source, new)])


def changes_diff(changes: Sequence[tuple[str, Source, Sequence[str]]]) -> str:
    """The same of several statements of one file."""
    path = file_of_site(changes[0][0])
    known: dict[int, str] = {}
    gone: set[int] = set()
    new_after: dict[int, Sequence[str]] = {}
    for _, source, new in changes:
        lines = dict(enumerate(source.text.split("\n"), source.first))
        mine, fresh = [n for n in lines if source.begin <= n <= source.end], list(new)
        for end in (0, -1):  # lines of the statement that stay as they are
            while len(mine) > 1 and fresh and lines[mine[end]] == fresh[end]:
                del mine[end], fresh[end]
        known |= lines
        gone.update(mine)
        new_after[max(mine, default=max(lines))] = fresh
    # An absolute path stays as it is; `a/` and `b/` are for paths below the current folder.
    old_name, new_name = (path, path) if path.startswith("/") else (f"a/{path}", f"b/{path}")
    written = [f"--- {patch_name(old_name)}", f"+++ {patch_name(new_name)}"]
    shift = 0
    for _, together in groupby(enumerate(sorted(known)), key=lambda one: one[1] - one[0]):
        numbers = [number for _, number in together]
        body: list[str] = []
        for number in numbers:
            body.append(f"{'-' if number in gone else ' '}{known[number]}")
            body += [f"+{line}" for line in new_after.get(number, ())]
        old, left = len(numbers), sum(line[0] != "-" for line in body)
        # A range of no lines is given by the line before it.
        new_first = numbers[0] + shift - (not left)
        written += [f"@@ -{numbers[0]},{old} +{new_first},{left} @@", *body]
        shift += left - old
    return "\n".join(written) + "\n"


def file_of(diff: str) -> str:
    """The file that a diff of ours changes, without ``a/``."""
    return _named(diff.partition("\n")[0].removeprefix("--- "))


def places_of(diff: str) -> list[tuple[str, int]]:
    """File and first changed line of each change of a diff; empty where it cannot be used."""
    with suppress(InputError):
        return [(one.file, one.edits[0][0] + 1) for one in _read(diff, None) if one.edits]
    return []


def _unusable(why: str) -> InputError:
    return InputError("E343", "The diff of this result cannot be used.", why=why)


def _named(header: str) -> str:
    """The file that a header of a diff names; see :func:`recompute_scan.terminal.patch_name`."""
    name = header.rstrip("\t")
    if len(name) > 1 and name[0] == name[-1] == '"':
        raw = re.sub(
            rb"\\([0-7]{3}|.)",
            lambda found: bytes([int(found[1], 8) & 255]) if len(found[1]) == 3 else found[1],
            name[1:-1].encode("utf-8", "surrogatepass"),
        )
        name = raw.decode("utf-8", _LOST)
    return name if name.startswith("/") else name[2:]


def changed(result: Result, root: Path) -> tuple[Changed, ...]:
    """The files below a folder as the fix makes them; nothing is written.

    Raises:
        InputError: A diff cannot be used (``E343``), a file is outside the folder or reached
            through a link (``E344``), or it is not the one that was recorded (``E345``).
    """
    by_file: dict[tuple[str, Path], list[Change]] = {}
    for one in changes(result):
        by_file.setdefault(place(root, one.file), []).append(one)
    found = []
    for (name, path), several in by_file.items():
        try:
            before = content(path, _MOST_SOURCE)
        except OSError as error:
            raise _outside(name, f"it cannot be read: {error.strerror}", None) from None
        found.append(Changed(name, path, before, _with(before, several, name)))
    return tuple(found)


def place(root: Path, file: str) -> tuple[str, Path]:
    """Where a file is below a folder, and the whole path.

    Raises:
        InputError: It is outside the folder, or reached through a link (``E344``).
    """
    home = Path(os.path.realpath(root))
    path = Path(file)
    if path.is_absolute():
        inside = next((path.relative_to(r) for r in (root, home) if path.is_relative_to(r)), None)
    else:
        inside = path
    if inside is None or not inside.parts or ".." in inside.parts or "\0" in file:
        raise _outside(file, f"it is not below {root}")
    if inside.suffix not in {"", ".py", ".pyw", *CONFIGURATIONS}:
        raise _outside(file, "it is neither a Python file nor a configuration", None)
    whole = home / inside
    if os.path.realpath(whole) != str(whole):
        raise _outside(file, "it is reached through a link", "record again without the link")
    if not os.path.lexists(whole):
        raise _outside(file, f"there is no such file below {root}")
    return inside.as_posix(), whole


def _outside(file: str, why: str, hint: str | None = _THERE) -> InputError:
    return InputError(
        "E344", f"The fix changes {file}, which recompute-scan does not open.", why=why, hint=hint
    )


def _with(data: bytes, several: Sequence[Change], name: str) -> bytes:
    if any(one.digest not in (None, sha256(data).hexdigest()) for one in several):
        raise _stale(name, "it was changed since it was recorded")
    mark = BOM_UTF8 if data.startswith(BOM_UTF8) else b""
    try:
        encoding = "utf-8" if mark else tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        lines = _LINES.findall(data[len(mark) :])
        edits = [edit for one in several for edit in _edits(one, lines, encoding, name)]
        for begin, end, new in sorted(edits, reverse=True):
            # With the ends of the lines that they replace.
            ends = [line[len(line.rstrip(_ENDS)) :] for line in lines[begin:end]]
            lines[begin:end] = [
                text.encode(encoding) + ends[min(number, len(ends) - 1)]
                for number, text in enumerate(new)
            ]
    except (SyntaxError, UnicodeError) as error:
        raise _stale(name, str(error)) from None
    if lines and not data.endswith((b"\n", b"\r")):
        lines[-1] = lines[-1].rstrip(_ENDS)
    after = mark + b"".join(lines)
    if not is_configuration(name) and not (_is_python(data) and _is_python(after)):
        raise _stale(name, "it is, or would become, no Python that this version reads")
    return after


def _edits(
    change: Change, lines: Sequence[bytes], encoding: str, name: str
) -> list[tuple[int, int, list[str]]]:
    """The edits of these lines, which have to be as in the diff."""
    end = change.first - 1 + len(change.old)
    there = [line.rstrip(_ENDS).decode(encoding) for line in lines[change.first - 1 : end]]
    if tuple(there) != change.old:
        raise _stale(name, f"lines {change.first} to {end} are not those that were recorded")
    gone, come = (
        Counter(
            word
            for line in change.lines
            if line[0] == kind
            for word in _TOKEN.findall(_OVERLOAD.sub(r"\1", line[1:]))
        )
        for kind in "-+"
    )
    new, old = come - gone, gone - come
    if is_configuration(name):
        if [*map(opposite, old.elements())] != [*new.elements()] or new.total() != 1:
            raise _unusable("it does more than switch a setting off")
    elif not _SETTINGS.issuperset(new):
        raise _unusable("it does more than remove words and change settings")
    return change.edits


def _is_python(data: bytes) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def _stale(name: str, why: str) -> InputError:
    return InputError(
        "E345",
        f"The fix does not fit {name}.",
        why=why,
        hint="record again, and the fix will be one for the file as it is",
    )


def patch(result: Result, root: Path) -> bytes | None:
    """The fix as a unified diff; ``None`` where no finding has one.

    It is made of the files' own bytes where these are as they were recorded, and else of the lines
    that the result has, in UTF-8.
    """
    chosen = fixes(result)
    if not chosen:
        return None
    try:
        return b"".join(one.diff for one in changed(result, root))
    except InputError:
        diffs = dict.fromkeys(_fix(one).diff or "" for one in chosen)
        return "".join(diffs).encode("utf-8", "replace")


def apply(files: Sequence[Changed], folder: Path) -> None:
    """Write the changed files, each whole or not at all, and keep copies in a folder.

    Raises:
        InputError: A file or the folder cannot be written (``E346``); then none was changed.
    """
    earlier, group = applied(folder), []
    with _new_versions() as parts:
        for one in files:
            parts.append((one.path, new_version(one.path, one.after)))
        for number, (one, (_, part)) in enumerate(zip(files, parts, strict=True), 1):
            copy = f"before-fix-{len(earlier) + 1}-{number}-{one.path.name}"
            write_whole(folder / copy, one.before)
            before, after = (sha256(data).hexdigest() for data in (one.before, one.after))
            group.append(Written(one.name, copy, before, after, part.stat().st_mtime_ns))
        _remember(folder, [*earlier, group])
        for path, part in parts:
            part.replace(path)


def has_copies(kept_in: Path) -> bool:
    """Whether a folder holds what :func:`revert` puts back."""
    return (kept_in / _RECORD).is_file()


def revert(folder: Path, root: Path) -> list[str]:
    """Put back what the last fix from this folder changed; the names of the files.

    Raises:
        InputError: Nothing was applied, or a copy is damaged (``E347``), a file is outside the
            folder or reached through a link (``E344``), was changed since (``E345``), or cannot be
            written (``E346``).
    """
    groups = applied(folder)
    if not groups:
        raise InputError("E347", f"No fix from {folder} was applied here.")
    with _new_versions() as parts:
        for one in groups[-1]:
            name, path = place(root, one.file)
            now = content(path, _MOST_SOURCE)
            if (sha256(now).hexdigest(), path.stat().st_mtime_ns) != (one.after, one.moment):
                hint = f"the file before the fix is {folder / one.copy}"
                raise InputError(
                    "E345",
                    f"{name} was changed after the fix was applied, so it stays as it is.",
                    hint=hint,
                )
            before = content(folder / one.copy, _MOST_SOURCE)
            if sha256(before).hexdigest() != one.before:
                raise InputError("E347", f"{one.copy} is no longer the copy of {name}.")
            parts.append((path, new_version(path, before)))
        for path, part in parts:
            part.replace(path)
        _remember(folder, groups[:-1])
        for one in groups[-1]:
            (folder / one.copy).unlink()
    return [one.file for one in groups[-1]]


def applied(folder: Path) -> list[list[Written]]:
    """Fixes applied from this folder and not put back, the last at the end."""
    with suppress(OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError):
        return msgspec.json.decode(content(folder / _RECORD), type=list[list[Written]])
    return []


def is_applied(result: Result, folder: Path, root: Path) -> bool:
    """Whether the files that the fix changes are as it made them."""
    with suppress(OSError, InputError):
        for group in reversed(applied(folder)):
            digests = {place(root, one.file)[1]: one.after for one in group}
            return {place(root, one.file)[1] for one in changes(result)} == set(digests) and all(
                sha256(content(path, _MOST_SOURCE)).hexdigest() == digest
                for path, digest in digests.items()
            )
    return False


def _remember(folder: Path, groups: Sequence[Sequence[Written]]) -> None:
    if groups:
        write_whole(folder / _RECORD, msgspec.json.encode(groups) + b"\n")
    else:
        (folder / _RECORD).unlink(missing_ok=True)


@contextmanager
def _new_versions() -> Iterator[list[tuple[Path, Path]]]:
    """Collects files and what each is to take the place of; at the end, those left are removed."""
    parts: list[tuple[Path, Path]] = []
    try:
        yield parts
    except OSError as error:
        name = os.fsdecode(error.filename) if error.filename else "the file"
        raise InputError("E346", f"Cannot write {name}.", why=error.strerror) from None
    finally:
        for _, part in parts:
            part.unlink(missing_ok=True)
