"""The doubled example and its repaired twin, recorded in turn: whether they agree.

One round is one recording of each, as those in ``traces`` were made, the first of the two changing
from round to round. A line says what the doubled recording predicts beside the twin's step. Of the
rounds, the one to keep is that whose timed steps spread least, whether or not it agrees. Rounds
that FOLDER holds already are not recorded again. With ``--keep`` that round goes into ``traces``,
without the host's name and the paths of the recording.

  python -m benchmarks twins FOLDER --rounds 7 --keep

The status is 1 where that round's twin is outside the prediction, or where its steps spread so much
(their middle half by a tenth) that they should be recorded again.
"""

import gzip
import os
import re
import shutil
from pathlib import Path
from statistics import median, quantiles

import click
import msgspec

import recompute_scan as rs
from benchmarks._frame import ROOT, TOOL, TRACES, Table, benchmark, fresh
from benchmarks._machine import machine

TWINS = ("doubled_llama_fsdp", "repaired_llama_fsdp")
TRACE = "trace-rank0.json.gz"
TOO_WIDE = 0.1


@benchmark
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--rounds", default=3)
@click.option("--keep", is_flag=True, help="Put the round that spreads least into traces.")
def main(folder: Path, rounds: int, keep: bool) -> int:
    print(machine("torch", "transformers"))
    table = Table(
        "round >5 | load >5.1f | before >9.1f | predicted >9.1f | from >8.1f | to >8.1f | twin "
        ">8.1f | inside <6 | spread >7.1%"
    )
    found = [record(number, folder / f"round-{number}", table) for number in range(rounds)]
    spread, inside, kept = min(found)
    print(f"least spread: {kept}, the twin {'inside' if inside else 'outside'} the prediction")
    if spread > TOO_WIDE:
        print("The steps spread too much to say so: record again while nothing else runs.")
    if spread > TOO_WIDE or not inside:
        return 1
    for name in TWINS if keep else ():
        ship(Path(kept) / name, TRACES / name)
    return 0


def record(number: int, folder: Path, table: Table) -> tuple[float, bool, str]:
    """One round: the wider spread of both, whether the twin is inside, and its folder."""
    load = os.getloadavg()[0]
    for name in TWINS if number % 2 == 0 else TWINS[::-1]:
        if not (folder / name / "result.json").exists():
            out = ("--steps", "2", "-o", folder.resolve() / name)
            ran = fresh((*TOOL, "run", *out, ROOT / "examples" / f"{name}.py"))
            if ran.status:
                raise click.ClickException(ran.output[-2000:])
    doubled = rs.analyze(folder / TWINS[0]).result.cost
    repaired = rs.analyze(folder / TWINS[1]).result.cost
    assert doubled is not None and repaired is not None
    low, high = doubled.predicted_low_ms, doubled.predicted_high_ms
    inside = low <= repaired.step_ms <= high
    spread = max(spread_of(folder / name / "run-rank0.json") for name in TWINS)
    predicted = (doubled.step_ms, doubled.predicted_step_ms, low, high)
    table.row(number + 1, load, *predicted, repaired.step_ms, "yes" if inside else "no", spread)
    return spread, inside, str(folder)


def ship(recorded: Path, shipped: Path) -> None:
    """Copy the trace and its run record as they are shipped."""
    shutil.copyfile(recorded / "run-rank0.json", shipped / "run-rank0.json")
    trace = gzip.decompress((recorded / TRACE).read_bytes()).decode()
    for name, value in (("host_name", "host"), ("traceName", TRACE.removesuffix(".gz"))):
        trace, found = re.subn(rf'("{name}": )"[^"]*"', rf'\1"{value}"', trace)
        if found != 1:
            raise ValueError(f"{found} times {name} in {recorded / TRACE}")
    (shipped / TRACE).write_bytes(gzip.compress(trace.encode(), mtime=0))


def spread_of(path: Path) -> float:
    """How far apart the quarters of the timed steps are, as a share of their median."""
    steps = msgspec.json.decode(path.read_bytes())["timed_steps_ms"]
    first, _, third = quantiles(steps, n=4)
    return float((third - first) / median(steps))
