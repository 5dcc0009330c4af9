"""The answer in the forms of ``check``, and the edits it asks for as one unified diff."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from recompute_scan._version import __version__
from recompute_scan.check.formats import (
    LEVELS,
    command,
    json_text,
    junit_document,
    line,
    location,
    part,
    sarif_document,
)
from recompute_scan.check.policy import Site
from recompute_scan.files import content
from recompute_scan.frameworks.base import opposite
from recompute_scan.lint.engine import Report, encoding_of
from recompute_scan.lint.launches import SwitchInFile
from recompute_scan.lint.rules import RULES, Found
from recompute_scan.report.templating import visible
from recompute_scan.result.patch import Changed
from recompute_scan.result.run_record import source_lines
from recompute_scan.terminal import inert

_ON = re.compile(r"^(\s*[\"']?[\w.-]+[\"']?\s*[:=]\s*)([\"']?)(true|yes|on)\2", re.IGNORECASE)


def text(report: Report) -> str:
    """For a person."""
    lines = []
    for found in report.found:
        lines.append(f"{found.severity}: {_where(found)}: {found.code} {line(found.title)}")
        lines += [f"  why: {line(found.why)}", f"  fix: {line(found.fix)}"]
    lines += [
        f"accepts nothing: {line(idle.file)}:{idle.line}: {idle.why}" for idle in report.unused
    ]
    lines += [f"not read: {visible(file)}: {line(why)}" for file, why in report.unread]
    return "\n".join([*lines, closing(report)]) + "\n"


def as_json(report: Report) -> str:
    """For a program: ``recompute-scan-lint/1``."""
    document = {
        "schema": "recompute-scan-lint/1",
        "tool_version": __version__,
        "status": report.status,
        "files_read": report.read,
        "found": [_plain(found) for found in report.found],
        "switched_on": [_safe_fields(one) for one in report.switched_on],
        "suppressed": [_plain(found) for found in report.suppressed],
        "accepting_nothing": [
            {"file": inert(idle.file), "line": idle.line, "why": idle.why} for idle in report.unused
        ],
        "not_followed": [inert(file) for file in report.cut],
        "not_read": [{"file": inert(file), "why": inert(why)} for file, why in report.unread],
    }
    return json_text(document)


def github(report: Report) -> str:
    """Workflow commands of GitHub Actions."""
    kinds = {"error": "error", "warning": "warning", "info": "notice"}
    lines = [
        command(
            kinds[found.severity],
            f"{found.title}. {found.fix}",
            Site(found.file, found.line),
            title=f"recompute-scan {found.code}",
        )
        for found in report.found
    ]
    return "\n".join([*lines, closing(report)]) + "\n"


def sarif(report: Report) -> str:
    """SARIF 2.1.0."""
    numbers = {code: number for number, code in enumerate(RULES)}
    results = []
    for found in (*report.found, *report.suppressed):
        result = {
            "ruleId": found.code,
            "ruleIndex": numbers[found.code],
            "level": LEVELS[found.severity],
            "message": {"text": f"{line(found.title)}\n{line(found.fix)}"},
            "locations": [location(Site(found.file, found.line))],
        }
        if found in report.suppressed:
            result["suppressions"] = [{"kind": "inSource"}]
        results.append(result)
    doubts = [f"{file}: {why}" for file, why in report.unread]
    rules = {code: name for code, (name, _) in RULES.items()}
    return sarif_document(
        rules, results, __version__, doubts, report.status, complete=not report.undecided
    )


def junit(report: Report) -> str:
    """A JUnit report: one test a rule; only what is certain fails."""
    failed = {found.code for found in report.found if found.severity == "error"}
    cases: dict[str, list[ElementTree.Element]] = {}
    for code, (name, _) in RULES.items():
        lines = [f"{_where(f)}: {line(f.title)}" for f in report.found if f.code == code]
        parts = [part("failure", lines[0], type=code)] if code in failed else []
        if lines:
            parts = parts or [ElementTree.Element("system-out")]
            parts[0].text = "\n".join(lines)
        cases[f"{code} {name}"] = parts
    if report.undecided:
        message = "; ".join(f"{visible(file)}: {line(why)}" for file, why in report.undecided)
        cases["files"] = [ElementTree.Element("error", type="undecided", message=message)]
    return junit_document("recompute-scan lint", "recompute_scan.lint", cases)


_SHOWN = ("rule", "severity", "file", "line", "title", "why", "fix")
RENDERINGS: dict[str, Callable[[Report], str]] = {
    "text": text,
    "json": as_json,
    "github": github,
    "sarif": sarif,
    "junit": junit,
}


def _where(found: Found) -> str:
    return f"{line(found.file)}:{found.line}"


def _plain(found: Found) -> dict[str, object]:
    plain = {"rule": found.code, "severity": found.severity, **_safe_fields(found)}
    return {name: plain[name] for name in _SHOWN}


def _safe_fields(one: Found | SwitchInFile) -> dict[str, object]:
    fields = msgspec.to_builtins(one).items()
    return {name: inert(value) if isinstance(value, str) else value for name, value in fields}


def listed(report: Report) -> str:
    """Which checkpoints are switched on, a line for each."""
    lines = [
        f"{line(one.file)}:{one.line}: {one.by}: {line(one.layers)}; {one.variant}"
        + (", under a condition" if one.conditional else "")
        for one in report.switched_on
    ]
    return "\n".join([*lines, f"{len(lines)} switched on ({_files_read(report)})"]) + "\n"


def _files_read(report: Report) -> str:
    cut = f", {len(report.cut)} checked only in part" if report.cut else ""
    return f"{report.read} {'file' if report.read == 1 else 'files'} read{cut}"


def closing(report: Report) -> str:
    """One line: how much was found in how many files."""
    counts = [
        f"{number} {severity}{'s' if number != 1 and severity != 'info' else ''}"
        for severity in ("error", "warning", "info")
        if (number := sum(found.severity == severity for found in report.found))
    ]
    hidden = f", {len(report.suppressed)} suppressed" if report.suppressed else ""
    found = ", ".join(counts) or "nothing found"
    return f"recompute-scan lint: {found} ({_files_read(report)}{hidden})"


def diff(found: Iterable[Found]) -> str:
    """The edits of all findings that have one, file by file; empty where none has.

    A file is read again here. An edit is left out where the file has changed since, where the line
    holds another statement, or where it does not hold the value.
    """
    by_file: dict[str, list[Found]] = {}
    for finding in found:
        if finding.edit:
            by_file.setdefault(finding.file, []).append(finding)
    parts = []
    for file, findings in sorted(by_file.items()):
        path = Path(file)
        try:
            data = content(path)
            encoding = encoding_of(path, data).removesuffix("-sig")
            lines = source_lines(data.decode(encoding))
            before, after = (
                "".join(some).encode(encoding) for some in (lines, _edited(lines, findings))
            )
        except (OSError, LookupError, ValueError):
            continue
        name = os.path.relpath(file).replace(os.sep, "/")
        # The bytes that the file has, whatever they stand for.
        parts.append(Changed(name, path, before, after).diff.decode("utf-8", "surrogateescape"))
    return "".join(parts)


def _edited(before: list[str], findings: list[Found]) -> list[str]:
    after: list[str | None] = list(before)
    for finding in findings:
        at = finding.line - 1
        if finding.edit == "off":
            if said := _ON.match(after[at] or "") if 0 <= at < len(after) else None:
                rest = said.string[said.end(3) :]
                after[at] = f"{said[1]}{said[2]}{opposite(said[3])}{rest}"
        else:
            _delete(after, before, finding.line)
    return [line for line in after if line is not None]


def _delete(after: list[str | None], before: list[str], line: int) -> None:
    """Delete the statement that is at a line, or put ``pass`` where it was its block's only one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse("".join(before))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    blocks = [
        block
        for parent in ast.walk(tree)
        for arm in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(parent, arm, None), list)
    ]
    for body in blocks:
        for statement in body:
            end = statement.end_lineno
            if not (isinstance(statement, ast.Expr) and statement.lineno <= line <= end):
                continue
            first, last = statement.lineno - 1, end - 1
            indent = before[first][: statement.col_offset]
            rest = before[last].encode()[statement.end_col_offset :].decode(errors="replace")
            if not indent.strip() and rest.strip()[:1] in ("", "#"):
                keep = None if len(body) > 1 else f"{indent}pass\n"
                after[first : last + 1] = [keep] + [None] * (last - first)
            return
