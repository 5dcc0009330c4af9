"""A recording of the CPU, with its backward pass on a thread of its own, as a GPU's is.

For cases that the ``rig`` (``tests/cases/device.py``) cannot run: collectives, and compiled code.
What runs inside the outermost nodes of a backward pass moves to another thread, and gets that
thread's sequence numbers: torch counts per thread, so that a recompute's numbers there are none of
the forward pass's. A node bears the number and the thread of the operator that made it. Where an
operator would launch kernels is put into each one that computes.
"""

import re
from typing import Any

from .device import LAUNCH
from .kernel_names import Event

_NODE = "autograd::engine::evaluate_function"
_NUMBER, _THREAD = "Sequence number", "Fwd thread id"
# The first number of the backward pass's thread, and how its thread is called in nodes.
_FIRST, _CALLED = 10, 2
# They make or describe tensors, and compute nothing.
_NO_KERNEL = re.compile(
    r"aten::(_?empty\w*|new_\w+|_?reshape\w*|_?unsafe_view|view\w*|as_strided\w*|expand\w*|t|"
    r"transpose|permute|select|slice|narrow|alias|detach_?|unbind|split\w*|chunk|squeeze|unsqueeze|"
    r"resize_?|set_|item|is_nonzero|_local_scalar_dense|to|result_type|lift_fresh|scalar_tensor|"
    r"contiguous|record_stream|zeros\w*|ones\w*|full\w*|unflatten|flatten|mT|adjoint|movedim|"
    r"_has_compatible\w+|is_same_size)$"
)
# One kernel on a device, whatever else the CPU calls inside.
_PRODUCT = re.compile(r"aten::(addmm|mm|bmm|baddbmm)$")
_WHOLE = re.compile(
    r"aten::(addmm|mm|bmm|baddbmm|_scaled_dot_product_flash\w*|native_\w+|mkldnn_convolution|"
    r"convolution_backward|_softmax\w*|_log_softmax\w*|embedding_dense_backward|"
    r"nll_loss_(forward|backward))$"
)
# What gloo does on threads of its own; NCCL has none.
_GLOO = re.compile(r"gloo:|ProcessGroupGloo")


def moved(recording: Event) -> Event:
    """The recording of a CPU as that of a device would be, its launches among it."""
    events = [dict(event) for event in recording["traceEvents"] if event.get("ph") == "X"]
    events = [event for event in events if not _GLOO.match(event["name"])]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    # The thread of the steps is the one that trains; without steps, that of the first event.
    main = (steps or events)[0]["tid"]
    backward = _device_thread(events)
    made: dict[int, tuple[bool, int]] = {}
    numbers: dict[int, int] = {}
    stack: list[Event] = []
    kept: list[Event] = []
    for event in events:
        if event["tid"] != main:
            kept.append(event)
            continue
        while stack and event["ts"] >= stack[-1]["ts"] + stack[-1]["dur"]:
            stack.pop()
        on_device = any(each["name"].startswith(_NODE) for each in (*stack, event))
        inside_node = bool(stack) and stack[-1]["name"].startswith(_NODE)
        stack.append(dict(event))
        arguments: dict[str, Any] = dict(event.get("args", {}))
        if _NUMBER in arguments:
            number = int(arguments[_NUMBER])
            if event["name"].startswith(_NODE) or (inside_node and _THREAD in arguments):
                by_device, number = made.get(number, (False, number))
                arguments[_THREAD] = _CALLED if by_device else 1
            elif on_device:
                number = numbers.setdefault(number, _FIRST + len(numbers))
                made[int(arguments[_NUMBER])] = (True, number)
            else:
                made[number] = (False, number)
            arguments[_NUMBER] = number
        kept.append(event | {"args": arguments} | ({"tid": backward} if on_device else {}))
    return recording | {"traceEvents": kept + _launches(kept)}


def _device_thread(events: list[Event]) -> int:
    taken = [event["tid"] for event in events if isinstance(event["tid"], int)]
    return 1 + max(taken, default=0)


def _launches(events: list[Event]) -> list[Event]:
    """A launch in each operator that computes: those without another operator inside."""
    found: list[Event] = []
    stacks: dict[object, list[Event]] = {}
    leaves: dict[int, Event] = {}
    computed: set[int] = set()
    for event in events:
        stack = stacks.setdefault(event["tid"], [])
        while stack and event["ts"] >= stack[-1]["ts"] + stack[-1]["dur"]:
            stack.pop()
        if event.get("cat") != "cpu_op" or not event["name"].startswith(("aten::", "c10d::")):
            continue
        if event["name"] == "aten::resolve_conj":
            computed.add(id(stack[-1]) if stack else 0)
        if any(_WHOLE.match(outer["name"]) for outer in stack):
            continue
        for outer in stack:
            if not _NO_KERNEL.match(event["name"]):
                leaves.pop(id(outer), None)
        if not _NO_KERNEL.match(event["name"]):
            leaves[id(event)] = event
        stack.append(event)
    for event in leaves.values():
        # Early stop ends a recompute within the product whose input it was asked for: only those
        # that compute go on to this.
        if _PRODUCT.match(event["name"]) and id(event) not in computed:
            continue
        ts, dur = event["ts"] + 0.3 * event["dur"], 0.4 * event["dur"]
        where = {"pid": event["pid"], "tid": event["tid"], "ts": ts, "dur": dur}
        launch = {"ph": "X", "cat": "user_annotation", "name": LAUNCH, **where, "args": {}}
        # Whatever else the CPU calls inside at that moment.
        found.append({**launch, "operator": event})
    return found
