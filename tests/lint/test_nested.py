"""Checkpoints inside others: what is said, and what is counted by running the same programs."""

import runpy
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from recompute_scan.lint import lint
from tests.lint.cases import Case, answer
from tests.lint.nested_cases import NESTED


@pytest.mark.parametrize("case", NESTED, ids=lambda case: case.name)
def test_what_is_said(case: Case, tmp_path: Path) -> None:
    assert answer(case, tmp_path) == case.codes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", NESTED, ids=lambda case: case.name)
def test_what_is_counted(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, again = Counter[int](), Counter[int]()
    inside: list[int] = []
    call, backward = torch.nn.Module.__call__, torch.Tensor.backward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, torch.nn.Linear):
            (again if inside else forward)[id(self)] += 1
        return call(self, *args, **kwargs)

    def marked(*args: Any, **kwargs: Any) -> None:
        inside.append(1)
        backward(*args, **kwargs)
        inside.pop()

    for name, text in case.files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(torch.nn.Module, "__call__", counted)
    monkeypatch.setattr(torch.Tensor, "backward", marked)
    monkeypatch.syspath_prepend(str(tmp_path))
    runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    for name in ("layers_of_it", "model_of_it"):
        sys.modules.pop(name, None)
    most = max(again[part] / runs for part, runs in forward.items())
    assert (most >= 2) == (case.codes == ("RS601",))


def _doubled() -> str:
    return next(iter(NESTED[0].files.values()))


@pytest.mark.parametrize(
    ("old", "new", "codes"),
    [
        ("check_fn=lambda m: isinstance(m, Block)", "check_fn=chosen", ("RS602",)),
        ("model = Model()\n", "model = Model() if given else load()\n", ("RS602",)),
        ("apply_activation", "if args.wrap:\n    apply_activation", ("RS602",)),
        (
            "        return checkpoint(self.inner",
            "        if args.wrap:\n            return self.inner(x)\n"
            "        return checkpoint(self.inner",
            ("RS602",),
        ),
    ],
)
def test_what_is_not_known_is_not_certain(
    old: str, new: str, codes: tuple[str, ...], tmp_path: Path
) -> None:
    text = _doubled()
    assert text.count(old) >= 1
    chosen = "count = 0\ndef chosen(m):\n    return isinstance(m, Block) and pick(m)\n"
    (tmp_path / "train.py").write_text(
        chosen + text[: text.rindex(old)] + new + text[text.rindex(old) + len(old) :]
    )
    assert tuple(found.code for found in lint([tmp_path]).found) == codes


def test_arms_that_exclude_each_other_are_none(tmp_path: Path) -> None:
    text = _doubled().replace(
        "apply_activation_checkpointing(model",
        "if not args.own:\n    apply_activation_checkpointing(model",
    )
    text = text.replace(
        "        return checkpoint(self.inner",
        "        if not args.own:\n            return self.inner(x)\n"
        "        return checkpoint(self.inner",
    )
    (tmp_path / "train.py").write_text(text)
    assert not lint([tmp_path]).found


def test_what_wraps_a_copy_wraps_the_copy(tmp_path: Path) -> None:
    old = "apply_activation_checkpointing(model"
    new = "import copy\nother = copy.deepcopy(model)\napply_activation_checkpointing(other"
    (tmp_path / "train.py").write_text(_doubled().replace(old, new))
    assert not lint([tmp_path]).found


def test_what_calls_itself_ends(tmp_path: Path) -> None:
    wide = "\n".join(f"def f{n}(m):\n    f{n + 1}(m)\n    return f{n + 1}(m)" for n in range(200))
    text = _doubled() + wide + "\ndef f200(m):\n    f0(m)\n    apply_activation_checkpointing(m)\n"
    (tmp_path / "train.py").write_text(text)
    began = time.process_time()
    assert "RS601" in {found.code for found in lint([tmp_path]).found}
    assert time.process_time() - began < 20
