"""Writes the corpus of damaged files: ``python -m tests.damage.make_corpus``.

Every file is the same sound trace of ten operators in Kineto's own layout, with one thing done
to it that the file's name says. The same code gives the same bytes.
"""

import gzip
import io
import json
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

import zstandard

FOLDER = Path(__file__).parent / "corpus"
EVENTS = 10
HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [],
  "distributedInfo": {"backend": "gloo", "rank": 3, "world_size": 8},
  "displayTimeUnit": "ms",
  "traceEvents": [
"""
TAIL = """
  ],
  "traceName": "trace.json"
}
"""
BETWEEN = ",\n"


def event(number: int, name: str | None = None, dur: str = "9.5", args: str = "") -> str:
    """One operator as Kineto writes it; nothing is escaped."""
    return f"""  {{
    "ph": "X", "cat": "cpu_op", "name": "{name or f"aten::op{number}"}", "pid": 7, "tid": 7,
    "ts": {10 * number}.125, "dur": {dur},
    "args": {{
      "External id": {number}, "Sequence number": {number}, "Input Dims": [[2, 2]]{args}
    }}
  }}"""


def trace(events: list[str], head: str = HEAD, tail: str = TAIL) -> bytes:
    return (head + BETWEEN.join(events) + tail).encode()


def sound() -> list[str]:
    return [event(number) for number in range(EVENTS)]


def with_event(text: str, at: int = 4) -> bytes:
    events = sound()
    events[at] = text
    return trace(events)


def named(name: str, at: int = 4) -> bytes:
    return with_event(event(at, name), at)


def files() -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every file of the corpus."""
    good = trace(sound())
    yield "good.json", good
    yield "good.json.gz", packed(good)
    yield "good.json.zst", zstandard.ZstdCompressor(write_checksum=True).compress(good)
    yield "good.zip", zipped(("rank0/trace.json", good))
    yield "good_compact.json", json.dumps(json.loads(good)).encode()
    yield "good_indent_4.json", json.dumps(json.loads(good), indent=4).encode()
    yield "good_one_event_a_line.json", _one_a_line()
    yield "good_compressed_twice.json.gz", packed(packed(good))
    yield from _text()
    yield from _values()
    yield from _ends()
    yield from _compression()
    yield from _no_trace()
    yield from _limits()


def _text() -> Iterator[tuple[str, bytes]]:
    good = trace(sound())
    yield "control_character_in_name.json", named("bell \x07 rings")
    yield "newline_in_name.json", named("two\nlines")
    yield "nul_in_name.json", named("nul \0 here")
    yield "separator_in_name.json", named('false end\n  },\n  {\n    "ph')
    yield "quotes_in_name.json", named('f(x="a", y="b")')
    yield "source_text_as_name.json", named('config = {"lr": 1, "name_": "x"}\n  return "y"')
    yield "quotes_in_first_name.json", named('say "hi"', at=0)
    yield "quotes_in_last_name.json", named('say "hi"', at=EVENTS - 1)
    yield "windows_path_in_name.json", named(r"C:\Users\new\table.py(3): forward")
    yield "backslash_at_end_of_name.json", named("C:\\dir\\")
    yield "bad_unicode_escape.json", named(r"\u12 and \uzzzz")
    yield "lone_surrogate.json", named(r"half \ud83d pair")
    yield "invalid_utf8_in_name.json", good.replace(b"op4", b"op\xff\xfe4")
    yield "invalid_utf8_in_every_name.json", good.replace(b"aten::op", b"aten\xff::op")
    yield "quotes_in_args.json", with_event(event(4, args=', "Call stack": "f("a")"'))
    yield "control_character_in_unused_arg.json", with_event(event(4, args=', "x": "\x01"'))
    yield "broken_args.json", with_event(event(4, args=', "x": [1, 2, {"'))
    yield "byte_order_mark.json", b"\xef\xbb\xbf" + good
    yield "quotes_in_head.json", good.replace(b'"ms"', b'"m"s"')
    yield "quotes_in_tail.json", good.replace(b'"trace.json"', b'"a "b" c"')
    yield "nan_in_head.json", good.replace(b'"deviceProperties": []', b'"deviceProperties": [nan]')


def _values() -> Iterator[tuple[str, bytes]]:
    for word in ("NaN", "nan", "-nan(ind)", "Infinity", "-inf", "N/A", "1e999", "1.#INF"):
        name = word.replace("/", "").replace("(ind)", "").replace("#", "").replace("-", "minus_")
        yield f"value_{name}.json", with_event(event(4, dur=word))
    yield "nan_in_unused_arg.json", with_event(event(4, args=', "Bandwidth (GB/s)": inf'))
    yield "huge_integers.json", with_event(event(4, args=', "correlation": 123456789012345678901'))
    yield "negative_duration.json", with_event(event(4, dur="-3.5"))
    yield "event_is_a_number.json", with_event("  5")
    yield "braces_without_end.json", with_event("{{}" * 8000)
    yield "args_is_text.json", with_event('  {"ph": "X", "name": "odd", "ts": 1, "args": "none"}')
    yield "trailing_comma_in_event.json", with_event(event(4, args=","))
    yield "trailing_comma_after_events.json", trace(sound(), tail=BETWEEN + TAIL)
    yield "leading_comma_before_events.json", trace(sound(), head=HEAD + ",\n")
    yield (
        "two_commas_between_events.json",
        trace(["  {}" if n == 4 else e for n, e in enumerate(sound())]).replace(b"  {}", b""),
    )
    yield "very_long_name.json", named("x" * 30_000)


def _ends() -> Iterator[tuple[str, bytes]]:
    good = trace(sound())
    last = good.index(b'"aten::op9"')
    yield "cut_in_last_event.json", good[:last]
    yield "cut_after_an_event.json", good[: good.index(b",\n  {", last - 200)]
    yield "cut_after_a_comma.json", good[: good.index(b",\n  {", last - 200) + 1]
    yield "cut_after_last_event.json", good[: -len(TAIL)]
    yield "cut_in_tail.json", good[:-8]
    yield "array_without_end.json", ("[\n" + BETWEEN.join(sound()) + ",\n").encode()
    yield "array_cut.json", ("[\n" + BETWEEN.join(sound())).encode()[:-40]
    yield "two_traces_glued.json", good + good
    yield "cut_and_another_glued.json", good[:last] + good
    yield "junk_after_end.json", good + b"Killed\n"
    yield "nuls_after_end.json", good + b"\0" * 512
    yield "nuls_in_the_middle.json", good[:900] + b"\0" * 512 + good[1412:]


def _compression() -> Iterator[tuple[str, bytes]]:
    # Enough events for damage in the middle to leave some whole.
    many = trace([event(number, name=f"aten::op{number * 7919 % 4001}") for number in range(2000)])
    gz = packed(many)
    yield "gzip_cut.json.gz", gz[: len(gz) // 2]
    yield "gzip_cut_in_checksum.json.gz", packed(trace(sound()))[:-5]
    yield "gzip_damaged_in_the_middle.json.gz", gz[: len(gz) // 2] + b"\0" * 64 + gz[len(gz) // 2 :]
    yield "gzip_junk_after_end.json.gz", packed(trace(sound())) + b"junk"
    yield "gzip_zeros_after_end.json.gz", packed(trace(sound())) + b"\0" * 512
    yield "gzip_named_json.json", packed(trace(sound()))
    yield "gzip_cut_in_header.json.gz", gz[:6]
    zst = zstandard.ZstdCompressor().compress(many)
    yield "zstd_cut.json.zst", zst[: len(zst) // 2]
    yield "zip_cut.zip", zipped(("trace.json", many))[:2000]
    yield "zip_member_damaged.zip", _damaged_member(many)
    yield "zip_without_trace.zip", zipped(("notes.txt", b"nothing"))


def _no_trace() -> Iterator[tuple[str, bytes]]:
    yield "empty_file.json", b""
    yield "empty_cycle.json", trace([])
    yield "only_names_of_processes.json", trace(['{"ph": "M", "name": "process_name", "pid": 7}'])
    yield "cut_before_first_event.json", HEAD.encode()
    yield "cut_in_first_event.json", trace(sound())[: len(HEAD) + 40]
    yield "web_page.json", b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>"
    yield "traceback.json", b"Traceback (most recent call last):\n  File ..."
    yield "pickle.json", b"\x80\x04}\x94\x8c\x08segments\x94]\x94s."
    yield "git_lfs_pointer.json.gz", b"version https://git-lfs.github.com/spec/v1\noid sha256:00"
    yield "our_result.json", b'{"schema": "recompute-scan/1", "verdict": "none"}'
    yield "array_of_numbers.json", b"[1, 2, 3]"
    yield "events_are_text.json", b'{"traceEvents": "none"}'


def _limits() -> Iterator[tuple[str, bytes]]:
    yield "nested_100000_deep.json", b'{"traceEvents":' + b"[" * 100_000
    yield "array_100000_deep.json", b"[" * 100_000 + b"]" * 100_000
    yield "args_100000_deep.json", with_event(event(4, args=', "x": ' + "[" * 100_000))
    yield "gzip_bomb.json.gz", packed(b'{"traceEvents": [{"name": "' + b"a" * 40_000_000)
    yield "gzip_bomb_of_spaces.json.gz", packed(b" " * 40_000_000)
    yield "zip_with_parent_name.zip", zipped(("../trace.json", trace(sound())))
    yield "zip_with_backslash_parent.zip", zipped(("a\\..\\..\\trace.json", trace(sound())))
    yield "zip_with_absolute_name.zip", zipped(("/etc/trace.json", trace(sound())))
    yield "zip_with_drive.zip", zipped(("C:trace.json", trace(sound())))
    yield "zip_with_link.zip", _with_link()
    yield "zip_of_two_traces.zip", zipped(*[(f"r{n}.json", trace(sound())) for n in range(2)])


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def zipped(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _damaged_member(data: bytes) -> bytes:
    archive = bytearray(zipped(("trace.json", data)))
    archive[len(archive) // 2 : len(archive) // 2 + 64] = b"\0" * 64
    return bytes(archive)


def _with_link() -> bytes:
    buffer = io.BytesIO()
    info = zipfile.ZipInfo("trace.json")
    info.create_system = 3
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    return buffer.getvalue()


def _one_a_line() -> bytes:
    """As other writers of the format do: the first event on the bracket's line."""
    lines = [json.dumps(json.loads(text), separators=(",", ":")) for text in sound()]
    return ('{"traceEvents":[' + ",\n".join(lines) + "]}").encode()


def write(folder: Path) -> None:
    """Write every file into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    write(FOLDER)
