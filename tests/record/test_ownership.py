"""Whose code a frame runs, by where its file lies and what the program was started from."""

import importlib.machinery
import sys
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import torch

from recompute_scan.record.attribution import CallSites, Owner, is_library

SITE = "lib/python3/site-packages"


def frame_of(file: Path | str, module: str = "__main__") -> FrameType:
    """A frame whose code has this file and module."""
    scope = {"__name__": module, "sys": sys}
    exec(compile("frame = sys._getframe()", str(file), "exec"), scope)
    frame = scope["frame"]
    assert isinstance(frame, FrameType)
    return frame


def started(monkeypatch: pytest.MonkeyPatch, file: Path, name: str = "") -> ModuleType:
    """A program that was started from this file, or from the module of that name."""
    main = ModuleType("__main__")
    main.__file__ = str(file)
    main.__spec__ = importlib.machinery.ModuleSpec(name, None) if name else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


def written(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    ("file", "module", "owner"),
    [
        ("train.py", "__main__", Owner.USER),
        ("pkg/net.py", "pkg.net", Owner.USER),
        (f".venv/{SITE}/somelib/net.py", "somelib.net", Owner.LIBRARY),
        ("/usr/lib/python3/dist-packages/somelib/net.py", "somelib.net", Owner.LIBRARY),
        ("third_party/somelib/net.py", "somelib.net", Owner.COPY),
        ("libs/vendor/net.py", "vendor.net", Owner.COPY),
        ("<string>", "__main__", Owner.NOBODY),
        ("<ipython-input-3-abc>", "__main__", Owner.USER),
        (torch.utils.checkpoint.__file__, "torch.utils.checkpoint", Owner.NOBODY),
        (sys.modules["contextlib"].__file__, "contextlib", Owner.NOBODY),
    ],
)
def test_where_the_file_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, module: str, owner: Owner
) -> None:
    started(monkeypatch, tmp_path / "train.py")
    path = file if file.startswith(("<", "/")) else tmp_path / file
    assert CallSites(tmp_path).owner_of(frame_of(path, module)) == owner


def test_a_repository_inside_the_users_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, tmp_path / "train.py")
    written(tmp_path / ".git" / "HEAD")
    written(tmp_path / "somelib" / ".git")
    assert CallSites(tmp_path).owner_of(frame_of(tmp_path / "somelib/net.py", "net")) == Owner.COPY
    assert CallSites(tmp_path).owner_of(frame_of(tmp_path / "other/net.py", "net")) == Owner.USER


def test_a_framework_is_known_by_its_files_and_not_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, tmp_path / "train.py")
    written(tmp_path / "a/megatron/core/tensor_parallel/random.py")
    theirs = frame_of(tmp_path / "a/megatron/training.py", "megatron.training")
    mine = frame_of(tmp_path / "b/megatron/training.py", "megatron.training")
    assert CallSites(tmp_path).owner_of(theirs) == Owner.COPY
    assert CallSites(tmp_path).owner_of(mine) == Owner.USER


def test_a_folder_that_pip_was_given_as_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, tmp_path / "deps/train.py")
    record = written(tmp_path / "deps/some_lib-1.0.dist-info/RECORD")
    record.write_text("somelib/__init__.py,sha256=x,0\nsomelib/net.py,sha256=y,9\n")
    theirs = frame_of(tmp_path / "deps/somelib/net.py", "somelib.net")
    beside = frame_of(tmp_path / "deps/mine/net.py", "mine.net")
    assert CallSites(tmp_path).owner_of(theirs) == Owner.LIBRARY
    assert CallSites(tmp_path).owner_of(beside) == Owner.USER


@pytest.mark.parametrize("name", ["project.train", "project.__main__"])
def test_the_package_that_was_started_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    started(monkeypatch, tmp_path / SITE / "project/train.py", name)
    sites = CallSites(tmp_path)
    assert sites.owner_of(frame_of(tmp_path / SITE / "project/net.py", "project.net")) == Owner.USER
    assert sites.owner_of(frame_of(tmp_path / SITE / "project/train.py", "__main__")) == Owner.USER
    assert sites.owner_of(frame_of(tmp_path / SITE / "other/net.py", "other.net")) == Owner.LIBRARY


def test_a_framework_that_was_started_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, tmp_path / SITE / "axolotl/cli/train.py", "axolotl.cli.train")
    frame = frame_of(tmp_path / SITE / "axolotl/cli/train.py", "axolotl.cli.train")
    assert CallSites(tmp_path).owner_of(frame) == Owner.LIBRARY


def test_the_package_of_an_installed_command_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = written(tmp_path / "bin/mytrain")
    main = started(monkeypatch, command)
    module = ModuleType("project.cli")
    module.__file__ = str(tmp_path / SITE / "project/cli.py")
    monkeypatch.setitem(sys.modules, "project.cli", module)
    exec("def run(): ...", vars(module))
    vars(main)["run"] = vars(module)["run"]
    sites = CallSites(tmp_path)
    assert sites.owner_of(frame_of(tmp_path / SITE / "project/net.py", "project.net")) == Owner.USER
    assert sites.owner_of(frame_of(command)) == Owner.NOBODY


def test_the_users_line_comes_before_that_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, tmp_path / "train.py")
    sites = CallSites(tmp_path)
    frame = frame_of(tmp_path / "vendor/net.py", "net")
    # Its caller is this test, which is the user's.
    for site in (sites.called_at(frame), sites.switched_on_at(frame)):
        assert site.rpartition(":")[0] == str(Path(__file__))


def test_code_of_a_function_that_is_to_run_in_a_process_of_its_own() -> None:
    assert is_library("torch.utils.checkpoint", torch.utils.checkpoint.__file__)
    assert not is_library("__main__", "/somewhere/train.py")
    assert not is_library("", "")
