"""The fixtures, in a test file of a model's own repository."""

import re
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.record.runs import run_plain

MODEL = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x, times=0):
        if times == 0:
            return x + self.body(x)
        return checkpoint(self.forward, x, times - 1, use_reentrant=True)


class Noisy(Block):
    def __init__(self):
        super().__init__()
        self.body.append(nn.Dropout(0.5))


def noisy_step(keep):
    blocks = nn.ModuleList(Noisy() for _ in range(3))
    x = torch.randn(4, 32, requires_grad=True)

    def train():
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False, preserve_rng_state=keep)
        y.square().sum().backward()

    return train


def step(times):
    blocks = nn.ModuleList(Block() for _ in range(3))
    x = torch.randn(4, 32, requires_grad=True)

    def train():
        y = x
        for block in blocks:
            y = block(y, times)
        y.sum().backward()

    return train
"""
TESTS = """
from model import noisy_step, step


def test_repaired(assert_no_redundant_recompute):
    assert_no_redundant_recompute(step(1))


def test_plain(assert_no_redundant_recompute):
    assert_no_redundant_recompute(step(0), max_recompute=0)


def test_doubled(assert_no_redundant_recompute):
    assert_no_redundant_recompute(step(2))


def test_any_recompute_where_none_is_wanted(assert_no_redundant_recompute):
    assert_no_redundant_recompute(step(1), max_recompute=0)


def test_nothing_to_see(assert_no_redundant_recompute):
    assert_no_redundant_recompute(lambda: None)


def test_dropout_with_its_state(assert_recompute_is_faithful):
    assert_recompute_is_faithful(noisy_step(True))


def test_dropout_without_its_state(assert_recompute_is_faithful):
    assert_recompute_is_faithful(noisy_step(False))


def test_a_step_that_fails(assert_no_redundant_recompute):
    assert_no_redundant_recompute(lambda: 1 / 0)
"""


@pytest.mark.slow
def test_in_a_project_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "test_model.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    begin = time.monotonic()
    # Whether this environment knows the entry point is not the question here.
    command = ("-m", "pytest", "-q", "-p", "recompute_scan.pytest_plugin")
    done = run_plain(tmp_path, *command, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    printed = done.stdout
    assert "5 failed, 3 passed" in printed, printed + done.stderr
    for name in (
        "doubled",
        "any_recompute_where_none_is_wanted",
        "nothing_to_see",
        "dropout_without_its_state",
    ):
        assert f"FAILED test_model.py::test_{name}" in printed
    assert "refused: RS001" in printed
    assert "refused: RS401" in printed
    assert "model.py:15" in printed
    assert "undecided: " in printed
    assert "ZeroDivisionError" in printed
    assert time.monotonic() - begin < 60


def test_the_entry_point_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (declared,) = re.findall(r'entry-points.pytest11\]\n\w+ = "([\w.]+)"', text)
    plugin = EntryPoint("recompute_scan", declared, "pytest11").load()
    assert hasattr(plugin, "assert_no_redundant_recompute")
    assert hasattr(plugin, "assert_recompute_is_faithful")
