"""The linter's answers, and what it makes of hostile files."""

import json
import os
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from recompute_scan.cli import cli, main
from recompute_scan.cli.show import titles
from recompute_scan.lint import lint
from recompute_scan.lint.rules import RULES
from recompute_scan.project_file import lint_settings
from tests.lint.cases import CASES, FOUND, FRAMEWORKS, HELD_OUT, Case, answer

DOUBLED = next(case for case in CASES if case.codes == ("RS601",)).files["train.py"]


@pytest.mark.parametrize(
    "case", (*CASES, *FRAMEWORKS, *HELD_OUT, *FOUND), ids=lambda case: case.name
)
def test_known_truths(case: Case, tmp_path: Path) -> None:
    assert answer(case, tmp_path) == case.codes


def test_enough_of_each() -> None:
    assert {code for case in CASES for code in case.codes} == set(RULES)
    assert sum(not case.codes for case in CASES) >= 12


def test_every_rule_has_its_page() -> None:
    names = titles()
    assert {code: names[code] for code in RULES} == {c: name for c, (name, _) in RULES.items()}


def test_the_finding_is_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DOUBLED)
    (found,) = lint([tmp_path]).found
    assert "gradient_checkpointing_enable" in DOUBLED.splitlines()[found.line - 1]


@pytest.mark.parametrize(
    ("comment", "kept"),
    [
        ("# recompute-scan: ignore[RS601] measured, wanted", 0),
        ("# recompute-scan: ignore known", 0),
        ("# recompute-scan: ignore[RS601] \u200b", 1),
        ("# recompute-scan: ignore[*] another", 1),
    ],
)
def test_suppression_needs_a_reason(comment: str, kept: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DOUBLED.rstrip("\n") + f"  {comment}\n")
    report = lint([tmp_path])
    assert (len(report.found), len(report.suppressed)) == (kept, 1 - kept)


@pytest.mark.parametrize("style", ["text", "json", "github", "sarif", "junit"])
def test_formats(style: str, tmp_path: Path) -> None:
    file = tmp_path / "tr\n::error::ain.py"
    file.write_text(DOUBLED)
    result = CliRunner().invoke(cli, ["lint", str(file), "--format", style], standalone_mode=False)
    assert result.return_value == 1
    assert "RS601" in result.output
    assert "\n::error::ain" not in result.output
    if style in ("json", "sarif"):
        json.loads(result.output)
    elif style == "junit":
        assert ElementTree.fromstring(result.output).find(".//failure") is not None


_SWITCHES = b"def f(m):\n    m.gradient_checkpointing_enable()\n    if m: return\n"
_BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("bomb.yaml", _BOMB.encode()),
        ("self.yaml", b"a: &a [*a]\n"),
        ("deep.yaml", b"[" * 5000),
        ("deep.json", b"[" * 50_000),
        ("deep.py", b"(" * 5000),
        ("deep2.py", b"x = " + b"-" * 50_000 + b"1"),
        ("binary.py", b"\0\1\2"),
        ("odd.json", b"\xff\xfe"),
        ("odd.toml", b"= 1"),
        ("tag.yaml", b"!!python/object/apply:os.system [x"),
        ("large.yaml", b"a: 1\n" * 100_000),
        ("many.py", _SWITCHES * 1500 + b"f(model)\n" * 1500),
    ],
)
def test_hostile_files_are_not_read(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    report = lint([tmp_path / name])
    assert report.status == 4
    assert [Path(file).name for file, _ in report.unread] == [name]


def test_an_odd_value_is_no_variant(tmp_path: Path) -> None:
    odd = "model.gradient_checkpointing_enable({'use_reentrant': []})\n" * 2
    (tmp_path / "odd.py").write_text(odd)
    assert lint([tmp_path / "odd.py"]).status == 0


def test_no_line_is_looked_for_that_nobody_asks_for(tmp_path: Path) -> None:
    """A walk through the text for each key took 29 s of this file, and takes 0.2 s without."""
    (tmp_path / "keys.json").write_text(json.dumps({f"k{i}": {"x": i} for i in range(9_000)}))
    began = time.process_time()
    assert lint([tmp_path / "keys.json"]).status == 0
    assert time.process_time() - began < 8


def test_odd_files_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self.py").symlink_to(tmp_path / "self.py")
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "odd.sh").write_text(
        "python 'open\naccelerate launch --config_file /dev/zero x.py\n"
    )
    (tmp_path / "tag.yaml").write_text("a: !!python/object/apply:os.abort []\n")
    assert lint([tmp_path]).status == 0
    (tmp_path / "found.py").write_text(DOUBLED)
    named = lint([tmp_path / "pipe.py", tmp_path / "self.py", tmp_path / "found.py"])
    assert [path for path, _ in named.undecided] == [
        str(tmp_path / "pipe.py"),
        str(tmp_path / "self.py"),
    ]
    assert [one.code for one in named.found] == ["RS601"]


_DOUBLED_FORM_FEED = DOUBLED.replace("\nmodel = ", '\n\f\nnote = "a\u2028b\x85c"\nmodel = ', 1)


def test_lines_are_those_that_python_counts(inside: Path) -> None:
    (inside / "train.py").write_text(_DOUBLED_FORM_FEED, encoding="utf-8")
    printed = CliRunner().invoke(cli, ["lint", "--diff", "train.py"]).stdout
    removed = [line for line in printed.split("\n") if line.startswith("-")]
    assert len(removed) == 2
    assert "gradient_checkpointing_enable" in removed[1]


def test_a_comment_behind_a_form_feed_accepts_its_line(tmp_path: Path) -> None:
    text = _DOUBLED_FORM_FEED.rstrip("\n") + "  # recompute-scan: ignore[RS601] measured\n"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    report = lint([tmp_path])
    assert (len(report.found), len(report.suppressed), report.unused) == (0, 1, ())


def test_a_source_in_another_encoding(inside: Path) -> None:
    text = "# coding: latin-1\n" + DOUBLED + "caf\xe9 = 1\rcafe = 2\n"
    (inside / "train.py").write_bytes(text.encode("latin-1"))
    assert [found.code for found in lint([inside]).found] == ["RS601"]
    patch = CliRunner().invoke(cli, ["lint", "--diff", "train.py"]).stdout_bytes
    subprocess.run(["patch", "-p1", "--binary"], input=patch, check=True, capture_output=True)
    before, after = (
        one.splitlines() for one in (text.encode("latin-1"), (inside / "train.py").read_bytes())
    )
    (gone,) = (line for line in before if line not in after)
    before.remove(gone)
    assert after == before


@pytest.mark.parametrize("encoding", ["base64_codec", "undefined", "idna"])
def test_one_file_in_no_encoding_of_text_costs_the_others_nothing(
    encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.py").write_text(f"# coding: {encoding}\nx = 'café..'\n", encoding="utf-8")
    (tmp_path / "train.py").write_text(DOUBLED, encoding="utf-8")
    assert main(["lint", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "train.py" in said.out
    assert encoding in said.out + said.err


def test_lines_of_yaml_are_those_of_an_editor(tmp_path: Path) -> None:
    text = "a: 'x\u2028y'\nb: '\x85'\ndistributed:\n  activation_checkpointing: true\n"
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    (one,) = lint([tmp_path]).switched_on
    assert one.line == 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chain.py", "a=" * 20_000 + "f(" + "b," * 20_000 + ")\n"),
        ("noqa.py", "".join(f"from x.y{i} import Z{i}  # noqa: E501\n" for i in range(4_000))),
        ("dotted.py", "import " + "a." * 100_000 + "b\n"),
        ("values.py", "x = f'" + "{a}" * 150_000 + "'\n"),
        ("array.sh", "A=(\n" + "a\n" * 40_000),
        ("words.sh", "A=" + "a " * 40_000 + "\n" + "python $A\n" * 5_000),
        ("same.sh", "python train.py --config_file big.yaml\n" * 2_000),
        ("dotted.toml", "a" + ".a" * 100_000 + "=1\n"),
        ("quoted.toml", '"a"' + '."a"' * 60_000 + "=1\n"),
        ("deep.toml", "a = " + "[" * 50_000),
        ("blank.toml", "\n" * 200_000 + "a = 1\n"),
        ("levels.yaml", "[" * 300 + "a," * 200_000),
        ("escape.yaml", '"\\Uffffffff"\n'),
    ],
)
def test_what_is_read_is_read_in_time(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text(DOUBLED)
    (tmp_path / "big.yaml").write_text("".join(f"k{i}: {i}\n" for i in range(3_000)))
    began = time.process_time()
    # One bad file does not end the answer for the others.
    assert "RS601" in {found.code for found in lint([tmp_path]).found}
    assert time.process_time() - began < 12


def test_a_pipe_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "requirements.txt")
    os.mkfifo(tmp_path / "pyproject.toml")
    (tmp_path / "train.py").write_text(DOUBLED)
    report = lint([tmp_path], lint_settings(tmp_path))
    assert [found.code for found in report.found] == ["RS601"]


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    for folder in ("inside", "outside"):
        (tmp_path / folder).mkdir()
    (tmp_path / "outside" / "secret.yaml").write_text("gradient_checkpointing: true\n")
    (tmp_path / "inside" / "a.yaml").write_text("a: 1\n")
    (tmp_path / "inside" / "link.yaml").symlink_to(tmp_path / "outside" / "secret.yaml")
    (tmp_path / "inside" / "own.yaml").symlink_to(tmp_path / "inside" / "a.yaml")
    report = lint([tmp_path / "inside"])
    assert (report.read, report.switched_on) == (2, ())


def test_a_folder_without_anything_to_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert main(["lint", str(tmp_path)]) == 2
    assert "[E238]" in capsys.readouterr().err
