"""Seconds and steps until `run` first says something, until the verdict and until the report.

A small job trains with steps of 30 ms, 1 s and 8 s (it sleeps), plain and recorded. What is kept
of a job that ends early, in each phase, is a table of `faults`.

  python -m benchmarks first-word --seconds 1        steps of one second
  python -m benchmarks first-word --run=--quick      with an option of `run`
"""

import time
from pathlib import Path

import click
import msgspec
from tests.record.faults import JOB

from benchmarks._frame import TOOL, Table, benchmark, fresh, kept_in
from benchmarks._machine import machine


@benchmark
@click.option("--seconds", type=float, multiple=True, default=(0.03, 1.0, 8.0))
@click.option("--run", "options", multiple=True, help="An option of `run`.")
def main(seconds: tuple[float, ...], options: tuple[str, ...]) -> None:
    print(f"{machine('torch')}\n")
    heads = ("step", "first step", "word", "at step", "verdict", "after step", "report", "plain")
    table = Table(dict.fromkeys(heads, ">"), markdown=True)
    for step_s in seconds:
        with kept_in(None) as folder:
            table.row(f"{step_s:g} s", *_recorded(folder, step_s, options))


def _recorded(folder: Path, step_s: float, options: tuple[str, ...]) -> list[str]:
    job, stream, began = (JOB, "--sleep", f"{step_s:g}"), folder / "events", time.time()
    run = (*TOOL, "run", *options, "--events", str(stream), "-o", str(folder / "out"), *job)
    ran = fresh(run, folder=folder)
    if ran.status:
        raise click.ClickException(ran.output[-2000:])
    told = [msgspec.json.decode(line) for line in stream.read_bytes().splitlines()]
    steps = [one["time"] for one in told if one["event"] == "step"]
    said = next(one for one in told if "hooks" in one.get("text", ""))
    verdict = next(one["time"] for one in told if one["event"] == "result")
    made = next(one["steps"] for one in told if one["event"] == "script")
    plain = fresh((TOOL[0], *job, "--steps", str(made)), folder=folder)
    times = (steps[0], said["time"], verdict)
    first, first_word, answered = (f"{at - began:.1f}" for at in times)
    whole = (f"{ran.seconds:.1f}", f"{plain.seconds:.1f}")
    return [first, first_word, said["text"].split()[1], answered, str(made), *whole]
