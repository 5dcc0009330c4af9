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
        memory_bytes: Memory of one device, instead of what the trace says it has.
    """

    peak_tflops: float | None = None
    memory_bytes: int | None = None


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


def capacity(trace: Trace, device: int) -> int | None:
    """Memory of the GPU with this number in bytes; ``None`` where the trace does not tell."""
    devices = trace.metadata.get("deviceProperties")
    if not isinstance(devices, list) or not 0 <= device < len(devices):
        return None
    size = devices[device].get("totalGlobalMem") if isinstance(devices[device], dict) else None
    return size if isinstance(size, int) and 0 < size < 2**62 else None
