"""Files made to do harm, or just too large: refused early, with the option that lets them in."""

import gzip
import json
import time
import zipfile
from pathlib import Path

import pytest
import zstandard
from msgspec.structs import replace

from recompute_scan.errors import InputError
from recompute_scan.trace import find, load
from recompute_scan.trace.columns import DEFAULT_LIMITS, Limits

from .make_corpus import FOLDER, event, sound, trace, zipped


def refused(path: Path, limits: Limits = DEFAULT_LIMITS) -> InputError:
    with pytest.raises(InputError) as caught:
        load(path, limits=limits)
    assert "\n" not in caught.value.what
    return caught.value


@pytest.mark.parametrize("pack", ["gzip", "zstd", "zip"])
def test_400_mb_of_one_string_are_refused_in_a_second(tmp_path: Path, pack: str) -> None:
    start, piece = b'{"traceEvents": [{"name": "', b"a" * 4_000_000
    file = tmp_path / "bomb"
    if pack == "zip":
        with (
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("trace.json", "w") as member,
        ):
            member.write(start)
            for _ in range(100):
                member.write(piece)
    else:
        open_ = gzip.open if pack == "gzip" else zstandard.open
        with open_(file, "wb") as stream:
            stream.write(start)
            for _ in range(100):
                stream.write(piece)
    begun = time.process_time()
    error = refused(file)
    assert time.process_time() - begun < 1.0
    assert (error.code, error.exit_status) == ("E311", 3)
    assert error.hint
    assert "--max-ratio" in error.hint


def test_lifting_the_ratio_brings_the_next_limit(tmp_path: Path) -> None:
    file = tmp_path / "bomb.gz"
    file.write_bytes(gzip.compress(b'{"traceEvents": [{"name": "' + b"a" * 40_000_000))
    lifted = replace(DEFAULT_LIMITS, ratio=2000)
    assert refused(file, replace(lifted, inflated_bytes=2**20)).code == "E310"
    assert refused(file, replace(lifted, event_bytes=2**22)).code == "E315"
    assert refused(file, lifted).code == "E302"


def test_repetitive_but_honest_traces_pass(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.zst"
    data = trace([event(number % 10) for number in range(100_000)])
    file.write_bytes(zstandard.ZstdCompressor(level=9).compress(data))
    assert len(data) > DEFAULT_LIMITS.ratio_from
    if len(data) < DEFAULT_LIMITS.ratio * file.stat().st_size:
        assert len(load(file)) == 100_000
    else:
        assert len(load(file, limits=replace(DEFAULT_LIMITS, ratio=10_000))) == 100_000


def test_too_many_events(tmp_path: Path) -> None:
    assert refused(FOLDER / "good.json", Limits(events=9)).code == "E313"
    assert len(load(FOLDER / "good.json", limits=Limits(events=10))) == 10


def test_too_many_names_or_threads(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(trace([event(0), event(1).replace('"tid": 7', '"tid": 8')]))
    assert refused(file, Limits(distinct=1)).code == "E314"
    assert refused(file, Limits(threads=1)).code == "E330"
    assert len(load(file, limits=Limits(distinct=2, threads=2))) == 2


def test_too_deep_is_refused_and_with_a_higher_limit_only_the_arguments_go(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    events = sound()
    events[4] = event(4, args=', "x": ' + "[" * 5_000 + "]" * 5_000)
    file.write_bytes(trace(events))
    assert refused(file).code == "E312"
    lifted = load(file, limits=Limits(depth=10_000))
    assert (len(lifted), lifted.health) == (10, {"args_dropped": 1})


def test_long_names_are_cut_and_counted(tmp_path: Path) -> None:
    cut = load(FOLDER / "good.json", limits=Limits(name_chars=5))
    assert set(cut.names) == {"aten:"}
    assert cut.health == {"names_shortened": 10}


def test_too_many_members(tmp_path: Path) -> None:
    file = tmp_path / "many.zip"
    file.write_bytes(zipped(*[(f"{number}.txt", b"") for number in range(11)]))
    assert refused(file, Limits(members=10)).code == "E316"
    with pytest.raises(InputError, match="E316"):
        find([file], Limits(members=10))


def test_quotes_that_never_close_cost_no_more_than_a_second(tmp_path: Path) -> None:
    for number, text in enumerate((b'\\"' * 500_000, b'"a":"' * 200_000, b'"}, ' * 200_000)):
        file = tmp_path / f"quotes{number}.json"
        file.write_bytes(trace(sound()).replace(b"aten::op4", text))
        begun = time.process_time()
        assert len(load(file)) >= 9
        assert time.process_time() - begun < 5.0


def test_an_archive_stands_for_its_traces_and_each_can_be_named(tmp_path: Path) -> None:
    file = tmp_path / "run.zip"
    good = (FOLDER / "good.json").read_bytes()
    file.write_bytes(
        zipped(
            ("run/trace-rank10.json.gz", gzip.compress(good)),
            ("run/trace-rank2.json", good),
            ("run/run-rank2.json", b"{}"),
            ("run/result.json", b"{}"),
        )
    )
    found = find([file])
    assert [Path(path).relative_to(tmp_path).as_posix() for path in found] == [
        "run.zip/run/trace-rank2.json",
        "run.zip/run/trace-rank10.json.gz",
    ]
    assert [len(load(path)) for path in found] == [10, 10]
    assert refused(file).code == "E318"
    assert refused(file / "run" / "gone.json").code == "E301"
    # Nothing was written beside it.
    assert [path.name for path in tmp_path.iterdir()] == ["run.zip"]


def test_an_encrypted_archive_says_so(tmp_path: Path) -> None:
    data = bytearray(zipped(("trace.json", (FOLDER / "good.json").read_bytes())))
    data[6] |= 1
    central = data.index(b"PK\x01\x02")
    data[central + 8] |= 1
    file = tmp_path / "secret.zip"
    file.write_bytes(data)
    error = refused(file)
    assert error.code == "E307"
    assert error.why
    assert "encrypted" in error.why


def test_a_folder_takes_its_archives_only_where_it_holds_no_trace(tmp_path: Path) -> None:
    good = (FOLDER / "good.json").read_bytes()
    (tmp_path / "all.zip").write_bytes(zipped(("a.json", good)))
    assert find([tmp_path]) == [tmp_path / "all.zip" / "a.json"]
    (tmp_path / "b.json.zst").write_bytes(zstandard.ZstdCompressor().compress(good))
    assert find([tmp_path]) == [tmp_path / "b.json.zst"]


def test_globs_are_expanded_where_no_file_has_that_name(tmp_path: Path) -> None:
    good = (FOLDER / "good.json").read_bytes()
    for name in ("r10.json", "r2.json", "[r].json"):
        (tmp_path / name).write_bytes(good)
    assert find([tmp_path / "r*.json"]) == [tmp_path / "r2.json", tmp_path / "r10.json"]
    assert find([tmp_path / "[r].json"]) == [tmp_path / "[r].json"]
    with pytest.raises(InputError, match="E301"):
        find([tmp_path / "x*.json"])


def test_the_whole_file_need_not_be_json_to_be_told_from_one(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"rows": [{"a": 1}] * 10}))
    assert refused(file).code == "E303"
