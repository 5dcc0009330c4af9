"""The event stream: what a reader gets, and that it does nothing to a script."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jsonschema
import pytest

from recompute_scan.errors import UsageError
from recompute_scan.events import (
    AnyEvent,
    CommandEnded,
    CommandStarted,
    EventStream,
    FindingTold,
    PhaseBegun,
    ResultTold,
    ScriptEnded,
    StepEnded,
    WarningTold,
    event_schema,
    read_event,
)
from tests.record.runs import Ran

_WRITTEN = json.loads((Path(__file__).parents[1] / "docs" / "schemas" / "event.json").read_text())
_SCHEMA = jsonschema.Draft202012Validator(_WRITTEN)
SCRIPT = """
import sys
import torch
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for number in range(30):
    x = torch.ones(2, 4)
    for layer in layers:
        x = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
    loss = x.square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), flush=True)
sys.exit(5)
"""


def events_in(text: bytes) -> list[AnyEvent]:
    """Every line, each of them one that the schema allows."""
    for line in text.splitlines():
        _SCHEMA.validate(json.loads(line))
    return [read_event(line) for line in text.splitlines()]


def started(folder: Path, *words: str, pass_fds: tuple[int, ...] = ()) -> Ran:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        pass_fds=pass_fds,
    )


RUN = ("-m", "recompute_scan", "run", "--keep-going", "--steps", "1", "--warmup", "1")
FEW = (*RUN, "--timing-steps", "2", "-o", "out")


def test_the_schema_in_the_documentation_is_the_one_that_is_written() -> None:
    assert event_schema() == _WRITTEN
    jsonschema.Draft202012Validator.check_schema(_WRITTEN)


def test_what_is_told_can_be_read_back_whatever_the_names_are(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    stream = EventStream(str(path))
    stream.rank = 3
    stream.tell(WarningTold(text='\udcff"\n' + "x" * 9000))
    stream.tell(StepEnded(step=7))
    again = EventStream(str(path))  # appended to what are events
    again.tell(CommandEnded(exit_status=4))
    warned, stepped, ended = events_in(path.read_bytes())
    assert isinstance(warned, WarningTold)
    assert warned.text.startswith('?"\nxxx')
    assert warned.text.endswith("x…")
    assert isinstance(stepped, StepEnded)
    assert (stepped.step, stepped.rank, stepped.process) == (7, 3, os.getpid())
    assert isinstance(ended, CommandEnded)
    assert ended.rank is None
    longest = max(len(line) for line in path.read_bytes().splitlines())
    assert longest < 4096
    with pytest.raises(ValueError, match="schema"):
        read_event(path.read_bytes().splitlines()[0].replace(b"event/1", b"event/2"))


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    for name in (str(path), str(tmp_path), str(tmp_path / "no" / "x"), "/dev/fd/1", "a\0b"):
        with pytest.raises(UsageError, match="Cannot write events") as refused:
            EventStream(name)
        assert refused.value.code == "E235"
        assert refused.value.why
    assert path.read_text() == "import torch\n"


def test_a_pipe_that_nobody_reads_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UsageError, match="Cannot write events"):
        EventStream(str(path))


def test_a_slow_reader_is_not_waited_for_and_hears_how_much_it_lost(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    stream = EventStream(str(path))
    for number in range(1000):  # more than a pipe holds
        stream.tell(StepEnded(step=number))
    read = os.read(reader, 1 << 20)
    stream.tell(StepEnded(step=1000))
    whole = events_in(read)
    (last,) = events_in(os.read(reader, 1 << 20))
    assert 0 < len(whole) < 1000
    assert last.lost == 1000 - len(whole)
    os.close(reader)
    stream.tell(StepEnded(step=1001))  # nobody is there any more


def test_a_reader_that_has_gone_ends_no_process(tmp_path: Path) -> None:
    # As many scripts of the shell's kind do.
    script = """
        import os, signal
        from recompute_scan.events import EventStream, StepEnded
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.mkfifo("pipe")
        reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
        stream = EventStream("pipe")
        os.close(reader)
        stream.tell(StepEnded(step=1))
        assert signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL
        assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        print("alive", flush=True)
        one, other = os.pipe()
        os.close(one)
        os.write(other, b"x")  # its own pipes end it as before
    """
    ran = started(tmp_path, "-c", textwrap.dedent(script))
    assert ran.stdout == "alive\n", ran.stderr
    assert ran.returncode == -13


def test_a_descriptor_that_the_script_has_closed_and_used_again_is_its_own(tmp_path: Path) -> None:
    stream = EventStream(str(tmp_path / "events.jsonl"))
    number = stream._descriptor
    os.close(number)
    other = os.open(tmp_path / "scripts.txt", os.O_WRONLY | os.O_CREAT)
    if other != number:  # another thread was faster
        os.dup2(other, number)
    stream.tell(StepEnded(step=1))
    stream.close()
    os.fstat(number)  # still the script's
    os.close(number)
    assert (tmp_path / "scripts.txt").read_bytes() == b""
    assert len(events_in((tmp_path / "events.jsonl").read_bytes())) == 1


def test_a_forked_process_tells_nothing(tmp_path: Path) -> None:
    script = """
        import os
        from recompute_scan.events import EventStream, StepEnded
        stream = EventStream("events.jsonl")
        if os.fork() == 0:
            stream.tell(StepEnded(step=1))
            os._exit(0)
        os.wait()
        stream.tell(StepEnded(step=2))
    """
    assert started(tmp_path, "-c", textwrap.dedent(script)).returncode == 0
    (one,) = events_in((tmp_path / "events.jsonl").read_bytes())
    assert isinstance(one, StepEnded)
    assert one.step == 2


@pytest.mark.slow
def test_a_run_is_told_from_its_first_line_to_its_last_and_the_script_is_the_same(
    tmp_path: Path,
) -> None:
    plain = started(tmp_path, "train.py")
    told = started(tmp_path, *FEW, "--work", "--events", "events.jsonl", "train.py")
    assert told.returncode == plain.returncode == 5
    assert told.stdout.startswith(plain.stdout)
    events = events_in((tmp_path / "events.jsonl").read_bytes())
    assert isinstance(events[0], CommandStarted)
    assert events[0].command == "run"
    assert isinstance(events[-1], CommandEnded)
    assert events[-1].exit_status == 5
    phases = [one.phase for one in events if isinstance(one, PhaseBegun)]
    assert phases == ["warmup", "timing", "trace", "stacks", "comparing", "watching", "done"]
    steps = [one.step for one in events if isinstance(one, StepEnded)]
    assert steps == list(range(1, len(steps) + 1))
    (script,) = (one for one in events if isinstance(one, ScriptEnded))
    assert (script.ending, script.exit_status, script.steps) == ("exited", 5, 30)
    (result,) = (one for one in events if isinstance(one, ResultTold))
    assert result.result == str(tmp_path / "out" / "result.json")
    written = json.loads(Path(result.result).read_text())
    assert result.verdict == written["verdict"]
    assert result.recompute_per_backward == written["recompute_per_backward"]
    findings = [one.code for one in events if isinstance(one, FindingTold)]
    assert findings == [one["code"] for one in written["findings"]]
    assert result.findings == len(findings)
    assert not any(one.lost for one in events)


@pytest.mark.slow
def test_a_reader_that_leaves_under_way_changes_nothing_for_the_script(tmp_path: Path) -> None:
    plain = started(tmp_path, "train.py")
    one, other = os.pipe()
    first: list[bytes] = []

    def read() -> None:
        first.append(os.read(one, 1))
        os.close(one)

    reader = threading.Thread(target=read)
    reader.start()
    told = started(tmp_path, *FEW, "--events", f"/dev/fd/{other}", "train.py", pass_fds=(other,))
    os.close(other)
    reader.join()
    assert first == [b"{"]
    assert told.returncode == plain.returncode
    assert told.stdout.startswith(plain.stdout)
    assert "Traceback" not in told.stderr


@pytest.mark.slow
def test_what_goes_wrong_is_told_before_the_last_line(tmp_path: Path) -> None:
    ran = started(tmp_path, "-m", "recompute_scan", "run", "--events", "e", "absent.py")
    *_, error, ended = events_in((tmp_path / "e").read_bytes())
    assert (ended.__struct_config__.tag, ran.returncode) == ("ended", 2)
    assert getattr(error, "code", None) == "E202"
    assert getattr(error, "what", "") in ran.stderr
