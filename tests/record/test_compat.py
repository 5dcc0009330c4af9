"""Each difference between torch's versions, on this one: what it lacks is put there."""

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._C import _distributed_c10d as c10d

from recompute_scan.frameworks.pytorch import GENERATORS
from recompute_scan.record import torch_versions
from recompute_scan.record.origins import Arguments
from tests.present import present

PACKED, SPREAD = GENERATORS


def _as_imported_now() -> ModuleType:
    spec = present(importlib.util.spec_from_file_location("compat_again", torch_versions.__file__))
    module = importlib.util.module_from_spec(spec)
    present(spec.loader).exec_module(module)
    return module


def test_the_question_whether_torch_compiles_has_another_place_up_to_2_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if hasattr(torch.compiler, "is_compiling"):
        assert torch_versions.is_compiling is torch.compiler.is_compiling
        monkeypatch.delattr(torch.compiler, "is_compiling")
    # The compiler knows this very function; one that calls it would be traced instead.
    assert _as_imported_now().is_compiling is torch._utils.is_compiling
    assert torch_versions.is_compiling() is False


def test_the_generator_that_checkpoint_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    name = present(torch_versions.generator_name())
    original, called = getattr(torch_checkpoint, name), []

    def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
        called.append((function, torch_versions.inputs(args)[-1]))
        return original(function, *args, **kwargs)

    monkeypatch.setattr(torch_checkpoint, name, generator)
    x = torch.ones(2, requires_grad=True)
    torch_checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
    assert called == [(torch.sin, x)]


def test_since_2_14_another_generator_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(fn: Any, args: Any, kwargs: Any, *, context_fn: Any = None) -> None:
        """As torch 2.14 has it."""

    def spread(fn: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> None:
        """As torch has it before."""

    monkeypatch.setattr(torch_checkpoint, SPREAD, spread)
    monkeypatch.delattr(torch_checkpoint, PACKED, raising=False)
    assert torch_versions.generator_name() == SPREAD
    assert torch_versions.inputs((True, 1, 2)) == (True, 1, 2)

    monkeypatch.setattr(torch_checkpoint, PACKED, packed, raising=False)
    assert torch_versions.generator_name() == PACKED
    assert torch_versions.inputs(((1, 2), {"mask": 3})) == (1, 2, 3)

    monkeypatch.delattr(torch_checkpoint, PACKED)
    monkeypatch.delattr(torch_checkpoint, SPREAD)
    assert torch_versions.generator_name() is None


def test_settings_are_read_from_both_forms_of_the_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def packed(fn: Any, args: Any, kwargs: Any, *, context_fn: Any = None, early_stop: Any) -> None:
        """As torch 2.14 has it."""

    def spread(fn: Any, context_fn: Any = None, *args: Any, **kwargs: Any) -> None:
        """As torch has it before 2.9."""

    def policy() -> None: ...

    monkeypatch.setattr(torch_checkpoint, "_enable_checkpoint_early_stop", None)
    new, old = Arguments(packed), Arguments(spread)
    assert new.options((len, (), {}), {"context_fn": policy, "early_stop": True}) == ["selective"]
    assert new.options((len, (), {}), {"early_stop": False}) == ["early-stop-off"]
    assert old.options((len, policy), {}) == ["selective"]
    # An argument of the checkpointed function that has the name of a later setting.
    assert old.options((len,), {"early_stop": False}) == []


@pytest.mark.parametrize(
    ("switch", "argument", "stops"),
    [
        (True, None, True),  # up to 2.8
        (False, None, False),
        (None, True, True),  # since 2.9
        (None, False, False),
        (True, False, True),
        (False, True, False),
    ],
)
def test_early_stop_by_switch_and_by_argument(
    monkeypatch: pytest.MonkeyPatch, switch: bool | None, argument: bool | None, stops: bool
) -> None:
    monkeypatch.setattr(torch_checkpoint, "_enable_checkpoint_early_stop", switch)
    assert torch_versions.early_stop(argument) is stops


class _WithoutCheck:
    """A store as they are up to torch 2.3."""

    def __init__(self, store: Any) -> None:
        self.compare_set = store.compare_set


def test_a_store_is_asked_for_a_key_without_waiting(tmp_path: Path) -> None:
    for store in (c10d.HashStore(), c10d.FileStore(str(tmp_path / "store"), 1)):
        mine = c10d.PrefixStore("recompute_scan", store)
        mine.set("word", "1234")
        mine.set("empty", "")
        for asked in (mine, _WithoutCheck(mine)):
            assert torch_versions.holds(asked, "word")
            assert not torch_versions.holds(asked, "wait1")
            assert not torch_versions.holds(asked, "wait1")  # asking leaves nothing there
        assert mine.get("word") == b"1234"


def test_lines_of_the_profiler_are_known_by_their_beginning() -> None:
    for line in (
        b"STAGE:2026-01-02 03:04:05 6:6 ActivityProfilerController.cpp:314] Completed Stage\n",
        b"USDT:2026-01-02 03:04:05 6:6 kineto\n",
        b"ERROR:2026-01-02 03:04:05 6:6 CudaDeviceProperties.cpp:27] cudaGetDeviceCount failed\n",
        b"ERROR:2026-01-02 03:04:05 6:6 DeviceProperties.cpp:56] gpuGetDeviceCount failed\n",
        b"[W1126 15:06:02.385492027 CPUAllocator.cpp:245] Memory block of unknown size was\n",
        b"[rank0]:[W1126 15:05:59.355336 CPUAllocator.cpp:245] Memory block of unknown size was\n",
    ):
        assert torch_versions.PROFILER_LINE.match(line)
    for line in (
        b"step 1  STAGE: two\n",
        b"ERROR:2026-01-02 03:04:05 6:6 CuptiActivityProfiler.cpp:1] no memory\n",
        b"[W1126 15:06:02.385492027 CPUAllocator.cpp:75] not enough memory\n",
    ):
        assert not torch_versions.PROFILER_LINE.match(line)


def test_flight_recorders_are_those_that_this_build_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: "new", raising=False)
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: "old", raising=False)
    assert [dump() for dump in torch_versions.flight_recorders()] == ["new", "old"]
    monkeypatch.delattr(c10d, "_dump_fr_trace_json")
    assert [dump() for dump in torch_versions.flight_recorders()] == ["old"]
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert torch_versions.flight_recorders() == ()


@pytest.mark.parametrize(
    ("version", "python", "crash"),
    [
        ("2.6.0+cu124", (3, 13, 0), True),
        ("2.7.0", (3, 13, 5), True),
        ("2.7.1+cpu", (3, 13, 0), False),
        ("2.10.0a0+git1", (3, 14, 0), False),
        ("2.6.0", (3, 12, 9), False),
    ],
)
def test_before_2_7_1_stacks_crash_on_python_3_13(
    monkeypatch: pytest.MonkeyPatch, version: str, python: tuple[int, ...], crash: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    # Its own alone: what it imports meanwhile must not take this Python for another.
    monkeypatch.setattr(torch_versions, "sys", SimpleNamespace(version_info=python))
    assert torch_versions.stacks_crash() is crash
