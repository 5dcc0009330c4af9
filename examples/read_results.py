"""Print what a run showed, and what the fix would save and saved, from its ``result.json``.

An example of the Python interface: the verdict, the number that decides it, the file and line of
every checkpoint; then the step before, predicted and measured, where ``run --verify`` measured it.

    python examples/read_results.py demo-out/doubled/result.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import recompute_scan as rs


def describe(path: Path) -> str:
    scan = rs.load_result(path)
    lines = [
        f"{path.parent}",
        f"  verdict                 {scan.verdict}",
        f"  recompute_per_backward  {scan.recompute_per_backward}",
    ]
    sites = {
        checkpoint.call_site: checkpoint.variant
        for region in scan.result.regions
        for checkpoint in region.checkpoints
    }
    lines += [f"  checkpoint              {site} ({variant})" for site, variant in sites.items()]
    report = path.with_name("report.html")
    if report.exists():
        lines.append(f"  report                  {report}")
    return "\n".join([*lines, "", *step_lines(scan)])


class StepFigures(NamedTuple):
    """Milliseconds per step, all on the machine as it was while the fix was measured."""

    before: float
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


def step_figures(scan: rs.Scan) -> StepFigures | None:
    """The step before, predicted and measured; ``None`` where the fix was not shown to help, or by
    an amount whose digits would say nothing.

    The fix and the unchanged script ran in turn, so that a machine that is slower for a while
    slows both. A prediction is a share of the step: it is applied to the one measured beside.
    """
    cost, verified = scan.result.cost, scan.result.verified
    if cost is None or verified is None or verified.outcome != "helps":
        return None
    if verified.saving_is_rough:
        return None
    before, after = verified.before_step_ms, verified.after_step_ms
    if before is None or after is None:
        return None
    beside = before / cost.step_ms
    return StepFigures(
        before,
        predicted=beside * cost.predicted_step_ms,
        low=beside * cost.predicted_low_ms,
        high=beside * cost.predicted_high_ms,
        measured=after,
    )


def step_lines(scan: rs.Scan) -> list[str]:
    """Those figures, or why there are none."""
    verified = scan.result.verified
    if verified is None or verified.before_step_ms is None:
        return ["The fix was not measured; `recompute-scan run --verify` does."]
    step = step_figures(scan)
    if step is None:
        low, high = verified.saving_low_ms, verified.saving_high_ms
        likely = "" if low is None or high is None else f", {low:.1f} to {high:.1f} ms per step"
        return [
            f"This machine is too noisy for a figure (the fix: {verified.outcome}{likely}).",
            "Run it again while nothing else runs on it.",
        ]
    place = "inside" if step.inside else "outside"
    return [
        f"  before     {step.before:7.1f} ms per step",
        f"  predicted  {step.predicted:7.1f} ms with the fix, "
        f"likely {step.low:.1f} to {step.high:.1f} ms",
        f"  measured   {step.measured:7.1f} ms with the fix: {place} the predicted interval",
        f"  {verified.saving_pct:.1f} % less time, {verified.more_time_pct:.1f} % more throughput",
    ]


if __name__ == "__main__":
    print("\n\n".join(describe(Path(name)) for name in sys.argv[1:]))
