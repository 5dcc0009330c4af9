"""The device that a trace was recorded on: what the trace says of it, and what a person adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recompute_scan.trace.columns import Trace


@dataclass(frozen=True)
class Machine:
    """What a person says of the device; it stands above what traces and tables say.

    Attributes:
        peak_tflops: Peak arithmetic of one device, TFLOP/s.
    """

    peak_tflops: float | None = None


UNKNOWN_MACHINE = Machine()


def device_name(trace: Trace, environment: Mapping[str, str]) -> str | None:
    """Name of the GPU; ``None`` where it is not told, or the host has different ones.

    Args:
        trace: Its ``deviceProperties`` list every GPU of the host.
        environment: The run's own account, which knows the device in use.
    """
    if name := environment.get("device_name"):
        return name
    devices = trace.metadata.get("deviceProperties")
    if not isinstance(devices, list):
        return None
    names = {device.get("name") for device in devices if isinstance(device, dict)}
    name = names.pop() if len(names) == 1 else None
    return name if isinstance(name, str) else None
