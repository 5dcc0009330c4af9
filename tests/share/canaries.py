"""Strings that must not come out of an archive, planted wherever a file can hold one."""

from __future__ import annotations

import copy
import itertools
import json
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from recompute_scan.annotations import REGION, parse_region, region_name

WORD = "zqcanary"
# Decimal digits that stand in process numbers, times and the like.
NUMBER = 738_291_645

Json = dict[str, Any]


def planted(document: Json, *, names: bool = False) -> Json:
    """The trace with a canary in every field that can hold one.

    Args:
        document: A Kineto document; its verdict must survive the planting.
        names: Also in names of modules, classes, files, kernels and operators of no library,
            which stay unless they are to be replaced.
    """
    count = itertools.count()

    def canary(form: str = "{}") -> str:
        return form.format(f"{WORD}{next(count)}")

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
        new = copy.deepcopy(event)
        new[canary("field_{}")] = canary()
        new["id"] = canary()
        new["pid"] = f"{event.get('pid')}-{NUMBER}-{WORD}"
        new["tid"] = f"{event.get('tid')}-{NUMBER}-{WORD}"
        if isinstance(event.get("ts"), (int, float)):
            new["ts"] = event["ts"] + NUMBER
        args = new.setdefault("args", {})
        if new.get("ph") == "X":
            args |= {
                "Concrete Inputs": [canary(), canary("--token={}")],
                "Call stack": canary("/home/{}/train.py(3): main;"),
                "Module Hierarchy": canary(),
                "Collective name": canary(),
                "Process Group Name": canary(),
                canary("arg_{}"): canary(),
            }
            for field in ("Sequence number", "correlation"):
                if isinstance(args.get(field), int) and args[field] >= 0:
                    args[field] += NUMBER
            if isinstance(args.get("Input type"), list) and args["Input type"]:
                args["Input type"] = [*args["Input type"], WORD]
        if names:
            _rename(new, canary)
        elif str(new.get("name", "")).startswith(REGION):
            annotation = parse_region(new["name"])
            assert annotation is not None
            site = f"/home/{WORD}/{WORD}-project/train.py:31" if annotation.site else ""
            new["name"] = region_name(_with(annotation, site=site, mechanism=annotation.mechanism))
        events.append(new)
    events += list(_extra(events, canary, names))
    return {**out, "traceEvents": events}


def _with(annotation: Any, **fields: str) -> Any:
    return replace(annotation, **fields)


def _rename(event: Json, canary: Any) -> None:
    name = str(event.get("name", ""))
    if name.startswith(REGION):
        annotation = parse_region(name)
        assert annotation is not None
        event["name"] = region_name(
            _with(
                annotation,
                module=f"{WORD}_model.{annotation.module}",
                module_class=f"{WORD}{annotation.module_class}",
                site=f"{WORD}_project/{WORD}_train.py:31" if annotation.site else "",
            )
        )
    elif event.get("cat") == "kernel":
        event["name"] = f"{WORD}_{name}"


def _extra(events: list[Json], canary: Any, names: bool) -> Iterator[Json]:
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
    pairs += [("cpu_op", f) for f in forms if f != "{}"] + [("kernel", f) for f in forms[1:5]]
    if names:
        pairs += [("cpu_op", f) for f in ("{}", "mine::{}", "{}Backward", "aten::{}")]
        pairs += [("kernel", f) for f in ("{}", "void {}<float>(int)")]
    at = (first["ts"] + last) / 2
    for category, form in pairs:
        at += 0.01
        yield {
            "ph": "X",
            "cat": category,
            "name": canary(form),
            "pid": f"other-{WORD}",
            "tid": f"other-{WORD}",
            "ts": at,
            "dur": 0.001,
            "args": {"stream": 9} if category in ("kernel", "gpu_memcpy") else {},
        }
    yield {"ph": "i", "name": canary(), "ts": at, "s": "g", "pid": WORD, "tid": WORD}
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": canary()}}
    yield {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": canary()}}


def planted_run_record(account: Json, *, names: bool = False) -> Json:
    """A run record of a run with a canary in every text."""
    del names
    environment = {key: f"{value}+{WORD}" for key, value in account["environment"].items()}
    return {
        **account,
        "status": "failed",
        "message": f"The script raised ValueError: {WORD}",
        "trace": f"{WORD}.json.gz",
        "stacks": f"{WORD}-stacks.json.gz",
        "warnings": [f"Modules could not be named: {WORD}", *account.get("warnings", [])],
        "sources": {
            f"/home/{WORD}/train.py:31": {
                "first": 30,
                "text": f"x\nmodel.enable('{WORD}')\ny",
                "begin": 31,
                "end": 31,
                "alone": False,
                "whole_lines": True,
            }
        },
        "environment": {
            **environment,
            "target": f"{WORD}.py",
            "HOME": f"/home/{WORD}",
            f"{WORD}": "1",
            "transformers": f"5.0+{WORD}",
            "device_name": f"NVIDIA {WORD} H100",
        },
    }


def found_in(archive: Path) -> list[str]:
    """Where canaries are left in an archive: members' names, and members' bytes, unpacked."""
    raw = archive.read_bytes()
    found = ["the archive's own bytes"] if _has(raw) else []
    with zipfile.ZipFile(BytesIO(raw)) as opened:
        for info in opened.infolist():
            if _has(info.filename.encode() + info.extra + info.comment):
                found.append(f"the name {info.filename}")
            data = opened.read(info)
            if _has(data):
                at = (
                    next(i for i in range(len(data)) if _has(data[i : i + len(WORD)]))
                    if (WORD.encode() in data.lower())
                    else 0
                )
                found.append(f"{info.filename}: {data[max(0, at - 60) : at + 40]!r}")
    return found


def _has(data: bytes) -> bool:
    return WORD.encode() in data.lower() or str(NUMBER).encode() in data


def as_json(document: Json) -> bytes:
    return json.dumps(document).encode()
