"""The device that a trace was recorded on, and the peak arithmetic of known GPUs.

Peaks are dense, without sparsity, at the boost clock, per device.
Each row has the page or data sheet that its figures come from. Makers print figures with
structured sparsity in the first place; those are halved here. Where a name stands for several
products (``NVIDIA H100 80GB HBM3`` is the SXM module), the form that carries that name is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from recompute_scan.trace.columns import Trace


class Machine(Struct, frozen=True):
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
        environment: The run's own run record, which knows the device in use.
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


NVIDIA_DATA = "https://www.nvidia.com/en-us/data-center/"
AMPERE_GA102 = (
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
AMD_DATA = "https://www.amd.com/en/products/accelerators/instinct/"


_SLICE = re.compile(r"\bMIG\b")


class Peak(Struct, frozen=True):
    """One product's peak.

    Attributes:
        name: The product.
        tflops: TFLOP/s by number type; one that is missing is not supported.
        source: Where the figures are printed.
    """

    name: str
    tflops: Mapping[str, float]
    source: str


def _peak(
    name: str,
    half: float,
    fp32: float,
    source: str,
    *,
    tf32: float | None = None,
    fp8: float | None = None,
    fp64: float | None = None,
    bf16: bool = True,
) -> Peak:
    """``half`` is that of fp16 with sums in fp32, and of bf16 where the product has it."""
    given = {"bf16": half if bf16 else None, "fp16": half, "fp32": fp32, "tf32": tf32}
    given |= {"fp8": fp8, "fp64": fp64}
    return Peak(name, {kind: value for kind, value in given.items() if value is not None}, source)


# The first pattern that is found in the device's name counts.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    (
        r"\bGB200\b",
        _peak(
            "GB200", 2500.0, 80.0, NVIDIA_DATA + "gb200-nvl72/", tf32=1250.0, fp8=5000.0, fp64=40.0
        ),
    ),
    (
        r"\bB300\b",
        _peak("B300", 2250.0, 75.0, NVIDIA_DATA + "hgx/", tf32=1125.0, fp8=4500.0, fp64=1.25),
    ),
    (
        r"\bB200\b",
        _peak("B200", 2250.0, 75.0, NVIDIA_DATA + "hgx/", tf32=1125.0, fp8=4500.0, fp64=37.0),
    ),
    (
        r"\bH200 NVL\b",
        _peak("H200 NVL", 835.5, 60.0, NVIDIA_DATA + "h200/", tf32=417.5, fp8=1670.5, fp64=60.0),
    ),
    (
        r"\bGH200\b",
        _peak("GH200", 989.5, 67.0, NVIDIA_DATA + "grace-hopper-superchip/", tf32=494.5,
              fp8=1979.0, fp64=67.0),
    ),
    (
        r"\bH200\b",
        _peak("H200 SXM", 989.5, 67.0, NVIDIA_DATA + "h200/", tf32=494.5, fp8=1979.0, fp64=67.0),
    ),
    (
        r"\bH100 NVL\b",
        _peak("H100 NVL", 835.5, 60.0, NVIDIA_DATA + "h100/", tf32=417.5, fp8=1670.5, fp64=60.0),
    ),
    (
        r"\b(H100|H800) PCIe\b",
        _peak("H100 PCIe", 756.5, 51.0, NVIDIA_DATA + "h100/", tf32=378.0, fp8=1513.0, fp64=51.0),
    ),
    (
        r"\b(H100|H800)\b",
        _peak("H100 SXM", 989.5, 67.0, NVIDIA_DATA + "h100/", tf32=494.5, fp8=1979.0, fp64=67.0),
    ),
    (
        r"\b(A100|A800)\b",
        _peak("A100", 312.0, 19.5, NVIDIA_DATA + "a100/", tf32=156.0, fp64=19.5),
    ),
    (
        r"\bA40\b",
        _peak("A40", 149.7, 37.4, NVIDIA_DATA + "a40/", tf32=74.8),
    ),
    (
        r"\bA30\b",
        _peak("A30", 165.0, 10.3, NVIDIA_DATA + "products/a30-gpu/", tf32=82.0, fp64=10.3),
    ),
    (
        r"\bA10\b",
        _peak("A10", 125.0, 31.2, NVIDIA_DATA + "products/a10-gpu/", tf32=62.5),
    ),
    (
        r"\bL40S\b",
        _peak("L40S", 362.05, 91.6, NVIDIA_DATA + "l40s/", tf32=183.0, fp8=733.0),
    ),
    (
        r"\bL4\b",
        _peak("L4", 121.0, 30.3, NVIDIA_DATA + "l4/", tf32=60.0, fp8=242.5),
    ),
    (
        r"\bV100S",
        _peak("V100S", 130.0, 16.4, NVIDIA_DATA + "v100/", fp64=8.2, bf16=False),
    ),
    (
        r"\bV100-PCIE",
        _peak("V100 PCIe", 112.0, 14.0, NVIDIA_DATA + "v100/", fp64=7.0, bf16=False),
    ),
    (
        r"\bV100-SXM",
        _peak("V100 SXM2", 125.0, 15.7, NVIDIA_DATA + "v100/", fp64=7.8, bf16=False),
    ),
    (
        r"\bT4\b",
        _peak("T4", 65.0, 8.1, NVIDIA_DATA + "tesla-t4/", bf16=False),
    ),
    (r"\bRTX 4090\b", _peak("RTX 4090", 165.2, 82.6, ADA, tf32=82.6, fp8=330.3)),
    (r"\bRTX 3090\b(?! Ti)", _peak("RTX 3090", 71.0, 35.6, AMPERE_GA102, tf32=35.6)),
    (
        r"\bMI355X\b",
        _peak(
            "MI355X", 2516.6, 157.3, AMD_DATA + "mi350/mi355x.html", fp8=5033.2, fp64=78.6
        ),
    ),
    (
        r"\bMI350X\b",
        _peak(
            "MI350X", 2306.9, 144.2, AMD_DATA + "mi350/mi350x.html", fp8=4613.7, fp64=72.1
        ),
    ),
    (
        r"\bMI325X\b",
        _peak(
            "MI325X", 1307.4, 163.4, AMD_DATA + "mi300/mi325x.html",
            tf32=653.7, fp8=2614.9, fp64=163.4,
        ),
    ),
    (
        r"\bMI300X\b",
        _peak(
            "MI300X", 1307.4, 163.4, AMD_DATA + "mi300/mi300x.html",
            tf32=653.7, fp8=2614.9, fp64=163.4,
        ),
    ),
    (
        r"\bMI300A\b",
        _peak(
            "MI300A", 980.6, 122.6, AMD_DATA + "mi300/mi300a.html",
            tf32=490.3, fp8=1961.2, fp64=122.6,
        ),
    ),
    # One card is two devices; these are the figures of one.
    (
        r"\bMI250X",
        _peak("MI250X, one of two dies", 191.5, 47.9, AMD_DATA + "mi200/mi250x.html", fp64=47.9),
    ),
)  # fmt: skip


def peak_of(device: str | None) -> Peak | None:
    """The peak of a GPU by its name as drivers give it; ``None`` for one that is not known, and
    for a slice of one (MIG), which has some of its multiprocessors only.
    """
    if not device or _SLICE.search(device):
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device)), None)
