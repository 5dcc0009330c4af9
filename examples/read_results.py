"""Print what several runs showed, from the results that ``recompute-scan run`` wrote.

An example of the Python interface: one block per run, with the verdict, the number that decides
it, what a step costs, and the file and line of every checkpoint.

    python examples/read_results.py demo-out/*/result.json
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
    if scan.cost is not None:
        lines.append(
            f"  step                    {scan.cost.step_ms:.0f} ms,"
            f" {scan.cost.saving_pct:.0f} % of it wasted"
        )
    sites = {
        checkpoint.call_site: checkpoint.variant
        for region in scan.result.regions
        for checkpoint in region.checkpoints
    }
    lines += [f"  checkpoint              {site} ({variant})" for site, variant in sites.items()]
    report = path.with_name("report.html")
    if report.exists():
        lines.append(f"  report                  {report}")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n\n".join(describe(Path(name)) for name in sys.argv[1:]))
