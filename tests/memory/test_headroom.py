"""RS301 and RS302 on steps of a GPU whose allocations are known."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.cost.flops import Machine
from recompute_scan.result import Checked, Finding, Memory, Result
from tests.present import present
from tests.recompute.training import training_step
from tests.trace_builder import Call, document, launch, node, op, thread

MIB, GIB = 2**20, 2**30
KERNEL_US = 1000.0
SHAPE = [[2, 4, 64, 16]] * 3
BASE = 1 * GIB
SAVED = (100 * MIB, 300 * MIB, 200 * MIB)


def product(seq: int, us: float = KERNEL_US) -> Call:
    inner = op("aten::addmm", launch("gemm", us), dims=[[8], [4, 8], [8, 8]])
    return op("aten::linear", inner, seq=seq, dims=[[4, 8], [8, 8], [8]])


def attention(seq: int) -> Call:
    inner = op(
        "aten::_scaled_dot_product_flash_attention", launch("flash_fwd", KERNEL_US), dims=SHAPE
    )
    inner = replace(inner, args={**inner.args, "Input type": ["c10::BFloat16"] * 3})
    return op("aten::scaled_dot_product_attention", inner, seq=seq, dims=SHAPE)


def layer(first: int, *, attends: bool, us: float = KERNEL_US) -> list[Call]:
    middle = attention(first + 1) if attends else product(first + 1)
    return [product(first, us), middle, product(first + 2), product(first + 3)]


def backward(calls: list[Call], recompute: list[Call]) -> list[Call]:
    nodes = []
    for place, call in enumerate(reversed(calls)):
        name = "AddmmBackward0" if call.name == "aten::linear" else "FlashBackward0"
        work = op("aten::mm", launch("gemm", 2 * KERNEL_US), dims=[[8, 4], [4, 8]])
        before = recompute if place == 0 else ()
        nodes.append(node(name, *before, work, seq=call.args["Sequence number"]))
    return nodes


@dataclass(frozen=True)
class Scene:
    """One step; layers are recomputed where ``recomputes`` says so, and allocate what they save."""

    recomputes: tuple[int, ...] = (1, 1, 1)
    attends: bool = True
    memory: int | None = 80 * GIB
    peak: int = BASE
    device: int = 0
    extra: tuple[dict[str, Any], ...] = ()
    saved: tuple[int, ...] = SAVED
    us: tuple[float, ...] = (KERNEL_US,) * 3

    def write(self, folder: Path) -> Path:
        layers = [layer(100 * place, attends=self.attends) for place in range(len(self.recomputes))]
        back: list[Call] = []
        for place in reversed(range(len(layers))):
            again = [
                call
                for turn in range(self.recomputes[place])
                for call in layer(
                    1000 + 100 * place + 10 * turn, attends=self.attends, us=self.us[place]
                )
            ]
            back += backward(layers[place], again)
        step = training_step(0, *(call for one in layers for call in one), *back)
        properties = {"id": 0, "name": "NVIDIA A100-SXM4-80GB"}
        if self.memory is not None:
            properties["totalGlobalMem"] = self.memory
        whole = document(
            thread(replace(step, us=60_000.0)), deviceProperties=[properties], profile_memory=1
        )
        whole["traceEvents"] += [*self._allocations(whole["traceEvents"]), *self.extra]
        file = folder / "trace.json"
        file.write_text(json.dumps(whole))
        return file

    def _allocations(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        total, found = 0, []

        def allocate(ts: float, size: int) -> None:
            nonlocal total
            total += size
            args = {"Total Reserved": total, "Total Allocated": total, "Bytes": size}
            args |= {"Device Id": self.device, "Device Type": 1 if self.device >= 0 else 0}
            found.append(
                {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100}
                | {"tid": 1, "ts": ts, "args": args}
            )

        starts = {
            e["args"].get("Sequence number"): e for e in events if e["name"] == "aten::linear"
        }
        allocate(0.5, self.peak)
        for place in reversed(range(len(self.recomputes))):
            if not self.recomputes[place]:
                continue
            again = starts[1000 + 100 * place]
            allocate(again["ts"] + 0.25, self.saved[place])
            ends = [
                e["ts"] + e["dur"]
                for e in events
                if e["name"] == "AddmmBackward0" and e["args"]["Sequence number"] == 100 * place
            ]
            allocate(ends[0] + 0.25, -self.saved[place])
        return found


def found(result: Result, code: str) -> Finding | None:
    return next((finding for finding in result.findings if finding.code == code), None)


def status(result: Result, code: str) -> Checked:
    return next(one for one in result.checked if one.code == code)


def memory_of(result: Result) -> Memory:
    return present(result.memory)


def test_all_layers_stop_where_there_is_memory_for_all(tmp_path: Path) -> None:
    result = analyse([Scene().write(tmp_path)])
    memory, finding = memory_of(result), present(found(result, "RS301"))
    assert [one.saved_bytes for one in memory.regions] == list(SAVED)
    assert finding.title.startswith("3 of 3 blocks")
    assert finding.saving_ms == pytest.approx(present(result.cost).breakdown.recompute, rel=0.01)
    assert memory.plans[0].regions == ()
    assert memory.plans[-1].regions == (0, 1, 2)


def test_the_plan_is_the_best_that_fits(tmp_path: Path) -> None:
    """All three would take 600 MiB beside what is there before them."""
    # Today's peak is in the recompute of the largest layer; 250 MiB more hold no three of them.
    peak = BASE + 300 * MIB
    result = analyse([Scene(memory=round((peak + 250 * MIB) / 0.9)).write(tmp_path)])
    memory, finding = memory_of(result), present(found(result, "RS301"))
    plan = memory.plans[present(memory.chosen)]
    assert plan.peak_bytes <= (memory.budget_bytes or 0)
    assert len(plan.regions) == 2
    assert present(finding.fix).disposition == "review"


def test_of_like_layers_the_last_ones_stop_whatever_one_of_them_took(tmp_path: Path) -> None:
    peak = BASE + 100 * MIB
    scene = Scene(
        memory=round((peak + 110 * MIB) / 0.9), saved=(100 * MIB,) * 3, us=(1010.0, 990.0, 1000.0)
    )
    memory = memory_of(analyse([scene.write(tmp_path)]))
    assert memory.plans[present(memory.chosen)].regions == (1, 2)


@pytest.mark.parametrize(
    ("scene", "said", "why", "field", "value"),
    [
        (Scene(memory=round(BASE / 0.9)), "clean", "", "chosen", None),
        (Scene(recomputes=(0, 0, 0)), "not-applicable", "", "plans", ()),
        (Scene(device=-1), "not-applicable", "host", "capacity_bytes", None),
    ],
    ids=["no memory left", "no checkpoints", "the host's memory"],
)
def test_nothing_is_advised(
    scene: Scene, said: str, why: str, field: str, value: object, tmp_path: Path
) -> None:
    result = analyse([scene.write(tmp_path)])
    checked = status(result, "RS301")
    assert checked.status == said
    assert why in (checked.why or "")
    assert getattr(memory_of(result), field) == value


def test_a_given_capacity_stands_above_the_traces(tmp_path: Path) -> None:
    file = Scene(memory=None).write(tmp_path)
    assert "--memory-gib" in (status(analyse([file]), "RS301").why or "")
    result = analyse([file], machine=Machine(memory_bytes=40 * GIB))
    assert memory_of(result).capacity_bytes == 40 * GIB
    assert found(result, "RS301") is not None


def test_redundant_recomputes_are_not_gained_twice(tmp_path: Path) -> None:
    """What RS001 saves is not RS301's: the plan begins at the step after that fix."""
    result = analyse([Scene(recomputes=(2, 2, 2)).write(tmp_path)])
    finding, cost = present(found(result, "RS301")), present(result.cost)
    assert finding.saving_ms == pytest.approx(cost.breakdown.recompute, rel=0.01)
    assert memory_of(result).plans[0].step_ms == pytest.approx(cost.predicted_step_ms)


def test_attention_that_is_recomputed_can_be_kept(tmp_path: Path) -> None:
    result = analyse([Scene().write(tmp_path)])
    finding = present(found(result, "RS302"))
    # One of four recomputed kernels of equal length; 2 * 4 * 64 rows of 16 numbers and a sum.
    assert finding.saving_ms == pytest.approx(
        present(result.cost).breakdown.recompute / 4, rel=0.02
    )
    assert f"{3 * 2 * 4 * 64 * (16 * 2 + 4) / 1024:.1f} KiB" in finding.title
    assert "They fit" in finding.detail
    assert finding.evidence[0].endswith("aten::_scaled_dot_product_flash_attention")


@pytest.mark.parametrize("scene", [Scene(attends=False), Scene(recomputes=(0, 0, 0))])
def test_without_recomputed_attention_nothing_is_to_be_kept(scene: Scene, tmp_path: Path) -> None:
    assert status(analyse([scene.write(tmp_path)]), "RS302").status == "clean"


def test_events_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    odd = [{"Bytes": "many"}, {"Bytes": 2**70}, {}, {"Bytes": 8, "Device Id": "x"}]
    extra = tuple({"ph": "i", "name": "[memory]", "ts": 1.0, "args": args} for args in odd)
    extra += ({"ph": "i", "name": "[memory]", "ts": None, "args": {"Bytes": 1}},)
    extra += ({"ph": "X", "name": 'the name "[memory]" itself', "ts": 1.0, "dur": 1.0},)
    sound = analyse([Scene().write(tmp_path)]).memory
    assert analyse([Scene(extra=extra).write(tmp_path)]).memory == sound
