"""``bundle``: the archive gives the answer of the original, fits, and tells nothing else."""

import functools
import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.bundle import Archive, pack
from recompute_scan.cli import main
from recompute_scan.result import Flops, Result
from tests.effort import some
from tests.present import present
from tests.share.canaries import NAMED, WORD, found_in, plant_folder

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted(
    path for path in (ROOT / "traces").iterdir() if (path / "run-rank0.json").exists()
)
PUBLIC = sorted((ROOT / "traces" / "public").glob("*.json.gz"))
DOUBLED = ROOT / "traces" / "doubled_llama_fsdp"
GPU = ROOT / "traces" / "public" / "mi300x-resnet-checkpointed.json.gz"
Output = pytest.CaptureFixture[str]


def packed(source: Path, folder: Path, **options: Any) -> tuple[Path, Archive]:
    target = folder / "share.zip"
    return target, pack([source], target, **options)


def arithmetic(result: Result) -> Flops | None:
    """Without the step time in it, which is rounded, and names, which may be replaced."""
    return result.flops and replace(result.flops, mfu=None, hfu=None, uncounted=(), reason=None)


@functools.cache
def answered(source: Path) -> Result:
    return analyse([source])


# With names replaced, whatever is cleaned is cleaned too: of public traces one is packed plain.
PACKED = [(source, True) for source in (*RECORDED, *PUBLIC)]
PACKED += [(source, False) for source in (*RECORDED, GPU)]


@pytest.mark.parametrize(
    ("source", "strict"),
    [
        *some(PACKED, 3),
        *(pytest.param(one, False, marks=pytest.mark.slow) for one in PUBLIC if one != GPU),
    ],
    ids=lambda value: (
        {True: "strict", False: "plain"}[value] if isinstance(value, bool) else value.name
    ),
)
def test_the_archive_gives_the_answer_of_the_original(
    source: Path, strict: bool, tmp_path: Path
) -> None:
    archive, contents = packed(source, tmp_path, strict=strict)
    assert contents.differences == ()
    assert contents.dropped == ()
    # Once more, without the comparison that the archive itself was made with.
    before, after = answered(source), analyse([archive])
    assert (after.verdict, after.reason) == (before.verdict, before.reason)
    assert after.recompute_per_backward == before.recompute_per_backward
    assert after.attention == before.attention
    assert arithmetic(after) == arithmetic(before)
    assert [f.code for f in after.findings] == [f.code for f in before.findings]
    if before.cost is not None:
        assert present(after.cost).saving_pct == pytest.approx(before.cost.saving_pct, rel=1e-9)
        assert present(after.cost).step_ms == pytest.approx(before.cost.step_ms, rel=1e-9)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    first, _ = packed(DOUBLED, tmp_path)
    data = first.read_bytes()
    again, _ = packed(DOUBLED, tmp_path)
    assert again.read_bytes() == data


def test_a_bundle_of_a_bundle_is_the_same_again(tmp_path: Path) -> None:
    first, _ = packed(DOUBLED, tmp_path, strict=True)
    (tmp_path / "again").mkdir()
    second, contents = packed(first, tmp_path / "again", strict=True)
    assert contents.differences == ()
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        assert one.read("result.json") == other.read("result.json")


def test_what_is_in_the_archive(tmp_path: Path) -> None:
    archive, contents = packed(DOUBLED, tmp_path)
    with zipfile.ZipFile(archive) as opened:
        assert opened.testzip() is None
        names = opened.namelist()
        issue = opened.read("issue.md").decode()
        page = opened.read("report.html").decode()
        result = json.loads(opened.read("result.json"))
    expected = ["trace-rank0.json", "run-rank0.json", "result.json", "report.html", "issue.md"]
    assert names == expected == [name for name, _, _ in contents.members]
    assert "examples/doubled_llama_fsdp.py:79" in issue
    assert "gradient_checkpointing_enable()" not in issue  # a line of the script
    # the script's call has the older of the library's names, and the risk is not lost
    assert "delete the gradient\\_checkpointing\\_enable(…) call" in issue
    assert "activation" not in issue.partition("**Fix:**")[2].partition("Risk:")[0]
    assert "set use\\_cache=False" in issue
    assert result["verdict"] == "doubled"
    assert all(c["source"] is None for r in result["regions"] for c in r["checkpoints"])
    assert "<html" in page


def test_viewers_find_what_they_need(tmp_path: Path) -> None:
    """The trace event format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    archive, _ = packed(GPU, tmp_path)
    with zipfile.ZipFile(archive) as opened:
        document = json.loads(opened.read("trace-rank0.json"))
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named >= {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}


# Only what is written down goes out.


def with_canaries(folder: Path, *, names: str) -> Path:
    """A run's folder in which everything that can hold a text holds a canary."""
    source = folder / f"{WORD}-run"
    source.mkdir()
    document = json.loads(gzip.decompress((DOUBLED / "trace-rank0.json.gz").read_bytes()))
    account = json.loads((DOUBLED / "run-rank0.json").read_bytes())
    plant_folder(source, document, account, names=names)
    return source


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_no_canary_comes_out(strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = with_canaries(tmp_path, names=WORD if strict else NAMED)
    monkeypatch.chdir(source)
    for name, secret in (("SECRET_TOKEN", WORD), ("HOSTNAME", f"node-{WORD}"), ("USER", WORD)):
        monkeypatch.setenv(name, secret)
    archive = tmp_path / "share.zip"
    options = ["--strict"] if strict else []
    assert main(["bundle", str(source), "-o", str(archive), *options]) == 0
    assert found_in(archive) == []
    # Names that are documented to stay do.
    assert bool(found_in(archive, NAMED)) is not strict
    before, after = analyse([source]), analyse([archive])
    assert before.verdict == after.verdict == "doubled"
    assert after.cost is not None
    assert after.cost.saving_pct == pytest.approx(present(before.cost).saving_pct, rel=1e-9)
    assert [len(r.checkpoints) for r in after.regions] == [
        len(r.checkpoints) for r in before.regions
    ]


def test_the_canaries_are_there_to_be_found(tmp_path: Path) -> None:
    """They are in what went in, so a field copied through would be seen."""
    source = with_canaries(tmp_path, names=WORD)
    archive = tmp_path / "raw.zip"
    files = [path for path in source.rglob("*") if path.is_file()]
    with zipfile.ZipFile(archive, "w") as opened:
        for path in files:
            data = path.read_bytes()
            opened.writestr(
                str(path.relative_to(source)),
                gzip.decompress(data) if path.suffix == ".gz" else data,
            )
    assert len(found_in(archive)) == len(files) >= 30
    text = gzip.decompress((source / "trace-rank0.json.gz").read_bytes()).decode()
    assert text.count(WORD) > 10_000


def test_names_of_a_damaged_trace_are_no_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in sorted((ROOT / "tests" / "damage" / "corpus").iterdir()):
        target = tmp_path / "share.zip"
        status = main(["bundle", str(file), "-o", str(target), "--force"])
        assert status in (0, 3), file.name
        if status == 0:
            assert analyse([target]).verdict == analyse([file]).verdict, file.name


# Size


@pytest.mark.parametrize("limit", [230_000, 150_000, 60_000, 45_000])
def test_it_is_trimmed_until_it_fits(limit: int, tmp_path: Path) -> None:
    archive, contents = packed(DOUBLED, tmp_path, limit=limit)
    assert archive.stat().st_size <= limit
    assert contents.dropped
    result = analyse([archive])
    assert result.verdict == "doubled"
    assert result.recompute_per_backward == 2
    with zipfile.ZipFile(archive) as opened:
        issue = opened.read("issue.md").decode()
    assert all(phrase in issue.replace("\\", "") for phrase in contents.dropped)


@pytest.mark.parametrize("limit", [150_000, 60_000])
def test_a_recording_without_steps_is_trimmed_too(limit: int, tmp_path: Path) -> None:
    source = ROOT / "traces" / "public" / "a100-segment-anything-inference.json.gz"
    archive, contents = packed(source, tmp_path, limit=limit)
    assert archive.stat().st_size <= limit
    assert "of the recording" in contents.dropped[0]
    assert analyse([archive]).reason == contents.before.reason


def test_too_small_a_limit_is_refused(tmp_path: Path, capsys: Output) -> None:
    target = tmp_path / "share.zip"
    assert main(["bundle", str(DOUBLED), "-o", str(target), "--max-bytes", "10000"]) == 3
    assert "[E327]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# The command


def test_it_lists_before_it_writes(tmp_path: Path, capsys: Output) -> None:
    target = tmp_path / "share.zip"
    assert main(["bundle", str(DOUBLED), "-o", str(target)]) == 0
    printed = capsys.readouterr()
    for name in ("trace-rank0.json", "run-rank0.json", "result.json", "report.html", "issue.md"):
        assert name in printed.out
    assert "Verdict of the archive: doubled, 2 recomputes" in printed.out
    assert f"wrote {target}" in printed.err


def test_show_writes_nothing(inside: Path, capsys: Output) -> None:
    assert main(["bundle", str(DOUBLED), "--show"]) == 0
    assert "LlamaDecoderLayer" in capsys.readouterr().out
    assert main(["bundle", str(DOUBLED), "--show", "--strict"]) == 0
    assert "LlamaDecoderLayer -> private_class_1" in capsys.readouterr().out
    assert list(inside.iterdir()) == []


def test_what_is_there_is_not_overwritten(tmp_path: Path, capsys: Output) -> None:
    target = tmp_path / "share.zip"
    target.write_text("mine")
    assert main(["bundle", str(DOUBLED), "-o", str(target)]) == 2
    assert "[E209]" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main(["bundle", str(DOUBLED), "-o", str(target), "--force"]) == 0
    assert zipfile.is_zipfile(target)


@pytest.mark.parametrize("arguments", [[], ["-o", "share.tar"]])
def test_where_it_goes_must_be_said(arguments: list[str], capsys: Output) -> None:
    assert main(["bundle", str(DOUBLED), *arguments]) == 2
    assert "[E210]" in capsys.readouterr().err
