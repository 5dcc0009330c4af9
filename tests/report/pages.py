"""A page of every kind, made from what real runs gave: traces of this repository, and results."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from msgspec import structs

from recompute_scan.analysis.headline import headline
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.report.render import render_comparison_html, render_html
from recompute_scan.result import Rank, Result, from_json
from recompute_scan.result.compare import compare
from tests.report import sample_results

TRACES = Path(__file__).parents[2] / "traces"
RECORDED = Path(__file__).with_name("recorded")


@cache
def traced(name: str) -> Result:
    """What a trace of this repository shows today."""
    return analyse((str(TRACES / name),))


def recorded(name: str) -> Result:
    """What a run gave that left no trace, or whose trace is not kept."""
    return from_json((RECORDED / f"{name}.json").read_bytes())


def ranks(number: int) -> Result:
    """The doubled run on many ranks, of which the second half of every eight is repaired."""
    one = traced("doubled_llama_fsdp")
    assert one.cost is not None
    rows = []
    for rank in range(number):
        repaired = rank % 8 >= 4
        step = one.cost.predicted_step_ms if repaired else one.cost.step_ms
        rows.append(
            Rank(
                rank,
                f"trace-rank{rank}.json.gz",
                "full" if repaired else "doubled",
                step * (1 + rank % 5 / 100),
                1.0 if repaired else 2.0,
                one.cost.recompute_ms / (2 if repaired else 1),
            )
        )
    several = structs.replace(one, ranks=tuple(rows))
    return structs.replace(several, headline=headline(several))


def large() -> Result:
    """A job at the limits of the design: 200 layers, 100 steps that differ, 512 ranks.

    Every tenth step holds no checkpointed work, and the last layer is checkpointed once.
    """
    one = ranks(512)
    first = one.steps[0]
    steps = tuple(
        structs.replace(
            first, index=index, start_us=first.start_us + 1000 * index * first.duration_ms
        )
        for index in range(100)
    )
    regions = tuple(
        structs.replace(
            one.regions[layer % len(one.regions)],
            ordinal=layer,
            module=f"model.layers.{layer}",
            recompute_runs_per_backward=1.0 if layer == 199 else 1.8,
            recomputes_by_step=tuple(
                0.0 if step % 10 == 9 else 1.0 if layer == 199 else 2.0 for step in range(100)
            ),
        )
        for layer in range(200)
    )
    return structs.replace(one, steps=steps, regions=regions)


RESULTS: dict[str, Callable[[], Result]] = {
    "doubled": lambda: traced("doubled_llama_fsdp"),
    "full": lambda: traced("repaired_llama_fsdp"),
    "none": lambda: traced("plain_none"),
    "partial": lambda: recorded("partial"),
    "inconclusive": lambda: traced("public/h100-nanogpt-compiled.json.gz"),
    "gpu": lambda: traced("public/mi300x-resnet-checkpointed.json.gz"),
    "crashed": lambda: recorded("crashed"),
    "hung": lambda: recorded("hung"),
    "planned": lambda: recorded("planned"),
    # Everything that a result can hold: memory plans, a known peak, a measured fix.
    "verified": sample_results.verified,
    "ranks": lambda: ranks(8),
    "large": large,
}


@cache
def page(name: str) -> str:
    """The page of one of the results, or the comparison of the doubled run with its twin."""
    if name == "compare":
        return render_comparison_html(
            compare(RESULTS["doubled"](), RESULTS["full"](), ("doubled", "repaired"))
        )
    return render_html(RESULTS[name]())


PAGES = (*RESULTS, "compare")
