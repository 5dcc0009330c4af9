"""Operators without a number get that of the node that they made, and no others."""

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from recompute_scan.recompute.evaluations import Fate, find_evaluations
from recompute_scan.recompute.roles import Role, classify
from recompute_scan.trace.calls import nest
from tests.trace_builder import Call, loaded, node, op, step, thread


def numbers(*calls: Call) -> list[tuple[str, int]]:
    """Name and number of the outermost operators of the forward pass, in order of time."""
    forest = nest(loaded(thread(*calls)))
    structure = classify(forest)
    return [
        (forest.names[forest.name[row]], int(structure.number[row]))
        for row in structure.rows(Role.FORWARD)
    ]


def moded(name: str, *inside: Call) -> Call:
    """An operator that a dispatch mode saw and called again."""
    return op(name, op(name, *inside))


MODED = (
    op("_NoopSaveInputs", seq=1),
    moded("aten::native_layer_norm"),
    op("aten::linear", moded("aten::t"), moded("aten::addmm")),
    moded("aten::gelu"),
    op("aten::sum", seq=6),
)


def backward(*names: str, last: int = 6) -> tuple[Call, ...]:
    return tuple(node(f"{name}Backward0", seq=last - at) for at, name in enumerate(names))


def test_nodes_without_an_operator_belong_to_those_of_their_names() -> None:
    nodes = backward("Sum", "Gelu", "Addmm", "T", "NativeLayerNorm")
    assert numbers(step(0, *MODED, *nodes)) == [
        ("_NoopSaveInputs", 1),
        ("aten::native_layer_norm", 2),
        ("aten::linear", 3),
        ("aten::gelu", 5),
        ("aten::sum", 6),
    ]


@pytest.mark.parametrize(
    ("before", "last", "nodes"),
    [
        ((), moded("aten::sin"), backward("Cos", last=1)),
        ((), op("aten::sin"), backward("Sin", last=1)),
        ((op("aten::add", seq=2),), moded("aten::sin"), backward("Add", "Sin", "Mul", last=2)),
    ],
    ids=["node of another name", "no mode", "not between the numbers before and after"],
)
def test_other_operators_get_no_number(
    before: tuple[Call, ...], last: Call, nodes: tuple[Call, ...]
) -> None:
    found = numbers(step(0, op("aten::mul", seq=0), *before, last, *nodes))
    assert found[-1] == ("aten::sin", -1)


def test_a_recompute_under_a_mode_ends_where_the_formula_begins() -> None:
    recompute = (moded("aten::native_layer_norm"), op("aten::linear", moded("aten::addmm")))
    formula = (op("aten::t"), op("aten::mm"))
    nodes = (
        node("SumBackward0", seq=6),
        node("GeluBackward0", seq=5),
        node("AddmmBackward0", *recompute, *formula, seq=4),
    )
    forest = nest(loaded(thread(step(0, *MODED, *nodes))))
    structure = classify(forest)
    again = [forest.names[forest.name[row]] for row in structure.rows(Role.RECOMPUTE)]
    assert again == ["aten::native_layer_norm", "aten::linear"]
    formulas = {forest.names[forest.name[row]] for row in structure.rows(Role.FORMULA)}
    assert {"aten::t", "aten::mm"} <= formulas
    assert np.all(structure.number[structure.filled] >= 0)


def made_by(thread: int, call: Call) -> Call:
    """A node that autograd's thread of that number made."""
    inside = tuple(
        dataclasses.replace(each, args={**each.args, "Fwd thread id": thread})
        for each in call.inside
    )
    return dataclasses.replace(call, args={**call.args, "Fwd thread id": thread}, inside=inside)


def test_of_threads_with_equal_numbers_the_one_that_the_trace_names_made_a_node() -> None:
    # A second backward pass inside a node, through the forward pass's nodes: of the same numbers as
    # what the node runs, which is on the thread of the backward pass.
    again = (op("aten::mul", seq=1), op("aten::sin", seq=2), op("aten::cos", seq=3))
    forward = (*again, op("aten::sum", seq=4))
    nested = [made_by(1, node(name, seq=at)) for at, name in ((3, "Cos"), (2, "Sin"), (1, "Mul"))]
    engine = (
        made_by(1, node("Sum", seq=4)),
        made_by(1, node("Cos", *again, *nested, seq=3)),
        made_by(1, node("Sin", seq=2)),
        made_by(1, node("Mul", seq=1)),
    )
    forest = nest(loaded(thread(*forward), thread(*engine, tid=2, start=100)))
    for calls, threads, fate in (
        (forest, {0}, Fate.DISCARDED),
        (replace(forest, made_by=None), {0, 1}, Fate.REBUILT),
    ):
        table = find_evaluations(calls)
        assert set(calls.thread[table.maker].tolist()) == threads
        assert table.fate[table.of >= 0].max() == fate
