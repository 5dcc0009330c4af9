"""Strings that must not come out of an archive, planted wherever a file can hold one."""

import gzip
import itertools
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import replace

from recompute_scan.annotations import REGION, parse_region, region_name
from recompute_scan.compiled.logs import BREAK
from recompute_scan.events import SCHEMA, EventLine
from recompute_scan.guarding.judge import Stored
from recompute_scan.result.fidelity import Sampled, sampled_name
from recompute_scan.result.run_record import Rehearsal, RunInfo
from tests.present import present

WORD = "zqcanary"
# Decimal digits that stand in process numbers, times and the like.
NUMBER = 738_291_645

# A name's own, in a plain archive: it is documented to stay.
NAMED = "zqnamed"

Json = dict[str, Any]
# A text of the given form that no other has.
Canary = Callable[..., str]


def planted(document: Json, *, names: str = "") -> Json:
    """The trace with a canary in every field that can hold one.

    Args:
        document: A Kineto document; its verdict must survive the planting.
        names: What to put into names of modules, classes, files, kernels and operators of no
            library, which stay unless they are to be replaced; empty for nothing.
    """
    canary, named = _numbered(WORD), _numbered(names)

    out = {key: value for key, value in document.items() if key != "traceEvents"}
    out |= {
        "traceName": canary("/home/{}/out/trace.json"),
        "displayTimeUnit": canary(),
        canary("key_{}"): canary(),
        "hostname": canary("node-{}.example.org"),
        "cuda_runtime_version": canary(),
        "schemaVersion": canary(),
        "with_stack": canary(),
        "deviceProperties": [
            {"id": canary(), "name": f"NVIDIA {canary()} A100", "totalGlobalMem": canary()},
            {"id": 1, "name": canary()},
        ],
        "distributedInfo": {
            "backend": canary(),
            "rank": 0,
            "world_size": 1,
            "pg_config": [{"pg_name": canary(), "ranks": canary()}],
            "nccl_version": canary(),
        },
    }
    events = []
    for event in document["traceEvents"]:
        args = {**event.get("args", {})}
        new = {**event, canary("field_{}"): canary(), "args": args}
        new["id"] = canary()
        new["pid"] = f"{event.get('pid')}-{NUMBER}-{WORD}"
        new["tid"] = f"{event.get('tid')}-{NUMBER}-{WORD}"
        if isinstance(event.get("ts"), (int, float)):
            new["ts"] = event["ts"] + NUMBER
        if new.get("ph") == "X":
            args |= {
                "Concrete Inputs": [canary(), canary("--token={}")],
                "Call stack": canary("/home/{}/train.py(3): main;"),
                "Module Hierarchy": canary(),
                "Collective name": canary(),
                "Process Group Name": canary(),
                canary("arg_{}"): canary(),
            }
            args["bytes"] = NUMBER
            for field in ("Sequence number", "correlation"):
                if isinstance(args.get(field), int) and args[field] >= 0:
                    args[field] += NUMBER
            if isinstance(args.get("Input type"), list) and args["Input type"]:
                args["Input type"] = [*args["Input type"], WORD]
        if names:
            _rename(new, names)
        elif str(new.get("name", "")).startswith(REGION):
            annotation = present(parse_region(new["name"]))
            site = f"/home/{WORD}/{WORD}-project/train.py:31" if annotation.site else ""
            new["name"] = region_name(_with(annotation, site=site, mechanism=annotation.mechanism))
        events.append(new)
    events += list(_extra(events, canary, named if names else None))
    return {**out, "traceEvents": events}


def _numbered(word: str) -> Canary:
    count = itertools.count()
    return lambda form="{}": form.format(f"{word}{next(count)}")


def _with(annotation: Any, **fields: str) -> Any:
    return replace(annotation, **fields)


def _rename(event: Json, word: str) -> None:
    name = str(event.get("name", ""))
    if name.startswith(REGION):
        annotation = present(parse_region(name))
        event["name"] = region_name(
            _with(
                annotation,
                module=f"{word}_model.{annotation.module}",
                module_class=f"{word}{annotation.module_class}",
                site=f"{word}_project/{word}_train.py:31" if annotation.site else "",
            )
        )
    elif event.get("cat") == "kernel":
        event["name"] = f"{word}_{name}"


def _extra(events: list[Json], canary: Canary, named: Canary | None) -> Iterator[Json]:
    """Events with canaries for names, inside the recorded time, on a thread of their own."""
    timed = [event for event in events if event.get("ph") == "X"]
    first = min(timed, key=lambda event: event["ts"])
    last = max(event["ts"] + event["dur"] for event in timed)
    forms = [
        "{}",
        "/home/{}/data",
        "C:\\\\Users\\\\{}\\\\x",
        "{}@example.org",
        "--password={}",
        "loading {} now",
        "<script>{}</script>",
        "Optimizer.step#{}!",
        "nccl:{}!",
        "nccl:{}",
        "FSDP::{}",
        "FullyShardedDataParallel._pre_{}",
        "DistributedDataParallel.{}",
        "private_range_1_{}",
        "private_{}_1",
        "FSDP::pre_forward ({}/x)",
        "ProfilerStep#{}",
        "autograd::engine::evaluate_function: {} x",
        "Torch-Compiled Region: {}",
        "recompute_scan.region?call={}",
        "recompute_scan.recompute?call={}",
        "cuda{}-x",
        "Memcpy {} (Device -> Device)",
    ]
    categories = ["user_annotation", "cuda_runtime", "gpu_memcpy", "python_function", "overhead"]
    categories += ["cuda_driver", "ac2g", WORD]
    pairs = [(c, f) for c in categories for f in forms]
    # An operator's plain name is kept by rule; what is no plain name is not.
    plain = re.compile(r"[\w{}]+(::[\w{}]+)?|(Fully|Distributed).*")
    pairs += [("cpu_op", f) for f in forms if not plain.fullmatch(f)]
    pairs += [("kernel", f) for f in forms[1:5]]
    given = [(category, canary(form)) for category, form in pairs]
    if named:
        own = ("{}", "mine::{}", "{}Backward", "aten::{}", "aten::add.{}", "private_op_1_{}")
        given += [("cpu_op", named(form)) for form in (*own, "torch::autograd::{}", "c10d::{}")]
        given += [("kernel", named(form)) for form in ("{}", "void {}<float>(int)")]
        given.append(("cuda_runtime", named("cuda{}").replace("cudaz", "cudaZ")))
    at = (first["ts"] + last) / 2
    for category, name in given:
        at += 0.01
        yield {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": f"other-{WORD}",
            "tid": f"other-{WORD}",
            "ts": at,
            "dur": 0.001,
            "args": {"stream": 9} if category in ("kernel", "gpu_memcpy") else {},
        }
    yield {"ph": "i", "name": canary(), "ts": at, "s": "g", "pid": WORD, "tid": WORD}
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": canary()}}
    yield {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": canary()}}


def planted_run_record(account: Json, *, names: str = "") -> Json:
    """A run record with a canary in every text there can be, whether or not a run wrote it."""
    filled: Json = msgspec.to_builtins(_filled(RunInfo, _numbered(WORD)))
    known = ("rank", "world_size", "device", "warmup_steps", "timed_steps_ms", "profiled_steps")
    environment = {key: f"{value}+{WORD}" for key, value in account["environment"].items()}
    named = names or WORD
    return {
        **filled,
        **{key: account[key] for key in known},
        "schema": account["schema"],
        "status": "failed",
        "switched_on": [{"mechanism": "fsdp-wrapper", "site": f"/home/{WORD}/{named}.py:31"}],
        "environment": {
            **environment,
            **filled["environment"],
            "target": f"{WORD}.py",
            "HOME": f"/home/{WORD}",
            "transformers": f"5.0+{WORD}",
            "device_name": f"NVIDIA {WORD} H100",
        },
    }


def _filled(kind: Any, canary: Canary) -> Any:
    """A value of this type in which nothing is left out: new fields are planted by themselves."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind is str:
        return canary()
    if origin is Literal:
        return inside[0]
    if origin is tuple:
        return (_filled(inside[0], canary),) * 2
    if origin is dict:
        return {canary(): _filled(inside[1], canary)}
    if origin in (Union, UnionType):
        return _filled(next(one for one in inside if one is not type(None)), canary)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        types = get_type_hints(kind)
        return kind(**{name: _filled(types[name], canary) for name in kind.__struct_fields__})
    return kind(3)


def plant_folder(folder: Path, document: Json, account: Json, *, names: str = "") -> None:
    """Every file that a run can leave, and those of its further runs, full of canaries.

    Args:
        folder: Where to; it must be there.
        document: A Kineto document.
        account: The run record beside it.
        names: As for :func:`planted`.
    """
    trace = gzip.compress(as_json(planted(document, names=names)), 1)
    record = as_json(planted_run_record(account, names=names))
    canary = _numbered(WORD)
    stacks = {"traceEvents": [*document["traceEvents"], *_frames(document, canary)]}
    graph = (
        f'class GraphModule:\n    def forward(self, {WORD}: "f32[2]"):\n        return ({WORD},)'
    )
    frame = {"frame_id": 0, "frame_compile_id": 0, "attempt": 0, "has_payload": canary()}
    compiled = [
        _structured({"dynamo_start": {"stack": [{"name": canary(), "line": 3}]}, **frame}, ""),
        _structured({"aot_forward_graph": {}, **frame}, graph),
        _structured({"artifact": {"name": BREAK, "encoding": canary()}, **frame}, canary()),
    ]
    flight: Json = {"version": canary(), "pg_config": {canary(): {"desc": canary()}}}
    flight["entries"] = [{"profiling_name": canary("nccl:{}"), "frames": [{"name": canary()}]}]
    sampled = (Sampled(canary("layers.{}.weight"), False, 3, (1.0,), 1e-7),)
    frame_of = {"filename": canary("/home/{}/train.py"), "line": 3, "name": canary()}
    block = {"size": 8, "state": "active_allocated", "frames": [frame_of]}
    snapshot = {"segments": [{"total_size": 8, "blocks": [block]}], canary("key_{}"): canary()}
    further = ("verify/unchanged-1", "verify/fixed-1", "plan/rehearsal", "plan/proof")
    for place in (folder, *(folder / name for name in further)):
        place.mkdir(parents=True, exist_ok=True)
        (place / "trace-rank0.json.gz").write_bytes(trace)
        (place / "stacks-rank0.json.gz").write_bytes(gzip.compress(as_json(planted(stacks)), 1))
        (place / "run-rank0.json").write_bytes(record)
        (place / "so-far-rank0.json").write_bytes(record)
        (place / "where-rank0.txt").write_text(
            f'Thread 0x1 (most recent call first):\n  File "/home/{WORD}/x.py", line 3 in {WORD}\n'
        )
        (place / "flight-rank0.json").write_bytes(as_json(flight))
        (place / "compiled-rank0.log").write_text("".join(compiled))
        (place / sampled_name(0)).write_bytes(msgspec.json.encode(sampled))
        (place / "rehearsal-rank0.json").write_bytes(_document(Rehearsal, canary))
        (place / "guard-rank0.json").write_bytes(_document(Stored, canary))
        (place / "guarded-rank0.json").write_bytes(as_json({"said": canary(), canary(): 1}))
        (place / "snapshot.pickle").write_bytes(pickle.dumps(snapshot))
        (place / "events.jsonl").write_bytes(_events(canary))
        (place / "fix.patch").write_text(f"--- a/{WORD}.py\n+++ b/{WORD}.py\n-{canary()}\n")
        (place / "output.txt").write_text(f"loss {canary()}\nTraceback {canary()}\n")
        (place / "result.json").write_bytes(as_json({"schema": canary(), "verdict": canary()}))
        (place / "report.html").write_text(f"<title>{canary()}</title>")


def _document(kind: Any, canary: Canary) -> bytes:
    return msgspec.json.encode(_filled(kind, canary))


def _events(canary: Canary) -> bytes:
    """A line of each kind that ``--events`` writes."""
    kinds = EventLine.__subclasses__()
    assert len(kinds) >= 10
    lines = (replace(_filled(kind, canary), schema=SCHEMA) for kind in kinds)
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def _frames(document: Json, canary: Canary) -> Iterator[Json]:
    """Python's stack around everything, as a trace with stacks has it."""
    timed = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    begin = min(event["ts"] for event in timed)
    long = max(event["ts"] + event["dur"] for event in timed) - begin
    for number, form in enumerate(
        ("/home/{}/train.py(31): main", "{}/m.py(3): f", "nn.Module: {}")
    ):
        yield {
            **{key: timed[0][key] for key in ("pid", "tid")},
            "ph": "X",
            "cat": "python_function",
            "name": canary(form),
            "ts": begin - 9 + number,
            "dur": long + 18 - 2 * number,
            "args": {"Python id": number, "Python module id": number},
        }


def _structured(fields: Json, payload: str) -> str:
    lines = "".join(f"\t{line}\n" for line in payload.splitlines())
    return f"V0101 00:00:00.000000 1 torch/{WORD}.py:1] {json.dumps(fields)}\n{lines}"


def found_in(archive: Path, word: str = WORD) -> list[str]:
    """Where canaries are left in an archive: members' names, and members' bytes, unpacked."""
    wanted = [word.encode(), *([str(NUMBER).encode()] if word == WORD else [])]

    def where(data: bytes) -> int:
        places = [data.lower().find(one) for one in wanted]
        return min((place for place in places if place >= 0), default=-1)

    raw = archive.read_bytes()
    found = []
    with zipfile.ZipFile(BytesIO(raw)) as opened:
        for info in opened.infolist():
            if where(info.filename.encode() + info.extra + info.comment) >= 0:
                found.append(f"the name {info.filename}")
            data = opened.read(info)
            if (at := where(data)) >= 0:
                found.append(f"{info.filename}: {data[max(0, at - 60) : at + 40]!r}")
    if where(raw) >= 0 and not found:
        found.append("the archive's own bytes")
    return found


def as_json(document: Json) -> bytes:
    return json.dumps(document).encode()
