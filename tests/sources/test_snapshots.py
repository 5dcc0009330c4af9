"""Memory snapshots: what they say is what a replay says, and nothing in them is run."""

import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.analysis.ranks import kind_of_stack
from recompute_scan.errors import InputError
from recompute_scan.report.render import render_html, render_text
from recompute_scan.result import from_json, to_json
from recompute_scan.trace.allocations import StackFrame, parse_snapshot
from recompute_scan.trace.columns import Limits

_RAN: list[str] = []


def _frames(*places: tuple[str, str, int]) -> list[dict[str, Any]]:
    return [{"filename": file, "name": name, "line": line} for file, name, line in places]


MODULE = ("/venv/torch/nn/modules/module.py", "_call_impl", 1750)
CHECKPOINT = ("/venv/torch/utils/checkpoint.py", "checkpoint", 500)
FORWARD = _frames(("/home/me/model.py", "forward", 12), MODULE, ("train.py", "<module>", 3))
CHECKPOINTED = _frames(("/home/me/model.py", "forward", 20), MODULE, CHECKPOINT)
STEP = _frames(("/venv/torch/optim/adamw.py", "_init_group", 90), ("train.py", "<module>", 9))
STACKS: tuple[list[dict[str, Any]], ...] = (FORWARD, CHECKPOINTED, STEP, [])


def generated(seed: int, events: int = 300) -> tuple[dict[str, Any], int, int]:
    """A snapshot of the documented format, with the peak and the end of a replay forwards."""
    chosen = random.Random(seed)
    live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    trace: list[dict[str, Any]] = []
    now = peak = 0
    address = 1 << 40
    for _ in range(events):
        if live and chosen.random() < 0.45:
            at = chosen.choice(list(live))
            size, _ = live.pop(at)
            for action in ("free_requested", "free_completed"):
                trace.append({"action": action, "addr": at, "size": size, "frames": []})
            now -= size
        else:
            size = 512 * chosen.randint(1, 4000)
            frames = chosen.choice(STACKS)
            address += 1 << 24
            live[address] = size, frames
            trace.append({"action": "alloc", "addr": address, "size": size, "frames": frames})
            now += size
            peak = max(peak, now)
    blocks = [
        {
            "address": at,
            "size": size,
            "requested_size": size,
            "state": "active_allocated",
            "frames": frames,
        }
        for at, (size, frames) in live.items()
    ]
    segment = {"device": 0, "address": 1 << 40, "total_size": 2 * peak, "blocks": blocks}
    snapshot = {"segments": [segment], "device_traces": [trace], "allocator_settings": {}}
    return snapshot, peak, now


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(5))
def test_the_peak_is_that_of_a_replay(seed: int, protocol: int) -> None:
    snapshot, peak, end = generated(seed)
    (device,) = parse_snapshot(pickle.dumps(snapshot, protocol), "s.pickle")
    assert (device.peak, device.in_use) == (peak, end)
    assert sum(block.size for block in device.blocks) == peak


def test_the_formats_of_older_versions() -> None:
    frames = _frames(("train.py", "<module>", 3))
    block = {"size": 1024, "state": "active_allocated"}
    history = {"addr": 0, "real_size": 1000, "frames": frames}
    older = {"address": 64, "total_size": 4096, "blocks": [{**block, "history": [history]}]}
    for whole in ([older], {"segments": [older]}):  # torch 1.x and 2.0
        (device,) = parse_snapshot(pickle.dumps(whole), "s.pickle")
        assert [(b.size, b.stack[0].line) for b in device.blocks] == [(1000, 3)]
    bare = {"segments": [{"total_size": 4096, "blocks": [block]}], "device_traces": []}
    (device,) = parse_snapshot(pickle.dumps(bare), "s.pickle")
    assert [(b.size, b.stack) for b in device.blocks] == [(1024, ())]


def _kind(frames: list[dict[str, Any]]) -> str:
    return kind_of_stack(tuple(StackFrame(f["filename"], f["line"], f["name"]) for f in frames))


def test_kinds_rest_on_torchs_own_frames() -> None:
    assert [_kind(stack) for stack in STACKS] == ["forward", "checkpoint", "optimizer", "unknown"]
    engine = ("", "torch::autograd::Engine::evaluate_function(std::shared_ptr<…>)", 0)
    assert _kind(_frames(engine)) == "backward"
    again = ("/venv/torch/utils/checkpoint.py", "recompute_fn", 1400)
    assert _kind(_frames(MODULE, again, engine)) == "recompute"


class _Runs:
    def __reduce__(self) -> Any:
        return _RAN.append, ("ran",)


def _hostile() -> dict[str, tuple[bytes, str]]:
    plain = pickle.dumps(generated(1)[0])
    cycle: dict[str, Any] = {"device_traces": []}
    cycle["segments"] = [cycle]
    shared: list[Any] = [{"size": 1, "state": "inactive"}] * 1000
    wide = {"segments": [{"total_size": 1, "blocks": shared}] * 1000}
    of_one_hash = dict.fromkeys((2**61 - 1) * number for number in range(50))
    pairs = b"".join(b"\x94h" + bytes([place]) + b"\x86" for place in range(60))
    nested = b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b"."
    return {
        "code": (pickle.dumps({"segments": [_Runs()]}), "E341"),
        "code, protocol 2": (pickle.dumps({"segments": [_Runs()]}, 2), "E341"),
        "extension": (b"\x80\x04\x82\x01.", "E341"),
        "persistent": (b"\x80\x04K\x01Q.", "E341"),
        "text protocol": (b"\x80\x04cos\nsystem\n.", "E341"),
        "cut": (plain[: len(plain) // 2], "E342"),
        "empty": (b"\x80\x04.", "E342"),
        "long text": (b"\x80\x04X\xff\xff\xff\x7fab.", "E342"),
        "long number": (b"\x80\x04\x8b\xff\xff\xff\x7f.", "E342"),
        "far memo": (b"\x80\x04Nr\xff\xff\xff\xff.", "E342"),
        "no such memo": (b"\x80\x04h\x07.", "E342"),
        "number": (pickle.dumps(3), "E342"),
        "wrong size": (pickle.dumps({"segments": [{"total_size": "1", "blocks": []}]}), "E342"),
        "wrong frames": (
            pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": []}]]}),
            "E342",
        ),
        "wrong keys": (b"\x80\x04}]]s.", "E342"),
        "negative": (pickle.dumps({"segments": [{"total_size": -1, "blocks": []}]}), "E342"),
        "cycle": (pickle.dumps(cycle), "E342"),
        "key of tuples a million deep": (b"\x80\x04}K\x01" + b"\x85" * 10**6 + b"Ns.", "E342"),
        "key of a tuple that holds itself often": (
            b"\x80\x04}K\x01K\x01\x86" + pairs + b"Ns.",
            "E342",
        ),
        "key behind a mark": (b"\x80\x04}(K\x01\x85tNs.", "E342"),
        "numbers that share a hash": (pickle.dumps(of_one_hash), "E342"),
        "huge text": (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x3f.", "E342"),
        "huge bytes": (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x3f.", "E342"),
        "huge bytearray": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x3f.", "E342"),
        "huge frame": (b"\x80\x04\x95" + b"\xff" * 7 + b"\x3fN.", "E342"),
        "set": (pickle.dumps({1, 2}), "E342"),
        "memo far beyond": (b"\x80\x04Nr\x00\x00\x00\x10.", "E342"),
        "all is marks": (b"\x80\x04" + b"(" * 10**5 + b".", "E342"),
        "nested": (nested, "E342"),
        "the same a million times": (pickle.dumps(wide), "E313"),
    }


@pytest.mark.parametrize("name", _hostile())
def test_hostile_ones_are_refused_and_nothing_is_run(name: str) -> None:
    data, code = _hostile()[name]
    with pytest.raises(InputError) as caught:
        parse_snapshot(data, "s.pickle", Limits(events=100_000))
    assert caught.value.code == code
    assert not _RAN


def test_random_damage_ends_in_our_own_errors_only() -> None:
    plain = pickle.dumps(generated(2, 20)[0])
    chosen = random.Random(0)
    for _ in range(1500):
        data = bytearray(plain)
        for _ in range(chosen.randint(1, 4)):
            data[chosen.randrange(2, len(data))] = chosen.randrange(256)
        try:
            parse_snapshot(bytes(data), "s.pickle", Limits(events=10_000))
        except InputError as error:
            assert error.code in ("E341", "E342", "E313")


def test_alone_and_in_a_folder_without_anything_else(tmp_path: Path) -> None:
    file = tmp_path / "memory.pickle"
    file.write_bytes(pickle.dumps(generated(3)[0]))
    result = analyse([str(file)])
    (one,) = result.snapshots
    assert sum(one.by_kind.values()) == one.peak_bytes == generated(3)[1]
    assert result.verdict == "inconclusive"
    assert "memory.pickle" in render_text(result, color=False)
    assert "memory.pickle" in render_html(result)
    assert analyse([str(tmp_path)]).snapshots == result.snapshots


def _of_one_block(**fields: Any) -> dict[str, Any]:
    block = {"size": 8, "address": 64, "state": "active_allocated", **fields}
    return {"segments": [{"total_size": 8, "blocks": [block]}], "device_traces": []}


def test_texts_that_are_no_unicode_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(_of_one_block(frames=_frames(("a\udcff.py", "f", 1)))))
    result = analyse([path])
    assert result.snapshots[0].held[0].site.isprintable()
    assert from_json(to_json(result)) == result


def test_values_that_hold_themselves_many_times_are_refused_at_once() -> None:
    state: Any = "active"
    for _ in range(60):
        state = [state, state]
    with pytest.raises(InputError, match="not a memory snapshot"):
        parse_snapshot(pickle.dumps(_of_one_block(state=state)), "s.pickle")


def test_sizes_that_add_up_to_more_than_a_number_holds_are_refused() -> None:
    whole = _of_one_block(size=2**63)
    block = whole["segments"][0]["blocks"][0]
    whole["segments"][0]["blocks"] = [{**block, "address": at} for at in range(4)]
    with pytest.raises(InputError, match="not a memory snapshot"):
        parse_snapshot(pickle.dumps(whole), "s.pickle")
