"""What is no file at all: pipes, links in a circle. Nothing waits for ever, nothing breaks."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.analysis.ranks import merge
from recompute_scan.cli import main
from recompute_scan.errors import InputError
from recompute_scan.trace import find, load
from tests.trust.test_opening import fifo, loop, unix_socket

from .make_corpus import FOLDER

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")


@pytest.fixture(autouse=True)
def no_patience() -> Iterator[None]:
    """What waits for a pipe is ended."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(FOLDER / "good.json", tmp_path / "trace-rank0.json")
    return tmp_path


def analysed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Status and words of the command."""
    status = main(["analyze", *words])
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.mark.parametrize(
    "name",
    [
        *("b.json", "b.zip", "run-rank0.json", "so-far-rank0.json", "where-rank0.txt"),
        *("result.json", "stacks-rank0.json.gz", "flight-rank0.json", "gradients-rank0.json"),
    ],
)
@pytest.mark.parametrize("make", [fifo, unix_socket])
def test_what_is_no_file_in_a_folder_costs_nothing_but_a_word(
    folder: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(folder / name)
    warned = [one for one in analyse([folder]).warnings if "Left out" in one]
    assert len(warned) == (name == "b.json"), warned
    assert all(name in one and "a pipe, a socket or a device" in one for one in warned)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.sqlite", "a.zip", "a"])
@pytest.mark.parametrize("make", [fifo, unix_socket, loop])
def test_what_is_no_file_cannot_be_read(
    tmp_path: Path, name: str, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / name)
    for given in (tmp_path / name, *([tmp_path] if "." in name else [])):
        status, said = analysed(capsys, str(given))
        assert status == 3, said
        assert "[E301]" in said
        assert make is loop or "a pipe, a socket or a device" in said


def test_two_links_in_a_circle_beside_a_trace_cost_nothing_but_a_word(folder: Path) -> None:
    (folder / "x.json").symlink_to("y.json")
    (folder / "y.json").symlink_to("x.json")
    result = analyse([folder])
    assert len(result.ranks) == 1
    assert sum("Left out" in warning for warning in result.warnings) == 2


def test_an_run_record_of_a_killed_rank_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "so-far-rank0.json").write_text('{"schema": "recompute-scan-run/1"}')
    with pytest.raises(InputError) as refusal:
        find([tmp_path])
    assert refusal.value.code == "E308"
    with pytest.raises(InputError, match="not a profiler trace") as refusal:
        load(tmp_path / "so-far-rank0.json")
    assert refusal.value.why == "it is the run record of `run`, not a trace"


def test_what_could_not_be_read_holds_no_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    shutil.copy(FOLDER / "good.json", tmp_path)
    seen: list[BaseException] = []

    def remember(error: InputError) -> InputError:
        seen.append(error)
        return error

    monkeypatch.setattr(
        "recompute_scan.analysis.pipeline.merge",
        lambda pieces, failures: merge(pieces, [*map(remember, failures)]),
    )
    analyse([tmp_path])
    assert [error.__traceback__ for error in seen] == [None]
    assert [error.__context__ for error in seen] == [None]


def test_torchs_log_of_its_compiler_alone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "dedicated_log_torch_trace_rank_0_gntjvho4.log"
    log.write_text('V1123 12:51:36.541000 10556 torch/_dynamo/utils.py:2350] {"frame_id": 0}\n')
    for given in (tmp_path, log):
        status, said = analysed(capsys, str(given))
        assert status == 3, said
        assert "TORCH_TRACE" in said
        assert "folder of a profiler trace of the same run" in said
