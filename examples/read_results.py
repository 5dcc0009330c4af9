"""Print what a run showed, and what the fix would save and saved, from its ``result.json``.

An example of the Python interface: the verdict, the number that decides it, the file and line of
every checkpoint; then the step before, predicted and measured, where ``run --verify`` measured it.

    python examples/read_results.py demo-out/doubled/result.json
"""

from __future__ import annotations

import sys
from pathlib import Path

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


def step_lines(scan: rs.Scan) -> list[str]:
    """The step before, predicted and measured; or why there is no figure.

    The fix and the unchanged script ran in turn, so that a machine that is slower for a while
    slows both. A prediction is a share of the step: it is applied to the one measured beside.
    """
    cost, verified = scan.result.cost, scan.result.verified
    if cost is None or verified is None or verified.before_step_ms is None:
        return ["The fix was not measured; `recompute-scan run --verify` does."]
    if verified.outcome != "helps" or verified.after_step_ms is None:
        return [
            f"This machine gave no figure for the fix ({verified.outcome}).",
            "Run it again while nothing else runs on it.",
        ]
    before, after = verified.before_step_ms, verified.after_step_ms
    low, middle, high = (
        before * value / cost.step_ms
        for value in (cost.predicted_low_ms, cost.predicted_step_ms, cost.predicted_high_ms)
    )
    place = "inside" if low <= after <= high else "outside"
    return [
        f"  before     {before:7.1f} ms per step",
        f"  predicted  {middle:7.1f} ms with the fix, likely {low:.1f} to {high:.1f} ms",
        f"  measured   {after:7.1f} ms with the fix: {place} the predicted interval",
        f"  {verified.saving_pct:.1f} % less time, {verified.more_time_pct:.1f} % more throughput",
    ]


if __name__ == "__main__":
    print("\n\n".join(describe(Path(name)) for name in sys.argv[1:]))
