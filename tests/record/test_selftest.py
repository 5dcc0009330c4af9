"""A torch that calls something else than what is replaced is found out before the script runs."""

import inspect
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper_module

import recompute_scan as rs
from recompute_scan.record import checkpoint_calls, torch_versions
from recompute_scan.record.checkpoint_calls import Probe
from tests.present import present


def install(folder: Path) -> Probe:
    probe = Probe(folder)
    try:
        checkpoint_calls.install_self_test(probe)
    finally:
        probe.remove()
    return probe


def hide_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 did: what is replaced remains, and `checkpoint` calls another."""
    name = present(torch_versions.generator_name())
    original = getattr(torch_checkpoint, name)
    monkeypatch.setattr(torch_checkpoint, "_another_generator", original, raising=False)
    called = inspect.unwrap(torch_checkpoint.checkpoint)
    home = getattr(torch_checkpoint, "_checkpoint_impl", called)
    code = home.__code__
    names = tuple("_another_generator" if one == name else one for one in code.co_names)
    monkeypatch.setattr(home, "__code__", code.replace(co_names=names))


class OtherFunction(torch_checkpoint.CheckpointFunction):
    """An autograd function with a forward of its own."""

    @staticmethod
    def forward(ctx: Any, function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        with torch.no_grad():
            return function(*args)


def hide_function(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = OtherFunction.apply
    monkeypatch.setattr(torch_checkpoint.CheckpointFunction, "apply", apply)


def test_this_torch_is_caught(tmp_path: Path) -> None:
    assert checkpoint_calls.uncaught(checkpoint_calls._direct()) == ()
    assert checkpoint_calls.uncaught(checkpoint_calls._wrappers(wrapper_module)) == ()
    probe = install(tmp_path)
    assert probe.warnings == []
    assert probe.entered == {}
    assert probe.sites.sources() == {}


def remove_both(monkeypatch: pytest.MonkeyPatch) -> None:
    name = present(torch_versions.generator_name())
    monkeypatch.delattr(torch_checkpoint, name)
    monkeypatch.delattr(torch_checkpoint, "CheckpointFunction")


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (hide_generator, "cannot see calls of some checkpoints: non-reentrant."),
        (hide_function, "cannot see calls of some checkpoints: reentrant."),
        (remove_both, "calls of some checkpoints: reentrant, non-reentrant."),
    ],
)
def test_what_is_not_called_or_not_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    kinds: str,
) -> None:
    change(monkeypatch)
    (warning,) = install(tmp_path).warnings
    assert kinds in warning


@pytest.mark.parametrize("torchs", [True, False])
def test_a_wrapper_that_calls_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchs: bool
) -> None:
    def own(function: Any, *args: Any, **settings: Any) -> Any:
        assert torchs, "what the script put in torch's place is not called"
        return function(*args)

    own.__module__ = "torch.utils.another" if torchs else __name__
    monkeypatch.setattr(wrapper_module, "torch_utils_checkpoint", own)
    said = "".join(install(tmp_path).warnings)
    assert ("checkpoint_wrapper, REENTRANT" in said) is torchs
    assert ("checkpoint_wrapper, NO_REENTRANT" in said) is torchs
    assert bool(said) is torchs


def test_a_generator_with_other_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impl(call: Any, **settings: Any) -> Any:
        raise AssertionError

    def checkpoint(function: Any, *args: Any, use_reentrant: bool, **settings: Any) -> Any:
        if use_reentrant:
            return torch_checkpoint.CheckpointFunction.apply(function, True, *args)
        return getattr(torch_checkpoint, name)(function, call=(args, settings))

    name = "_checkpoint_without_reentrant_generator_impl"
    monkeypatch.setattr(torch_checkpoint, name, impl, raising=False)
    monkeypatch.setattr(torch_checkpoint, "checkpoint", checkpoint)
    (warning,) = install(tmp_path).warnings
    assert "calls of some checkpoints: non-reentrant." in warning


def test_checkpoints_of_other_threads_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(_: object) -> None:
        x = torch.ones(2, requires_grad=True)
        for reentrant in (False, True):
            y = torch_checkpoint.checkpoint(torch.sin, x, use_reentrant=reentrant)
            assert torch.equal(y, torch.sin(x))
        done.append(True)

    done: list[bool] = []
    assert checkpoint_calls.uncaught({"none": meanwhile}) == ("none",)
    assert done == [True]


def train(step: Any, folder: Path) -> rs.Scan:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        for _ in range(3)
    )
    sgd = torch.optim.SGD(layers.parameters(), lr=1e-3)
    with rs.record(steps=2, warmup=1, timing_steps=0, folder=folder) as recording:
        while not recording.done:
            x = torch.ones(4, 8, requires_grad=True)
            for layer in layers:
                x = step(layer, x)
            x.sum().backward()
            sgd.step()
            sgd.zero_grad()
            recording.step()
    return recording.scan


def once(layer: torch.nn.Module, x: Tensor) -> Any:
    return torch_checkpoint.checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize("hidden", [False, True])
def test_the_answer_falls_back_to_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    if hidden:
        hide_generator(monkeypatch)
    result = train(once, tmp_path / "run").result
    assert result.recompute_per_backward == 1.0
    assert [finding.code for finding in result.findings if finding.code == "RS003"] == []
    said = [text for text in result.warnings if "cannot see calls" in text]
    assert bool(said) is hidden
    assert result.evidence_level == ("autograd" if hidden else "annotated")


def test_it_leaves_no_trace(tmp_path: Path) -> None:
    state, numbers = torch.get_rng_state(), random.getstate()
    filters = list(warnings.filters)
    began = time.perf_counter()
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        install(tmp_path)
        assert not torch.is_grad_enabled()
    assert time.perf_counter() - began < 1
    assert said == []
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == numbers
    assert list(warnings.filters) == filters
    assert torch.is_grad_enabled()


def test_the_profiler_of_a_script_sees_nothing(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        install(tmp_path)
    assert [event.name for event in profiler.events() if "Checkpoint" in event.name] == []


@pytest.mark.parametrize("mode", [torch.device("meta"), torch.inference_mode(), torch.no_grad()])
def test_the_modes_of_a_script_do_not_matter(tmp_path: Path, mode: Any) -> None:
    with mode:
        assert install(tmp_path).warnings == []


def test_neither_compiler_nor_wrapper_is_imported_nor_threads_started(tmp_path: Path) -> None:
    program = (
        "import sys, threading, torch\n"
        "from pathlib import Path\n"
        "from recompute_scan.record.checkpoint_calls import install_self_test\n"
        "from recompute_scan.record.checkpoint_calls import Probe\n"
        "before = set(sys.modules)\n"
        "tasks = len(list(Path('/proc/self/task').iterdir()))\n"
        "probe = Probe(Path.cwd())\n"
        "install_self_test(probe)\n"
        "assert probe.warnings == [], probe.warnings\n"
        "new = {m for m in set(sys.modules) - before if m.startswith('torch')}\n"
        "assert not new, new\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert len(list(Path('/proc/self/task').iterdir())) == tasks\n"
        "assert not torch.cuda.is_initialized()\n"
        "import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as wrapper\n"
        "assert probe.warnings == [] and probe.entered == {}, (probe.warnings, probe.entered)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
