"""A script under the recorder sees what it sees under plain Python."""

import atexit
import json
import os
import re
import sys
import zipapp
from pathlib import Path
from typing import Any

import pytest

from recompute_scan.errors import UsageError
from recompute_scan.record import execute
from recompute_scan.record.execute import Exit, run_program
from tests.record.runs import record_target, run_plain, write_script

FACTS = """\
'''A docstring.'''
import json, pickle, sys

class Thing:
    pass

me = sys.modules["__main__"]
print(json.dumps({
    "name": __name__,
    "file": __file__,
    "doc": __doc__,
    "package": __package__,
    "spec": __spec__ and [__spec__.name, __spec__.origin, __spec__.parent],
    "cached": globals().get("__cached__"),
    "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__,
    "globals": sorted(globals()),
    "argv": sys.argv,
    "path": sys.path[0],
    "code": Thing.__module__ + sys._getframe().f_code.co_filename,
    "is_main": me.__dict__ is globals(),
    "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
}))
"""

HEAD = """\
import sys

def deep():
    return deep()

def chained():
    try:
        {}["missing"]
    except KeyError as error:
        raise RuntimeError("second") from error
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for place in ("facts.py", "inner/facts.py", "package/__main__.py", "package/part.py"):
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(FACTS)
    (tmp_path / "package" / "__init__.py").write_text("")
    zipapp.create_archive(tmp_path / "package", tmp_path / "zipped.pyz")
    (tmp_path / "link.py").symlink_to(tmp_path / "inner" / "facts.py")
    return tmp_path


def run_here(
    folder: Path, capsys: pytest.CaptureFixture[str], *command: str
) -> tuple[Exit, str, str]:
    is_module = command[0] == "-m"
    target, *args = command[1:] if is_module else command
    before, main = Path.cwd(), sys.modules["__main__"]
    argv, path = list(sys.argv), list(sys.path)
    os.chdir(folder)
    try:
        outcome = run_program(target, is_module, args)
    finally:
        os.chdir(before)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("package", "bare")]:
            del sys.modules[name]  # the next test has its own
    assert (sys.modules["__main__"], sys.argv, sys.path) == (main, argv, path)
    captured = capsys.readouterr()
    return outcome, captured.out, captured.err


@pytest.mark.parametrize(
    "command",
    [
        ("facts.py",),
        ("facts.py", "--steps", "3", "-m", "x y"),
        ("./facts.py", "a"),
        ("inner/../inner/facts.py",),
        ("{}/inner/facts.py",),
        ("link.py",),
        ("package", "folder"),
        ("zipped.pyz", "a"),
        ("-m", "package", "a"),
        ("-m", "package.part", "--flag"),
        ("-m", "facts"),
    ],
    ids=" ".join,
)
def test_a_program_sees_what_python_shows_it(
    project: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    command = tuple(word.format(project) for word in command)
    plain = run_plain(project, *command)
    assert plain.returncode == 0, plain.stderr

    outcome, out, err = run_here(project, capsys, *command)

    expected: dict[str, Any] = json.loads(plain.stdout)
    assert json.loads(out) == expected
    assert expected["pickled"] is True
    assert (outcome, err) == (Exit("finished", 0), "")


def test_a_spawned_process_finds_the_script_again(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """\
        import multiprocessing

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
        """,
    )
    recorded = record_target(tmp_path, "train.py")
    assert (recorded.status, recorded.stdout) == (0, "[2, 4]\n")


@pytest.mark.parametrize(
    ("body", "ending"),
    [
        ("sys.exit()", "exited"),
        ("sys.exit(0)", "exited"),
        ("sys.exit(3)", "exited"),
        ("sys.exit(256 + 7)", "exited"),
        ("sys.exit('no data')", "exited"),
        ("raise ValueError('broken')", "raised"),
        ("exec('1 +')", "raised"),
        ("x = = 1", "raised"),
        ("deep()", "raised"),
        ("chained()", "raised"),
        ("print('fine')", "finished"),
    ],
)
def test_status_and_standard_error_are_pythons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, ending: str
) -> None:
    write_script(tmp_path, f"{HEAD}\n{body}\n")
    plain = run_plain(tmp_path, "train.py")

    outcome, out, err = run_here(tmp_path, capsys, "train.py")

    assert (outcome.ending, outcome.exit_status) == (ending, plain.returncode)
    # How deep a recursion gets depends on how deep it begins.
    err, expected = (re.sub(r"repeated \d+ more", "repeated", text) for text in (err, plain.stderr))
    assert (out, err) == (plain.stdout, expected)


@pytest.mark.parametrize("handler", ["sys.exit(1)", "raise OSError", "raise OSError from None"])
def test_what_a_script_makes_of_our_end_of_it_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], handler: str
) -> None:
    stops = "from recompute_scan.record.execute import StopRecording\nraise_ = StopRecording(0)"
    body = f"import sys\n{stops}\ntry:\n    raise raise_\nexcept:\n    {handler}\n"
    write_script(tmp_path, body)
    outcome, _, err = run_here(tmp_path, capsys, "train.py")
    assert (outcome.ending, outcome.exit_status, err) == ("stopped", 0, "")


def test_an_error_in_an_import_of_the_module_is_the_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "package").mkdir()
    write_script(tmp_path, "import not_there_at_all\n", "package/__init__.py")
    write_script(tmp_path, "", "package/part.py")
    outcome, _, err = run_here(tmp_path, capsys, "-m", "package.part")
    assert outcome == Exit("raised", 1, "ModuleNotFoundError: No module named 'not_there_at_all'")
    assert "package/__init__.py" in err
    assert "recompute_scan" not in err


def test_an_interrupt_is_130(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_script(tmp_path, "raise KeyboardInterrupt\n")
    outcome, _, err = run_here(tmp_path, capsys, "train.py")
    assert outcome == Exit("interrupted", 130)
    assert err.count("File ") == err.count("train.py") == 1


def test_python_imports_and_opens_again_behind_a_script_that_had_it_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clears = "sys.path_hooks.clear()\nsys.path_importer_cache.clear()\nsys.meta_path[0] = None"
    clears += "\nsys.modules['re'] = sys.modules['colorsys'] = None"
    write_script(tmp_path, f"import builtins, os, sys\n{clears}\nbuiltins.open = os.stat = None\n")
    assert run_here(tmp_path, capsys, "train.py")[0].exit_status == 0
    lists = sys.path_hooks.__setitem__, sys.meta_path.__setitem__
    for function in (execute._put, sys.modules.update, *lists):
        atexit.unregister(function)  # or the script's would be back where the tests end
    assert __import__("re").escape(__import__("colorsys").__name__) == "colorsys"
    (tmp_path / "found_again.py").write_text("number = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert __import__("found_again").number == 7
    assert callable(open)


@pytest.mark.parametrize(
    ("command", "code", "what"),
    [
        (("absent.py",), "E202", "Cannot open the script absent.py."),
        (("empty",), "E202", "There is no __main__.py in empty."),
        (("-m", "absent_module"), "E203", "There is no module named absent_module."),
        (("-m", "absent.part"), "E203", "There is no module named absent.part."),
        (("-m", "bare"), "E203", "There is no module named bare.__main__."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_program_that_is_not_there(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    code: str,
    what: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    write_script(tmp_path, "", "bare/__init__.py")
    with pytest.raises(UsageError) as caught:
        run_here(tmp_path, capsys, *command)
    assert (caught.value.code, caught.value.what) == (code, what)
