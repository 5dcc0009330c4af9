"""Recordings in the form of rocprofv3's JSON, made from traces in Kineto's."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]


def rocprof(document: Event) -> bytes:
    """The kernels of a trace, each with the thread that launched it, as rocprofv3 writes them."""
    events = document["traceEvents"]
    launched = {
        event["args"]["correlation"]: event["tid"]
        for event in events
        if event["cat"] == "cuda_runtime" and "correlation" in event["args"]
    }
    kernels = [event for event in events if event["cat"] == "kernel"]
    names = list(dict.fromkeys(event["name"] for event in kernels))
    numbers = {name: 1 + place for place, name in enumerate(names)}
    symbols = [{"kernel_id": 0, "kernel_name": "", "formatted_kernel_name": "0"}]
    symbols += [
        {"kernel_id": number, "kernel_name": f"{name}.kd", "formatted_kernel_name": name}
        for name, number in numbers.items()
    ]
    records = [
        {
            "size": 184,
            "kind": 11,
            "operation": 2,
            "thread_id": launched[event["args"]["correlation"]],
            "correlation_id": {"internal": event["args"]["correlation"], "external": 0},
            "start_timestamp": round(1000 * event["ts"]),
            "end_timestamp": round(1000 * (event["ts"] + event["dur"])),
            "dispatch_info": {
                "agent_id": {"handle": 37946},
                "queue_id": {"handle": event["tid"]},
                "kernel_id": numbers[event["name"]],
                "workgroup_size": {"x": 512, "y": 1, "z": 1},
            },
            "stream_id": {"handle": 0},
        }
        for event in kernels
    ]
    agents = [
        {"id": {"handle": 37944}, "type": 1, "product_name": "AMD EPYC 9575F 64-Core Processor"},
        {"id": {"handle": 37946}, "type": 2, "product_name": "AMD Instinct MI350X"},
    ]
    process = {
        "metadata": {"pid": 908},
        "agents": agents,
        "kernel_symbols": symbols,
        "buffer_records": {"kernel_dispatch": records, "hip_api": []},
    }
    return json.dumps({"rocprofiler-sdk-tool": [process]}, separators=(",", ":")).encode()
