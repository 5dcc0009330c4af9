"""Hostile names in every field of every input, and every output looked at."""

import gzip
import json
import re
import shutil
import subprocess
import unicodedata
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import pytest

from recompute_scan.bundle.pack import issue_text
from recompute_scan.check import Policy, judge
from recompute_scan.check.formats import RENDERINGS
from recompute_scan.cli import main
from recompute_scan.cli.output import harmless
from recompute_scan.errors import InputError
from recompute_scan.report.render import (
    render_comparison_html,
    render_comparison_text,
    render_html,
    render_markdown,
    render_text,
)
from recompute_scan.result import Result, from_json, to_json
from recompute_scan.result.compare import compare
from recompute_scan.result.compare import to_json as comparison_json
from recompute_scan.terminal import UNSEEN, patch_name, printable
from tests.fuzz.filled import filled
from tests.lint.test_project import DOUBLED

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "doubled_llama_fsdp"
Output = pytest.CaptureFixture[str]

NAMES = {
    "github": "x\n::error::pwned\n  ::stop-commands::token\n##[error]pwned",
    "azure": "##vso[task.setvariable variable=a]b\r##teamcity[buildStatus text='no']",
    "terminal": "\x1b]0;title\x07\x1b[31mred\x1b]8;;http://evil.example\x1b\\link\x1b[2J\x9b31m\x08",
    "directions": "\u202egnp.exe\u2066\u200b\u2028\u2029\ufeff\U000e0041",
    "patch": "a\n--- a/victim\n+++ b/victim\n@@ -1 +1 @@\n-x\n+y",
    "xml": "]]><x/>&\"'\ufffe\uffff\x00\x0b",
    "markup": "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}",
    "markdown": "```\n# title\n@everyone #1 [x](http://evil.example) ![](http://evil.example)",
    "surrogates": "a\udc80\udcff\ud800b",
    "long": "a/" * 30_000,
}
_CODE = re.compile(r"\x1b\[[0-9;]*m")


def unseen(text: str, keep: str = "\n\t") -> set[str]:
    return {c for c in text if unicodedata.category(c) in UNSEEN and c not in keep}


def assert_harmless(text: str, keep: str = "\n\t") -> None:
    assert not unseen(text, keep)
    for line in text.splitlines():
        assert not line.lstrip().startswith("::"), line
        assert not re.search(r"##(\[|vso\[|teamcity\[)", line), line


def planted(value: Any, name: str) -> Any:
    """The document, with the name in place of every text that `filled` has made up."""
    if isinstance(value, dict):
        return {
            (name if key.startswith("train.py:") else key): planted(item, name)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [planted(item, name) for item in value]
    if isinstance(value, str) and value.startswith("layers."):
        return f"{name} {value}"
    return value


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return NAMES[request.param]


@pytest.fixture
def result(name: str) -> Result:
    document = planted(json.loads(filled(Result)), name)
    # As a file would hold it: lone surrogates cannot be in one.
    return from_json(json.dumps(document).encode() if "\ud800" not in name else _without(document))


def _without(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode(errors="replace")


def test_the_text(result: Result) -> None:
    for width in (80, 110):
        assert_harmless(harmless(render_text(result, color=False, width=width), "text"))
    colored = harmless(render_text(result, color=True), "text", codes=True)
    assert "\x1b[" in colored
    assert_harmless(_CODE.sub("", colored))


def test_json(result: Result) -> None:
    text = harmless(to_json(result), "json")
    assert not unseen(text)
    assert json.loads(text) == json.loads(to_json(result))


def test_markdown_and_the_bug_report(result: Result) -> None:
    for text in (render_markdown(result), issue_text(result, ["differs"], ["dropped"])):
        assert_harmless(harmless(text, "markdown"), "\n\t\u2060")
        assert "@everyone" not in re.sub(r"(?s)(`{3,}).*?\1", "", text)  # code mentions nobody


def test_the_pages(result: Result) -> None:
    pages = [render_html(result), render_comparison_html(compare(result, result, ("a", "b")))]
    for page in pages:
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        assert not unseen(page)


def test_a_comparison(result: Result, name: str) -> None:
    found = compare(result, result, (name, name))
    assert_harmless(harmless(render_comparison_text(found), "text"))
    if "\ud800" not in name:
        assert json.loads(harmless(comparison_json(found), "json"))
    assert "<script>alert" not in render_comparison_html(found)


@pytest.mark.parametrize("style", RENDERINGS)
def test_the_forms_of_check(style: str, result: Result) -> None:
    ruling = judge(result, Policy(any=True, max_cost_of={"RS001": 0.0}, max_recompute=0.0))
    text = harmless(RENDERINGS[style](ruling), style)
    if style in ("json", "sarif"):
        assert not unseen(text)
        assert json.loads(text)
    elif style == "junit":
        assert ElementTree.fromstring(text).tag == "testsuites"
        assert not unseen(text)
    elif style == "github":
        for line in text.splitlines():
            assert re.match(r"::(error|warning) [^\r]*::|recompute-scan check: ", line), line
            assert "##[" not in line
        assert not unseen(text)
    else:
        assert_harmless(text)


def test_errors_are_a_line_each(name: str) -> None:
    error = InputError("E301", f"Cannot read {name}.", why=name, hint=name)
    told = printable(str(error))
    assert_harmless(told)
    assert [line[:5] for line in told.splitlines()] == ["Canno", "why: ", "try: "]


FILE_NAMES = {
    key: text.replace("/", "|").replace("\0", "").encode("utf-8", "ignore").decode()[:80]
    for key, text in NAMES.items()
    if key != "surrogates"
} | {"surrogates": "a\udc80\udcffb", "dashes": "--x\n::error::y"}


@pytest.fixture(params=FILE_NAMES)
def file_name(request: pytest.FixtureRequest) -> str:
    return FILE_NAMES[request.param]


# What is wrong with a file, as each command may find it.
WRONG = {
    "nothing": b"", "text": b"no json", "cut": b'{"traceEvents": [{"ph": "X"',
    "other": b'{"traceEvents": []}', "zip": b"PK\x03\x04 no archive",
    "result": b'{"schema": "recompute-scan/999"}', "pickle": b"\x80\x04cos\nsystem\n.",
    "database": b"SQLite format 3\0" + b"x" * 100,
}  # fmt: skip


@pytest.mark.parametrize("content", WRONG)
def test_no_error_holds_a_name_as_it_is(
    content: str, file_name: str, inside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = {"pickle": ".pickle", "database": ".sqlite"}
    below = inside / f"in {file_name}"
    below.mkdir()
    file = below / f"{file_name}{ends.get(content, '.json')}"
    file.write_bytes(WRONG[content])
    archive = inside / "t.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr(f"{file_name}.json".encode(errors="replace").decode(), WRONG[content])
    for arguments in (
        *(["analyze", str(one)] for one in (file, below, archive, f"{file}.gone")),
        *(["check", "--format", "github", str(one)] for one in (file, archive)),
        *(["check", "--baseline", str(file), str(TRACE), "--format", style] for style in ("text",)),
        ["compare", str(file), str(below)],
        ["bundle", str(file), "-o", str(inside / f"{file_name}.zip")],
        *(["report", str(file)], ["report", str(below)]),
        *(["lint", f"{file}.gone"], ["lint", str(below)], ["analyze", f"--{file_name}"]),
        *(["explain", f"{file}.gone"], ["analyze", str(TRACE), "--output", str(file)]),
    ):
        main(arguments)
        printed = capfd.readouterr()
        assert "[E7" not in printed.err, arguments[0]
        for text in (printed.out, printed.err):
            assert_harmless(text)


def test_lint_of_files_with_such_names(file_name: str, inside: Path, capsys: Output) -> None:
    (inside / f"{file_name}.py").write_text(DOUBLED)
    for style in ("text", "json", "sarif", "junit", "github"):
        main(["lint", ".", "--format", style])
        text = capsys.readouterr().out
        assert not unseen(text)
        if style in ("json", "sarif"):
            assert json.loads(text)
        elif style == "junit":
            assert ElementTree.fromstring(text).tag == "testsuites"
        elif style == "github":
            assert all(
                re.match(r"::(error|warning|notice) |recompute", one) for one in text.splitlines()
            )
        else:
            assert_harmless(text)


def test_a_patch_changes_the_file_that_it_names(
    file_name: str, inside: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    if shutil.which("git") is None:
        pytest.skip("git reads patches")
    (inside / "victim").write_text("x\n")
    target = inside / f"{file_name}.py"
    target.write_text(DOUBLED)
    main(["lint", ".", "--diff"])
    patch = capfdbinary.readouterr().out
    assert patch
    done = subprocess.run(["git", "apply", "-"], cwd=inside, input=patch, capture_output=True)
    assert done.returncode == 0, (patch, done.stderr)
    assert target.read_text() != DOUBLED
    assert (inside / "victim").read_text() == "x\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/train.py", "a/train.py"),
        ("a/my train.py", "a/my train.py\t"),
        ("a/x\ny", '"a/x\\012y"'),
        ('a/"\\', '"a/\\"\\\\"'),
        ("a/\udc80", '"a/\\200"'),
        ("a/\u202e", '"a/\\342\\200\\256"'),
        ("a/ä", "a/ä"),
    ],
)
def test_names_in_patches(name: str, expected: str) -> None:
    assert patch_name(name) == expected


def test_names_in_a_trace_and_its_run_record(
    name: str, inside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Operators, kernels, ranges, modules, call sites, the script's own words."""
    document = json.loads(gzip.decompress((TRACE / "trace-rank0.json.gz").read_bytes()))
    for event in document["traceEvents"]:
        text = event.get("name", "")
        if text.startswith("recompute_scan.region?"):
            event["name"] = re.sub(r"(module|site|function)=[^&]*", rf"\1={_url(name)}", text)
        elif event.get("cat") == "user_annotation" and "ProfilerStep" not in text:
            event["name"] = text + name
    info = json.loads((TRACE / "run-rank0.json").read_bytes())
    info["message"] = info["script"] = name
    info["environment"] = dict.fromkeys(info.get("environment", {}), name) | {name: name}
    own = inside / "own"
    own.mkdir()
    (own / "trace-rank0.json").write_text(json.dumps(document))
    (own / "run-rank0.json").write_text(json.dumps(info))
    for arguments in (
        *(["analyze", "own", "--format", style] for style in ("text", "markdown", "json")),
        *(["check", "own", "--format", style] for style in RENDERINGS if style != "github"),
        *(["compare", "own", "own"], ["bundle", "own", "--show"]),
    ):
        main(arguments)
        printed = capfd.readouterr()
        assert "[E7" not in printed.err, printed.err
        for text in (printed.out, printed.err):
            assert_harmless(text, "\n\t\u2060")


def _url(name: str) -> str:
    return quote(name[:500], errors="replace", safe="").replace("\\", "\\\\")
