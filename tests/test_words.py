"""What the command line says to what it does not know: the nearest thing, and nothing is left."""

from pathlib import Path

import pytest

from recompute_scan.cli import main
from recompute_scan.findings.registry import RULES
from recompute_scan.frameworks.detect import NAMES
from recompute_scan.lint.rules import RULES as LINT_RULES

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--step", "5", "x.py"), "No such option '--step'. Did you mean '--steps'?"),
        (("--stps=5", "x.py"), "No such option '--stps'. Did you mean '--steps'?"),
        (("-x", "x.py"), "No such option '-x'."),
        (("absent.py",), "Cannot open the script absent.py. [E202]"),
        (("-",), "Cannot open the script -. [E202]"),
        (("--verify", "absent.py"), "Cannot open the script absent.py. [E202]"),
        (("--nproc-per-node", "2", "absent.py"), "Cannot open the script absent.py. [E202]"),
        (("--", "absent"), "There is neither a script nor a launcher named absent. [E202]"),
        (("--", "--steps"), "There is neither a script nor a launcher named --steps. [E202]"),
    ],
)
def test_run(inside: Path, capsys: Output, words: tuple[str, ...], said: str) -> None:
    assert main(["run", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(inside.iterdir())


def test_explain_lists_every_finding(capsys: Output) -> None:
    assert main(["explain"]) == 0
    printed = capsys.readouterr().out.splitlines()
    listed = dict(line.split("  ") for line in printed if line.startswith("RS"))
    linted = {code: name for code, (name, _) in LINT_RULES.items()}
    assert listed == {rule.code: rule.name for rule in RULES} | NAMES | linted


def test_explain_names_codes_that_are_spelt_alike(capsys: Output) -> None:
    assert main(["explain", "rs910"]) == 2
    said = capsys.readouterr().err
    assert "There is no finding RS910." in said
    assert "RS210" in said


def test_nothing_to_read_is_an_error(inside: Path, capsys: Output) -> None:
    (inside / "folder").mkdir()
    (inside / "train.py").write_text('"""A script."""\n')
    (inside / "empty.log").write_text("")
    assert main(["lint", "folder"]) == 2
    assert "There is nothing to read in folder. [E238]" in capsys.readouterr().err
    assert main(["lint", "mistyped.py"]) == 3
    assert "Cannot read mistyped.py. [E301]" in capsys.readouterr().err
    assert main(["explain", "empty.log"]) == 2
    assert "There is nothing to read in empty.log. [E238]" in capsys.readouterr().err
    assert main(["analyze", "train.py"]) == 2
    said = capsys.readouterr().err
    assert "train.py is a Python script, not a trace. [E239]" in said
    assert "recompute-scan run records it" in said
