"""Every damaged file gives what can be read and the counters that say so, or one clear error."""

import time
from pathlib import Path

import pytest

from recompute_scan.errors import InputError
from recompute_scan.trace import load
from recompute_scan.trace.health import SENTENCES, sentences

from .make_corpus import EVENTS, FOLDER, files, write

# File: events that are read, counters, and the name of the fifth operator where it is told.
READ: dict[str, tuple[int, dict[str, int]] | tuple[int, dict[str, int], str]] = {
    "good.json": (10, {}, "aten::op4"),
    "good.json.gz": (10, {}),
    "good.json.zst": (10, {}),
    "good.zip": (10, {}),
    "good_compact.json": (10, {}),
    "good_indent_4.json": (10, {}),
    "good_one_event_a_line.json": (10, {}),
    "good_compressed_twice.json.gz": (10, {}),
    # text
    "control_character_in_name.json": (10, {"text_repaired": 1}, "bell   rings"),
    "newline_in_name.json": (10, {"text_repaired": 1}, "two lines"),
    "nul_in_name.json": (10, {"text_repaired": 1}, "nul   here"),
    "separator_in_name.json": (9, {"events_dropped": 2}, "aten::op5"),
    "quotes_in_name.json": (10, {"events_repaired": 1}, 'f(x="a", y="b")'),
    "source_text_as_name.json": (
        10,
        {"events_repaired": 1},
        'config = {"lr": 1, "name_": "x"}   return "y"',
    ),
    "quotes_in_first_name.json": (10, {"events_repaired": 1}),
    "quotes_in_last_name.json": (10, {"events_repaired": 1}),
    "windows_path_in_name.json": (
        10,
        {"events_repaired": 1},
        r"C:\Users\new\table.py(3): forward",
    ),
    "backslash_at_end_of_name.json": (10, {"events_repaired": 1}, "C:\\dir\\"),
    "bad_unicode_escape.json": (10, {"events_repaired": 1}, r"\u12 and \uzzzz"),
    "lone_surrogate.json": (10, {"text_repaired": 1}, "half \ufffd pair"),
    "invalid_utf8_in_name.json": (10, {"text_repaired": 1}, "aten::op\ufffd\ufffd4"),
    "invalid_utf8_in_every_name.json": (10, {"text_repaired": 10}, "aten\ufffd::op4"),
    "quotes_in_args.json": (10, {"events_repaired": 1}, "aten::op4"),
    "control_character_in_unused_arg.json": (10, {"text_repaired": 1}, "aten::op4"),
    "broken_args.json": (10, {"args_dropped": 1}, "aten::op4"),
    "byte_order_mark.json": (10, {"byte_order_mark": 1}),
    "quotes_in_head.json": (10, {"metadata_repaired": 1}),
    "quotes_in_tail.json": (10, {"metadata_repaired": 1}),
    "nan_in_head.json": (10, {"metadata_repaired": 1}),
    # values
    "value_NaN.json": (10, {"events_repaired": 1, "events_without_duration": 1}, "aten::op4"),
    "value_nan.json": (10, {"events_repaired": 1, "events_without_duration": 1}),
    "value_minus_nan.json": (10, {"events_repaired": 1, "events_without_duration": 1}),
    "value_Infinity.json": (10, {"events_repaired": 1, "events_without_duration": 1}),
    "value_minus_inf.json": (10, {"events_repaired": 1, "events_without_duration": 1}),
    "value_NA.json": (10, {"events_repaired": 1, "events_without_duration": 1}),
    "value_1e999.json": (10, {"events_repaired": 1, "events_without_duration": 1}),
    "value_1.INF.json": (10, {"events_repaired": 1, "events_without_duration": 1}),
    "nan_in_unused_arg.json": (10, {"events_repaired": 1}, "aten::op4"),
    "huge_integers.json": (10, {"numbers_out_of_range": 1}, "aten::op4"),
    "negative_duration.json": (10, {"negative_durations": 1}, "aten::op4"),
    "event_is_a_number.json": (9, {"events_dropped": 1}, "aten::op5"),
    "braces_without_end.json": (9, {"events_dropped": 8000}, "aten::op5"),
    "args_is_text.json": (10, {"args_dropped": 1}, "odd"),
    "trailing_comma_in_event.json": (10, {"events_repaired": 1}, "aten::op4"),
    "trailing_comma_after_events.json": (10, {"commas_dropped": 1}),
    "leading_comma_before_events.json": (10, {"commas_dropped": 1}),
    "two_commas_between_events.json": (9, {"commas_dropped": 1}, "aten::op5"),
    "very_long_name.json": (10, {"names_shortened": 1}, "x" * 20_000),
    # ends
    "cut_in_last_event.json": (9, {"cut_short": 1}),
    "cut_after_an_event.json": (9, {"cut_short": 1}),
    "cut_after_a_comma.json": (9, {"cut_short": 1}),
    "cut_after_last_event.json": (10, {"cut_short": 1}),
    "cut_in_tail.json": (10, {"cut_short": 1, "metadata_unreadable": 1}),
    "array_without_end.json": (10, {}),
    "array_cut.json": (9, {"cut_short": 1}),
    "two_traces_glued.json": (10, {"bytes_after_end": 2208, "documents_after_first": 1}),
    "cut_and_another_glued.json": (
        9,
        {"cut_short": 1, "bytes_after_end": 2250, "documents_after_first": 1},
    ),
    "junk_after_end.json": (10, {"bytes_after_end": 6}),
    "nuls_after_end.json": (10, {"bytes_after_end": 512}),
    "nuls_in_the_middle.json": (6, {"events_dropped": 1}),
    # compression
    "gzip_cut.json.gz": (978, {"archive_damaged": 1, "cut_short": 1}),
    "gzip_cut_in_checksum.json.gz": (10, {"archive_damaged": 1}),
    "gzip_junk_after_end.json.gz": (10, {"bytes_after_end": 4}),
    "gzip_zeros_after_end.json.gz": (10, {}),
    "gzip_named_json.json": (10, {}),
    "zstd_cut.json.zst": (625, {"cut_short": 1}),
}
REFUSED = {
    "gzip_cut_in_header.json.gz": "E307",
    "zip_cut.zip": "E307",
    "zip_without_trace.zip": "E308",
    "empty_file.json": "E302",
    "empty_cycle.json": "E304",
    "only_names_of_processes.json": "E304",
    "cut_before_first_event.json": "E302",
    "cut_in_first_event.json": "E302",
    "web_page.json": "E302",
    "traceback.json": "E302",
    "pickle.json": "E302",
    "git_lfs_pointer.json.gz": "E302",
    "our_result.json": "E303",
    "array_of_numbers.json": "E303",
    "events_are_text.json": "E303",
    "nested_100000_deep.json": "E312",
    "array_100000_deep.json": "E312",
    "args_100000_deep.json": "E312",
    "gzip_bomb.json.gz": "E311",
    "gzip_bomb_of_spaces.json.gz": "E302",
    "zip_with_parent_name.zip": "E317",
    "zip_with_backslash_parent.zip": "E317",
    "zip_with_absolute_name.zip": "E317",
    "zip_with_drive.zip": "E317",
    "zip_with_link.zip": "E317",
    "zip_of_two_traces.zip": "E318",
}
# Here the inflated text itself is wrong from the damage on: only that much is sure.
GARBLED = ("gzip_damaged_in_the_middle.json.gz", "zip_member_damaged.zip")


def test_the_table_names_every_file() -> None:
    there = {path.name for path in FOLDER.iterdir()}
    assert there == {*READ, *REFUSED, *GARBLED}
    assert there == {name for name, _ in files()}


@pytest.mark.parametrize("name", READ)
def test_what_can_be_read_is_read_and_the_rest_is_counted(name: str) -> None:
    events, health, *fifth = READ[name]
    trace = load(FOLDER / name)
    assert (len(trace), trace.health) == (events, health)
    if fifth:
        assert trace.names[trace.name[4]] == fifth[0]
    assert bool(sentences(trace.health)) == bool(health)


@pytest.mark.parametrize("name", [name for name, row in READ.items() if row[0] == EVENTS])
def test_neighbours_of_the_damage_are_untouched(name: str) -> None:
    trace, good = load(FOLDER / name), load(FOLDER / "good.json")
    for row in (1, 2, 7, 8):
        assert trace.names[trace.name[row]] == good.names[good.name[row]].replace(
            "::", "\ufffd::" if "every" in name else "::"
        )
        assert (trace.ts[row], trace.dur[row], trace.sequence[row]) == (
            good.ts[row],
            good.dur[row],
            good.sequence[row],
        )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_at_once_with_one_clear_error(name: str) -> None:
    begun = time.process_time()
    with pytest.raises(InputError) as caught:
        load(FOLDER / name)
    assert caught.value.code == REFUSED[name]
    assert name.removesuffix(".zip") in caught.value.what
    assert caught.value.exit_status == 3
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize("name", GARBLED)
def test_damage_inside_compressed_data_keeps_what_came_before(name: str) -> None:
    trace = load(FOLDER / name)
    assert {"archive_damaged", "cut_short"} <= trace.health.keys()
    # Before the damage lie at least 900 sound events.
    assert trace.sequence[:900].tolist() == list(range(900))


def test_rank_survives_damage_in_the_head() -> None:
    assert load(FOLDER / "quotes_in_head.json").rank == 3


@pytest.mark.parametrize(
    ("name", "at"),
    [("cut_in_last_event.json", 80_125), ("cut_in_tail.json", None), ("good.json", None)],
)
def test_where_the_calls_are_cut_is_told(name: str, at: int | None) -> None:
    assert load(FOLDER / name).cut_at == at


def test_every_counter_has_a_sentence_that_names_its_number() -> None:
    for name, text in SENTENCES.items():
        assert text.endswith(".")
        (said,) = sentences({name: 1234})
        assert ("1,234" in said) == ("{n}" in text)
    assert sentences({"events": 5}) == ()


def test_the_corpus_is_what_its_maker_writes(tmp_path: Path) -> None:
    write(tmp_path)
    # Compressed files differ between versions of zlib; what they hold does not.
    for path in sorted(tmp_path.iterdir()):
        if path.suffix == ".json":
            assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name
