"""What came of an item, beside what is true; and all that a folder of such items has."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tests.cases.groups import highest
from tests.cases.truth import counted, write_truth

from benchmarks._frame import Ran
from benchmarks.accuracy import read_again

STEPS = 3
# Of `run --steps 3`, by what it does in them.
PHASES = {"timed": slice(3, 13), "profiled": slice(14, 17), "stacks": slice(17, 18)}
PHASES |= {"compared": slice(18, 19), "after": slice(21, None)}
_WORTH_SAYING = re.compile(r" NO$|MISTAKE|WRONG|outside$|not recorded|CANNOT RUN|Error: ")
_TAIL = 8


def answer(item: Mapping[str, Any], keep: Path, ran: Ran) -> dict[str, Any]:
    """Facts about an item of ``stages.yaml``, from what it and the items before left in ``keep``;
    ``right`` is whether they are as they have to be.
    """
    name, verdict = item["name"], item.get("verdict")
    facts: dict[str, Any] = {"status": ran.status, "seconds": round(ran.seconds, 1)}
    report, result = _json(keep / f"{name}.json"), _json(keep / name / "result.json")
    said = [one for one in ran.output.splitlines() if one.strip() and "USDT:" not in one] or [""]
    right = ran.status == 0
    if step := true_step(keep, name):
        facts |= {"step_ms": step, "peak_bytes": report["peak_bytes"]}
    elif "once" in report:
        facts |= {f"{way}_ms": true_step(keep, f"{name}/{way}") for way in report}
    if result:
        facts |= _said(item, result, keep)
    if verdict:
        right &= facts.get("verdict") == verdict
    if verdict and result and "counted" in report:
        truth = counted(name, verdict, STEPS, report["counted"])
        write_truth(keep / name / "trace-rank0.truth.json", truth)
        facts["counted"] = highest(truth)
        right &= facts["per_backward"] == facts["counted"]
        phases = {phase: report["times_ms"][which] for phase, which in PHASES.items()}
        facts["phases_ms"] = {phase: median(steps) for phase, steps in phases.items() if steps}
    if "losses" in item:
        losses = [_json(keep / f"{one}.json").get("losses", []) for one in item["losses"]]
        facts["repeats"] = bool(losses[0]) and all(one == losses[0] for one in losses)
        mine = report.get("losses", [])
        facts["losses_equal"] = bool(mine) and mine == losses[0][: len(mine)]
        right &= facts["losses_equal"] or not facts["repeats"]
    if said[-1].startswith("{"):
        facts |= json.loads(said[-1])
    elif ran.status or not (report or result):
        facts["said"] = [line for line in said[:-_TAIL] if _WORTH_SAYING.search(line)]
        facts["said"] += said[-_TAIL:]
    return facts | {"right": right}


def _said(item: Mapping[str, Any], result: Mapping[str, Any], keep: Path) -> dict[str, Any]:
    """What the tool says of a run, against true steps."""
    cost, flops, verified = (result[name] or {} for name in ("cost", "flops", "verified"))
    facts = {name: result[name] for name in ("verdict", "confidence", "warnings")}
    facts["per_backward"] = result["recompute_per_backward"]
    facts["findings"] = [one["code"] for one in result["findings"]]
    facts |= {"mfu": flops.get("mfu"), "predicted_ms": cost.get("predicted_step_ms")}
    facts |= {n: verified[n] for n in ("outcome", "before_step_ms", "after_step_ms") if verified}
    before, after = (true_step(keep, item.get(which, "")) for which in ("before", "after"))
    if before and after and cost:
        scale = before / cost["step_ms"]
        facts["error_pct"] = 100 * (scale * cost["predicted_step_ms"] / after - 1)
        low, high = scale * cost["predicted_low_ms"], scale * cost["predicted_high_ms"]
        facts["inside"] = low <= after <= high
    if plan := result["plan"]:
        facts |= {name: plan[name] for name in ("budget_bytes", "today", "most", "proof")}
        for name, other in item.get("peak", {}).items():
            true = {"peak_bytes": _json(keep / f"{other}.json").get("peak_bytes")}
            true["step_ms"] = true_step(keep, other)
            off = {what: 100 * (plan[name][what] / one - 1) for what, one in true.items() if one}
            facts[f"{name}_off_pct"] = off
    return facts


def true_step(keep: Path, where: str) -> float | None:
    """The median step in ms that an item timed by itself, or of ``ITEM/WAY`` one of its ways."""
    name, _, way = where.partition("/")
    document = _json(keep / f"{name}.json")
    times = (document.get(way, {}) if way else document).get("times_ms", [])
    return median(times if way else times[5:] or times) if times else None


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return found


def show(line: Mapping[str, Any]) -> None:
    """Print an item's line, and below it what a program said."""
    rounded = json.loads(json.dumps(line), parse_float=lambda text: float(f"{float(text):.4g}"))
    known = {n: one for n, one in rounded.items() if one not in (None, [], {}) and n != "said"}
    mark = "ok" if known.pop("right") else "NO"
    print(mark, *(f"{name}={one}" for name, one in known.items()))
    print(*(f"     {one}\n" for one in line.get("said", ())), sep="", end="", flush=True)


def read_back(folder: Path) -> int:
    """Show what a folder has; 1 where a trace that stands beside its truth is answered wrongly."""
    for text in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines():
        show(json.loads(text))
    return read_again(folder)
