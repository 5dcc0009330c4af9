"""The items of the stages: their commands, and how they are run, side by side or alone."""

import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import yaml

from benchmarks._frame import ROOT, Ran, fresh
from benchmarks.gpu.answers import answer, show

STAGES = yaml.safe_load((Path(__file__).parent / "stages.yaml").read_text("utf-8"))
# One program, with the fields that the file explains.
Item = Mapping[str, Any]


def items(device: str, stages: Sequence[int]) -> list[Item]:
    """The items of these stages, or of all, that the device can run."""
    asked = [one for one in STAGES["items"] if not stages or one["stage"] in stages]
    able = [one for one in asked if device == "cuda" or not one.get("gpu")]
    patience = STAGES["devices"][device]["patience"]
    return [{**one, "limit_s": patience * one.get("limit_s", 90)} for one in able]


def command(item: Item, keep: Path, device: str, tiny: bool) -> list[str]:
    """The item's command, filled in."""
    known = {"python": sys.executable, "root": ROOT, "keep": keep, "out": keep / item["name"]}
    known |= {"device": device, **STAGES["devices"][device]}
    sizes = {one: STAGES["sizes"]["tiny" if tiny else one] for one in STAGES["sizes"]}
    words = {one: text.format(**known) for one, text in STAGES["words"].items()}
    asked = item.get("tiny", item["run"]) if tiny else item["run"]
    return shlex.split(asked.format(**known, **sizes, **words))


def run_all(
    chosen: Sequence[Item], keep: Path, made: Callable[[Item], list[str]], minutes: float, jobs: int
) -> int:
    """Run items, each a line of JSON as soon as it has ended; 1 where one failed or is wrong."""
    began, bad = time.monotonic(), 0

    def run(item: Item) -> Ran:
        left = began + 60 * minutes - time.monotonic()
        if left < 8:
            return Ran(-1, "no time was left", 0.0)
        return fresh(made(item), timeout_s=min(item["limit_s"], left))

    with (keep / "results.jsonl").open("a", encoding="utf-8") as lines:
        for alone, group in itertools.groupby(chosen, lambda item: item.get("alone")):
            with ThreadPoolExecutor(1 if alone else jobs) as pool:
                running = {pool.submit(run, item): item for item in group}
                for done in as_completed(running):
                    item, ran = running[done], done.result()
                    (keep / f"{item['name']}.txt").write_text(ran.output, encoding="utf-8")
                    line = {"item": item["name"], "at_s": round(time.monotonic() - began, 1)}
                    try:
                        line |= answer(item, keep, ran)
                    except Exception as error:  # the other items are worth having
                        line |= {"error": f"{type(error).__name__}: {error}", "right": False}
                    lines.write(json.dumps(line) + "\n")
                    lines.flush()
                    bad += not line["right"]
                    show(line)
    return int(bad > 0)
