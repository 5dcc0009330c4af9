"""Files and folders: what counts as a trace, in which order, and what is said of the rest."""

import gzip
import multiprocessing
import zipfile
from pathlib import Path

import pytest

from recompute_scan.errors import InputError
from recompute_scan.trace import find, load
from tests.trace_builder import as_bytes, document, op, thread

TRACE = as_bytes(document(thread(op("aten::mm"))))


def test_a_file_of_several_gzip_members_is_one_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(TRACE[:40]) + gzip.compress(TRACE[40:]))
    assert load(file).names == ("aten::mm",)


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(TRACE)[:-12],
        gzip.compress(TRACE)[:20],
        b"\x1f\x8b",
        b"\x1f\x8b\x08\x00 not gzip at all",
        gzip.compress(TRACE)[:-8] + b"\0" * 8,
    ],
    ids=["no end", "head only", "two bytes", "no deflate", "checksum"],
)
def test_broken_gzip_is_said(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "trace.json.gz"
    file.write_bytes(data)
    with pytest.raises(InputError) as caught:
        load(file)
    assert caught.value.code == "E307"
    assert str(file) in caught.value.what


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="E301"):
        load(tmp_path / name)


def test_a_folder_stands_for_its_traces_in_natural_order(tmp_path: Path) -> None:
    for name in (
        "trace-rank10.json.gz",
        "trace-rank2.json.gz",
        "trace-rank0.json",
        # what `run` writes beside its traces
        "stacks-rank0.json.gz",
        "stacks-rank0.json",
        "run-rank0.json",
        "result.json",
        # and what else may lie there
        "report.html",
        "notes.txt",
        "trace-rank1.json.gz.part",
    ):
        (tmp_path / name).write_bytes(TRACE)
    found = [Path(file).name for file in find([tmp_path])]
    assert found == ["trace-rank0.json", "trace-rank2.json.gz", "trace-rank10.json.gz"]


def test_a_named_file_is_taken_whatever_its_name(tmp_path: Path) -> None:
    files = [tmp_path / "stacks-rank0.json", tmp_path / "b.pt.trace.json", tmp_path / "a"]
    for file in files:
        file.write_bytes(TRACE)
    assert find(files) == files


def test_files_and_folders_mix(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "worker.json").write_bytes(TRACE)
    alone = tmp_path / "alone.json"
    alone.write_bytes(TRACE)
    assert find([alone, folder]) == [alone, folder / "worker.json"]


def test_a_folder_without_traces_is_said(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(InputError, match="E308"):
        find([tmp_path])


def test_a_missing_path_is_said_before_anything_is_read(tmp_path: Path) -> None:
    good = tmp_path / "trace.json"
    good.write_bytes(TRACE)
    with pytest.raises(InputError, match="E301"):
        find([good, tmp_path / "gone"])


def packed(path: Path, names: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for member, operator in names.items():
            archive.writestr(member, as_bytes(document(thread(op(operator)))))


def test_an_archive_that_was_written_over_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "share.zip"
    packed(path, {"a.json": "aten::mm"})
    assert load(path).names == ("aten::mm",)
    packed(path, {"b.json": "aten::add"})
    assert load(path).names == ("aten::add",)


def _names(path: Path) -> list[str]:
    return [load(path / f"{n}.json").names[0] for n in range(40)]


def test_processes_read_one_archive_beside_each_other(tmp_path: Path) -> None:
    """Even those that were forked while it was open."""
    path = tmp_path / "share.zip"
    expected = [f"aten::x{n}" for n in range(40)]
    packed(path, {f"{n}.json": name for n, name in enumerate(expected)})
    assert _names(path) == expected
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_names, [path] * 6) == [expected] * 6
