"""The verdict and the counts on compiled trainings, against operators counted as they ran."""

import pytest
from msgspec.structs import replace

from recompute_scan.result import CompiledGraph, Result

from .answers import counted_otherwise, miscounted, misplaced, said_of, truth_of
from .cases import CASES, Case

_QUICK = {
    "model, checkpoints in it",
    "layers, in and around",
    "model",
    "graph break under each checkpoint",
}


def _marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=() if case.name in _QUICK else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_the_answer_is_right(case: Case) -> None:
    truth, both = truth_of(case), said_of(case)
    said, by_log = both.by_trace, both.by_log
    assert said.verdict == case.verdict
    assert all(one.code != "RS007" for one in said.findings)
    assert misplaced(said, truth) == {}
    if case.backend != "inductor":
        assert miscounted(said, truth) == {}
        assert counted_otherwise(said, truth) == {}
    # The compiler's graphs and the operators in the trace are two counts.
    assert said.confidence == ("medium" if case.name.startswith("compiled autograd") else "high")
    breaks = said.compiled.graph_breaks if said.compiled else ()
    if case.breaks:
        assert any(case.breaks in one and "cases.py" in one for one in breaks)

    # The folder that TORCH_TRACE names, alone.
    assert by_log.verdict == (case.alone or case.verdict)
    assert by_log.confidence in ("medium", "low")
    if case.alone is None:
        assert by_log.recompute_per_backward == said.recompute_per_backward
        assert _ran(by_log, said) == _ran(said, said)
    elif by_log.verdict == "inconclusive":
        assert by_log.reason
    assert by_log.compiled is not None
    assert by_log.compiled.graph_breaks == breaks


def _ran(result: Result, by: Result) -> dict[str, CompiledGraph]:
    """The graphs of one answer, without what a log cannot tell, that another answer saw run."""
    called = {graph.name for graph in by.compiled.graphs} if by.compiled else set()
    graphs = result.compiled.graphs if result.compiled else ()
    return {one.name: replace(one, calls_per_step=None) for one in graphs if one.name in called}
