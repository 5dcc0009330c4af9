"""The commands ``analyze`` and ``report``: what they print, and how they end."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recompute_scan.analysis import pipeline
from recompute_scan.cli import main
from recompute_scan.cli.output import say
from tests.effort import some
from tests.recompute.training import checkpointed_step, marked_step, plain_step
from tests.result_schema import validate
from tests.trace_builder import op, step, write

PUBLIC = Path(__file__).parents[1] / "traces" / "public"
CALLS = {
    "none": plain_step(0),
    "full": checkpointed_step(0),
    "partial": checkpointed_step(0, recomputes={1: 0}),
    "doubled": marked_step(0, recomputes=2),
    "inconclusive": step(0, op("aten::mm")),
}
Output = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.json", CALLS["doubled"])


def shell(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command as a shell runs it; nothing of its output is a terminal."""
    command = [sys.executable, "-m", "recompute_scan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("verdict", CALLS)
def test_analyze_prints_the_document_and_the_text(
    tmp_path: Path, capsys: Output, verdict: str
) -> None:
    file = write(tmp_path / "trace.json", CALLS[verdict])
    assert main(["analyze", "--format", "json", str(file)]) == 0
    written = capsys.readouterr()
    validate(json.loads(written.out))
    assert json.loads(written.out)["verdict"] == verdict
    assert main(["analyze", str(file)]) == 0
    printed = capsys.readouterr()
    assert verdict in printed.out
    assert "\x1b" not in printed.out
    assert written.err == printed.err == ""


@pytest.mark.parametrize(
    "file", some(sorted(PUBLIC.glob("*.json.gz")), 3), ids=lambda file: file.name
)
def test_the_document_of_every_public_trace_is_valid(file: Path, capsys: Output) -> None:
    assert main(["analyze", "--format", "json", str(file)]) == 0
    validate(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("style", ["text", "json", "markdown"])
def test_output_goes_to_a_file(trace: Path, tmp_path: Path, capsys: Output, style: str) -> None:
    target = tmp_path / "output"
    assert main(["analyze", "--format", style, "--output", str(target), str(trace)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["analyze", "--format", style, str(trace)]) == 0
    assert capsys.readouterr().out == target.read_text(encoding="utf-8")


def test_report_gives_the_bytes_of_analyze(trace: Path, tmp_path: Path, capsys: Output) -> None:
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    arguments = ["--html", str(page), "--format", "json", "--output", str(result)]
    assert main(["analyze", *arguments, str(trace)]) == 0
    assert main(["report", str(result)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert main(["report", str(result), "--html", str(tmp_path / "again.html")]) == 0
    again = (tmp_path / "again.html").read_text()
    assert (tmp_path / "report.html").read_text() == again
    # the commands that come next name what each of the two was given
    command = re.compile(r"recompute-scan (?:run|compare|fix|plan) [^<`\"]*")
    assert command.sub("", again) == command.sub("", page.read_text())
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"trace.json", "page.html", "result.json", "report.html", "again.html"}


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A folder of inputs that cannot be used, each named for what is wrong with it."""
    for name, data in {
        "text.json": b"Traceback (most recent call last):",
        "other.json": b'{"models": [1, 2]}',
        "empty.json": b'{"traceEvents": []}',
        "broken.json.gz": b"\x1f\x8b\x08\x00 and nothing that inflates",
        "result-of-tomorrow.json": b'{"schema": "recompute-scan/2"}',
    }.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["analyze", "missing.json"], 3, "E301"),
        (["analyze", "text.json"], 3, "E302"),
        (["analyze", "other.json"], 3, "E303"),
        (["analyze", "empty.json"], 3, "E304"),
        (["analyze", "broken.json.gz"], 3, "E307"),
        (["analyze", "folder"], 3, "E308"),
        (["compare", "missing.json", "missing.json"], 3, "E301"),
        (["lint", "missing.json"], 3, "E301"),
        (["report", "missing.json"], 3, "E301"),
        (["report", "folder"], 3, "E301"),
        (["report", "text.json"], 3, "E302"),
        (["report", "other.json"], 3, "E305"),
        (["report", "result-of-tomorrow.json"], 3, "E305"),
        (["analyze"], 2, "Missing argument"),
        (["analyze", "--fromat", "json", "empty.json"], 2, "No such option"),
        (["analyze", "--format", "yaml", "empty.json"], 2, "yaml"),
        (["analyse", "empty.json"], 2, "No such command"),
    ],
)
def test_errors_are_clear_and_have_their_status(
    bad: Path,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(bad)
    assert main(arguments) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert 'File "' not in printed.err
    if status == 3:
        assert printed.err.startswith("recompute-scan: ")
        assert printed.err.count("recompute-scan: ") == 1
        assert arguments[1] in printed.err or said in ("E302", "E305")


@pytest.mark.parametrize("option", ["--html", "--output"])
def test_a_file_that_cannot_be_written(trace: Path, capsys: Output, option: str) -> None:
    assert main(["analyze", option, str(trace.parent / "no" / "such" / "x"), str(trace)]) == 2
    assert "E208" in capsys.readouterr().err


def test_a_shell_sees_the_status_and_one_message(bad: Path) -> None:
    done = shell("analyze", bad / "missing.json")
    assert (done.returncode, done.stdout) == (3, "")
    lines = done.stderr.splitlines()
    assert lines[0].endswith("[E301]")
    assert [line.partition(":")[0] for line in lines] == ["recompute-scan", "why", "try"]


@pytest.mark.parametrize("command", ["analyze", "check", "compare", "lint", "report", "explain"])
def test_a_name_that_is_too_long_is_no_bug(command: str, capsys: Output) -> None:
    named = ["x" * 300 + ".json"] * (1 + (command == "compare"))
    assert main([command, *named]) == 3
    printed = capsys.readouterr()
    assert "[E301]" in printed.err.splitlines()[0]
    assert printed.out == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["analyze"], ["explain", "RS001"]]
)
def test_output_that_has_no_room_is_no_bug(arguments: list[str], trace: Path) -> None:
    arguments = [*arguments, str(trace)] if arguments == ["analyze"] else arguments
    command = [sys.executable, "-m", "recompute_scan", *arguments]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2
    assert "[E208]" in done.stderr.splitlines()[0]


def test_what_an_encoding_lacks_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
    say("caf\xe9 \u2026 \U0001f525\n")
    sys.stdout.flush()
    assert written.getvalue() == b"caf\xe9 \\u2026 \\U0001f525\n"


@pytest.mark.parametrize("arguments", [["lint", "{}"], ["check", "{}"], ["analyze", "{}"]])
def test_a_current_folder_that_is_gone_is_no_bug(
    arguments: list[str], trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    words = shlex.join(one.format(trace) for one in arguments)
    start = f"cd gone; rmdir ../gone; exec {shlex.quote(sys.executable)} -m recompute_scan {words}"
    done = subprocess.run(
        ["sh", "-c", start], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 3)
    assert done.returncode == 0 or "Cannot use the current folder. [E301]" in done.stderr


def breaks(*_: object, **__: object) -> None:
    raise RuntimeError("did not expect that")


def test_a_bug_of_ours_is_one_line(
    trace: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "analyse", breaks)
    assert main(["analyze", str(trace)]) == 70
    printed = capsys.readouterr()
    assert "RuntimeError: did not expect that [E701]" in printed.err.splitlines()[0]
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_a_bug_of_ours_has_a_traceback_when_asked(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "analyse", breaks)
    with pytest.raises(RuntimeError, match="did not expect"):
        main(["analyze", "--debug", str(trace)])


def test_interrupted(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "analyse", interrupted)
    assert main(["analyze", str(trace)]) == 130


def test_a_reader_that_leaves_is_no_error(trace: Path) -> None:
    command = f"{sys.executable} -m recompute_scan analyze --format json {trace} | head -c 1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")


def test_off_a_terminal_there_is_colour_where_it_is_forced(trace: Path) -> None:
    done = shell("analyze", trace, env={**os.environ, "FORCE_COLOR": "1"})
    assert done.returncode == 0
    assert "\x1b" in done.stdout
    assert "\x1b" not in done.stderr


def on_a_terminal(trace: Path, **environment: str) -> str:
    pty = pytest.importorskip("pty")
    main_end, other_end = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "recompute_scan", "analyze", str(trace)],
        stdout=other_end,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", **environment},
        timeout=120,
    )
    os.close(other_end)
    shown = b""
    while True:
        try:
            piece = os.read(main_end, 65_536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(main_end)
    assert done.returncode == 0
    return shown.decode()


def test_colour_on_a_terminal_unless_it_is_not_wanted(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in on_a_terminal(trace)
    assert "\x1b" not in on_a_terminal(trace, NO_COLOR="1")


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"], ["--version"]])
def test_help_and_version(capsys: Output, arguments: list[str]) -> None:
    assert main(arguments) == 0
    assert "recompute-scan" in capsys.readouterr().out


def modules_after(*arguments: object) -> set[str]:
    """Top-level modules that a command has imported when it ends."""
    code = (
        "import sys; from recompute_scan.cli import main; main(sys.argv[1:]); "
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return set(done.stderr.split())


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "pandas", "plotly", "msgspec", "jinja2"}
    assert not modules_after("--help") & heavy
    assert not modules_after("run", "--help") & heavy


def test_analyze_imports_no_torch_and_no_tables(trace: Path) -> None:
    loaded = modules_after("analyze", trace)
    assert "numpy" in loaded
    assert not loaded & {"torch", "transformers", "pandas", "plotly", "rich"}


def test_the_page_needs_no_torch(trace: Path, tmp_path: Path) -> None:
    loaded = modules_after("analyze", "--html", tmp_path / "page.html", trace)
    assert not loaded & {"torch", "transformers", "pandas"}
