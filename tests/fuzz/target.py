"""What reads things that others wrote, each from any bytes: only our own errors may come out."""

import io
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from recompute_scan.advise.choice import edited
from recompute_scan.analysis.pipeline import analyse, result_at, result_of
from recompute_scan.analysis.ranks import result_of_snapshots, result_without_trace, snapshots_at
from recompute_scan.check import Policy, judge
from recompute_scan.check.policy import parse_baseline
from recompute_scan.diagnose.outcome import diagnose_log, finding_of, lines_of, read_log
from recompute_scan.errors import ScanError
from recompute_scan.frameworks.base import Edit
from recompute_scan.guarding.judge import read_stored, write_stored
from recompute_scan.lint import lint
from recompute_scan.lint.library_calls import pinned_beside
from recompute_scan.lint.output import RENDERINGS, diff
from recompute_scan.project_file import check_settings, lint_settings
from recompute_scan.recompute.checks import confidence
from recompute_scan.recompute.study import study
from recompute_scan.report.finding_words import explanation
from recompute_scan.report.render import render_html, render_text
from recompute_scan.result import Result, from_json, to_json
from recompute_scan.result.fidelity import read_sampled, sampled_name
from recompute_scan.result.patch import change_diff
from recompute_scan.result.run_record import Source, parse_run_info, read_rehearsals
from recompute_scan.trace import Limits, Trace
from recompute_scan.trace.nsys import load_nsys
from recompute_scan.trace.streams import _stays, is_remote, shown
from recompute_scan.verification import compare_gradients
from tests.trace.kineto_reading import read

# Small, so that a bomb is refused before anybody calls it a hang.
LIMITS = Limits(
    inflated_bytes=2**26, ratio=200, ratio_from=2**20, events=200_000, event_bytes=2**24
)

# Files in memory, where there is such a place.
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

_EDITS = (
    Edit("checkpoint", "delete"),
    Edit("checkpoint", "unwrap"),
    Edit("checkpoint", "call"),
    Edit("*", "keyword", "gradient_checkpointing", add=True),
    Edit("*", "entry", "use_reentrant"),
)

# From an input to a word for what came out; inputs that give new words are worth keeping.
Target = Callable[[bytes], str]


def load(data: bytes) -> Trace:
    """The trace in these bytes."""
    return read(io.BytesIO(data), "fuzzed.json", limits=LIMITS, health={})


def trace(data: bytes) -> str:
    """Read and analyse: what ran again, the verdict, the confidence."""
    facts = study(load(data))
    health = " ".join(sorted(facts.trace.health))
    return f"{facts.judgement.verdict} {confidence(facts)} {health}"


def whole(data: bytes) -> str:
    """The same with price and findings, and the result written: it is the same when read back."""
    result = result_of(load(data))
    assert from_json(to_json(result)) == result
    return _word(result)


def whole_of_any_size(data: bytes) -> str:
    """The same within the limits that everybody has."""
    return _word(result_of(read(io.BytesIO(data), "fuzzed.json", health={})))


def result(data: bytes) -> str:
    """A result that somebody sent, as text, and judged."""
    found = from_json(data)
    text = render_text(found, color=False)
    page = render_html(found) if len(data) % 8 == 0 else ""  # it takes ten times as long
    judge(found, Policy())
    return f"{_word(found)} {len(found.findings)} {text.count(chr(10)) // 4} {len(page) >> 15}"


def baseline(data: bytes) -> str:
    """A baseline."""
    return f"{min(3, len(parse_baseline(data, 'fuzzed.json')))} accepted"


def guard(data: bytes) -> str:
    """What a guard has kept: it is the same when written and read once more."""
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        path = Path(folder, "guard.json")
        path.write_bytes(data)
        stored = read_stored(path)
        write_stored(path, stored)
        assert read_stored(path) == stored
    return f"{min(3, len(stored.modules))} {min(3, len(stored.trained))}"


def rehearsal(data: bytes) -> str:
    """What ranks have left for a plan."""
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        Path(folder, "rehearsal-rank0.json").write_bytes(data)
        (found,) = read_rehearsals(Path(folder))
    return f"{found.device} {min(3, len(found.candidates))} {min(3, len(found.arms))}"


def linted(data: bytes) -> str:
    """A script, a configuration or a launch command, as each kind of file that is read."""
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        for suffix in (".py", ".sh", ".yaml", ".json", ".toml"):
            Path(folder, f"train{suffix}").write_bytes(data)
        report = lint([Path(folder)])
        diff(report.found)
    for rendered in RENDERINGS.values():
        rendered(report)
    return f"{sorted({one.code for one in report.found})} {len(report.suppressed)}"


def compiled(data: bytes) -> str:
    """The compiler's log of a run that left nothing else."""
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        Path(folder, "compiled-rank0.log").write_bytes(data)
        found = analyse([Path(folder)], limits=LIMITS)
    assert from_json(to_json(found)) == found
    return _word(found)


def nsys(data: bytes) -> str:
    """A database of Nsight Systems, read and analysed."""
    with tempfile.NamedTemporaryFile(suffix=".sqlite", dir=_MEMORY) as file:
        file.write(data)
        file.flush()
        return _word(result_of(load_nsys(Path(file.name), LIMITS)))


def run_record(data: bytes) -> str:
    """The run record of a run, with its settings."""
    info = parse_run_info(data, "run-rank0.json")
    found = result_without_trace(info)
    assert from_json(to_json(found)) == found
    text = render_text(found, color=False)
    parts = [bool(one) for one in (info.end, info.measured, info.fidelity, info.policies)]
    return f"{info.status} {parts} {len(found.findings)} {text.count(chr(10)) // 4}"


def gradients(data: bytes) -> str:
    """Gradients that two runs left, compared."""
    first, _, second = data.partition(b"\n")
    read = []
    for part in (first, second):
        with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
            Path(folder, sampled_name(0)).write_bytes(part)
            read.append(read_sampled(Path(folder)))
    found = compare_gradients(read[0], read[1], read[1][:1])
    return f"{found.status} {min(3, len(found.worst))}"


def config(data: bytes) -> str:
    """A configuration file, a statement and a class that may hold a setting."""
    from recompute_scan.record.attribution import Made, given_at  # noqa: PLC0415 - brings torch

    names = {"gradient_checkpointing", "use_reentrant"}
    with tempfile.NamedTemporaryFile(suffix=".yaml", dir=_MEMORY) as file:
        file.write(data)
        file.flush()
        made = Made("train.py:1", object, (f"--config={file.name}",), {})
        in_file = given_at(made, names, (), None)
    statement = data.decode(errors="replace")
    options = Made("train.py:1", object, tuple(statement.split(" ")), {})
    in_code = given_at(options, names, (), statement)
    return f"{type(in_file).__name__} {type(in_code).__name__}"


def code(data: bytes) -> str:
    """A statement that a run record brings with it: what would change in it, as a diff."""
    numbers, _, text = data.decode(errors="replace").partition("\n")
    first, begin, end = (
        int(number) for number in (*re.findall(r"-?\d{1,9}", numbers), 1, 1, 1)[:3]
    )
    source = Source(first, text, begin, end, alone="alone" in numbers, whole_lines=True)
    words = []
    for edit in _EDITS:
        new = edited(source, [edit])
        words.append("-" if new is None else str(min(3, len(new))))
        change_diff("train.py:7", source, new or ())
    return "".join(words)


def archive(data: bytes) -> str:
    """An archive that `bundle` wrote, or a stranger."""
    with tempfile.NamedTemporaryFile(suffix=".zip", dir=_MEMORY) as file:
        file.write(data)
        file.flush()
        return _word(analyse([Path(file.name)], limits=LIMITS))


def log(data: bytes) -> str:
    """The log of a run that failed, and what is said of it."""
    found = diagnose_log(read_log(lines_of(io.BytesIO(data))))
    causes = [finding_of(found.cause)] if found.cause else []
    explanation(
        causes,
        [finding_of(hint) for hint in found.hints],
        found.first.errors[-1].summary if found.first else None,
        color=False,
    )
    return f"{[cause.code for cause in causes]} {len(found.hints)} {bool(found.first)}"


def snapshot(data: bytes) -> str:
    """A pickle: a memory snapshot of torch's, or anything else."""
    with tempfile.NamedTemporaryFile(suffix=".pickle", dir=_MEMORY) as file:
        file.write(data)
        file.flush()
        found = result_of_snapshots(snapshots_at([Path(file.name)], LIMITS))
    assert from_json(to_json(found)) == found
    render_text(found, color=False)
    kinds = sorted({kind for one in found.snapshots for kind in one.by_kind})
    return f"{min(3, len(found.snapshots))} {' '.join(kinds)}"


def project(data: bytes) -> str:
    """A project's settings, for both commands that have some."""
    words = []
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        Path(folder, "pyproject.toml").write_bytes(data)
        for settings in (check_settings, lint_settings):
            try:
                words.append(str(settings(Path(folder)) != settings(Path("/"))))
            except ScanError as error:
                words.append(f"{error.code} {error.what[:20]}")
    return " ".join(words)


def pins(data: bytes) -> str:
    """What is pinned beside a script."""
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        for name in ("requirements.txt", "requirements-dev.txt", "pyproject.toml"):
            Path(folder, name).write_bytes(data)
        found = pinned_beside(Path(folder))
    return f"{found.default} {found.refuses} {bool(found.source)}"


def _linted_as(name: str, data: bytes) -> str:
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        Path(folder, name).write_bytes(data)
        report = lint([Path(folder), Path(folder, name)])
    for rendered in RENDERINGS.values():
        rendered(report)
    return f"{sorted({one.code for one in report.found})} {report.read} {len(report.unread)}"


def shell(data: bytes) -> str:
    """A launch script."""
    return _linted_as("start.sh", data)


def notebook(data: bytes) -> str:
    """A notebook, for each command that could be given one."""
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        path = Path(folder, "train.ipynb")
        path.write_bytes(data)
        try:
            word = _word(result_at(str(path)))
        except ScanError as error:
            word = f"{error.code} {error.why}"[:40]
    return f"{word} {_linted_as('train.ipynb', data)}"


def link(data: bytes) -> str:
    """A folder of links, one a line, to what the lines name."""
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        inside = Path(folder, "run")
        inside.mkdir()
        for number, target in enumerate(data[:2000].split(b"\n")[:8]):
            for name in (f"trace-rank{number}.json", f"run-rank{number}.json", f"{number}.py"):
                with suppress(OSError, ValueError):
                    os.symlink(target, bytes(inside / name))  # noqa: PTH211 - any bytes
        try:
            word = _word(analyse([inside], limits=LIMITS))
        except ScanError as error:
            word = error.code
        return f"{word} {lint([inside]).read}"


def redirect(data: bytes) -> str:
    """Where a server sends its readers; what is said of addresses holds no secret of them."""
    text = data.decode(errors="replace")
    address, _, target = text.partition("\n")
    stays = _stays("https://host.example/a/b", target)
    if stays:  # by another reading of addresses
        with suppress(ValueError):
            read = urlsplit(urljoin("https://host.example/a/b", target))
            assert read.hostname in ("host.example", None), target  # none is no other host
    return f"{is_remote(address)} {stays} {'@' in shown(address)} {'?' in shown(address)}"


def line(data: bytes) -> str:
    """A log of one long line."""
    one = data.replace(b"\n", b" ") + b" "
    return log(one * max(1, min(40, 200_000 // len(one))))


TARGETS: dict[str, Target] = {
    "trace": trace,
    "whole": whole,
    "result": result,
    "baseline": baseline,
    "run_record": run_record,
    "gradients": gradients,
    "config": config,
    "code": code,
    "archive": archive,
    "log": log,
    "snapshot": snapshot,
    "guard": guard,
    "rehearsal": rehearsal,
    "lint": linted,
    "compiled": compiled,
    "nsys": nsys,
    "project": project,
    "pins": pins,
    "shell": shell,
    "notebook": notebook,
    "link": link,
    "redirect": redirect,
    "line": line,
}


def outcome(target: str, data: bytes) -> str:
    """What one input leads to; any exception but a :class:`ScanError` is a bug, and comes out."""
    try:
        return TARGETS[target](data)
    except ScanError as error:
        return error.code


def _word(result: Result) -> str:
    return f"{result.verdict} {result.confidence} {' '.join(sorted(result.health))}"
