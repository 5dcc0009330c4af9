"""How well the device is used: arithmetic beside its peak, in words that every rendering shares."""

from __future__ import annotations

from recompute_scan.report.escape import visible
from recompute_scan.result import Flops, Result
from recompute_scan.units import UNKNOWN, share, times

_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
_HEALTHY = "1.00 without checkpointing, about 1.33 with every layer replayed once, 1.67 twice"


def ratio_row(result: Result) -> tuple[str, str] | None:
    """HFU over MFU as a number and what to hold beside it; ``None`` where it is not known."""
    flops = result.flops
    if flops is None or flops.hfu_over_mfu is None:
        return None
    reached = ""
    if flops.hfu is not None and flops.mfu is not None:
        reached = f"HFU {share(flops.hfu)}, MFU {share(flops.mfu)} of the peak; "
    return times(flops.hfu_over_mfu), reached + _HEALTHY


def flops_table(flops: Flops) -> list[tuple[str, str, str]]:
    """Part of the step, its operations, and their share of all that ran."""
    parts = (
        ("Forward pass", flops.forward_per_step),
        ("Backward pass", flops.backward_per_step),
        ("First replays", _less(flops.recompute_per_step, flops.surplus_per_step)),
        ("Surplus replays", flops.surplus_per_step),
    )
    known = [value for _, value in parts if value is not None]
    whole = sum(known)
    if not whole:
        return []
    rows = [(name, operations(value), share((value or 0.0) / whole)) for name, value in parts]
    return [*rows, ("All that ran", operations(whole), "")]


def flops_sentences(flops: Flops) -> list[str]:
    """What the figures say, and what they leave out."""
    said = []
    if flops.hfu is not None and flops.peak_tflops is not None:
        reached = f"The device reached {share(flops.hfu)} of its peak with all that ran (HFU)"
        if flops.mfu is not None:
            reached += f", {share(flops.mfu)} with what the model needs (MFU)"
        said.append(f"{reached}. Peak: {flops.peak_tflops:,.1f} TFLOP/s, {flops.peak_source}.")
    elif flops.hfu_over_mfu is not None:
        said.append(
            "The device's peak is not known, so HFU and MFU are not either; their ratio needs no "
            "peak. --peak-tflops sets one."
        )
    if flops.uncounted:
        named = ", ".join(visible(name, 60) for name in flops.uncounted)
        said.append(f"Not counted, for want of a formula or of its shapes: {named}.")
    if flops.reason:
        said.append(visible(flops.reason, 400))
    return said


def operations(value: float | None) -> str:
    """``3.77 TFLOP``: floating-point operations with three significant digits."""
    if value is None:
        return UNKNOWN
    power = 0
    while value >= 1000 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if value >= 100 or not power else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {_PREFIXES[power]}FLOP"


def _less(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else whole - part
