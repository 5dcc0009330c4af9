"""What is replaced is put back exactly, and nobody waits for imports in vain."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recompute_scan.record.isolation import Patches, after_import


class Base:
    @staticmethod
    def plain() -> str:
        return "plain"

    def method(self) -> str:
        return "method"


class Child(Base):
    pass


def test_entries_come_back_as_they_were_own_or_inherited() -> None:
    before = dict(vars(Base))
    patches = Patches()
    patches.replace(Base, "plain", staticmethod(lambda: "ours"))
    patches.replace(Base, "plain", staticmethod(lambda: "ours again"))
    patches.replace(Child, "method", lambda _: "ours")
    assert (Base.plain(), Child().method()) == ("ours again", "ours")
    patches.undo()
    assert all(vars(Base)[name] is value for name, value in before.items())
    assert "method" not in vars(Child)


def test_what_somebody_else_put_over_ours_stays() -> None:
    patches, owner = Patches(), ModuleType("owner")
    owner.name = "before"  # type: ignore[attr-defined]
    patches.replace(owner, "name", "ours")
    owner.name = "theirs"  # type: ignore[attr-defined]
    patches.undo()
    assert owner.name == "theirs"


def test_ours_may_be_put_back_in_any_order() -> None:
    owner = ModuleType("owner")
    owner.name = "before"  # type: ignore[attr-defined]
    first, second, third = Patches(), Patches(), Patches()
    for patches, value in ((first, "one"), (second, "two"), (third, "three")):
        patches.replace(owner, "name", value)
    second.undo()
    first.undo()
    assert owner.name == "three"
    third.undo()
    assert owner.name == "before"


def test_a_hook_is_called_at_the_import_unless_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "waited_for_by_a_test.py").write_text("")
    called: list[Any] = []
    after_import("waited_for_by_a_test", lambda _: called.append("first"))
    stop = after_import("waited_for_by_a_test", lambda _: called.append("second"))
    after_import("waited_for_by_a_test", lambda _: called.append("third"))
    stop()
    module = __import__("waited_for_by_a_test")
    assert called == ["first", "third"]
    stop()
    after_import("waited_for_by_a_test", called.append)  # it is there already
    assert called[2:] == [module]
    del sys.modules["waited_for_by_a_test"]
