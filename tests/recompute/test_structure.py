"""What each call of a trace is, before anything is matched."""

from recompute_scan.recompute.roles import Role, Structure, classify
from recompute_scan.trace.calls import Calls, nest
from tests.trace_builder import (
    ENGINE,
    Call,
    Thread,
    annotation,
    loaded,
    node,
    op,
    optimizer,
    thread,
    wait,
)

ROLES = {value: name for name, value in vars(Role).items() if name.isupper()}


def classified(*threads: Thread) -> tuple[Calls, Structure]:
    calls = nest(loaded(*threads))
    return calls, classify(calls)


def roles(*calls: Call) -> list[tuple[str, str]]:
    """Name and role of every call of one thread, in order of time."""
    forest, structure = classified(thread(*calls))
    return [
        (forest.names[forest.name[row]].replace(ENGINE, "engine:"), ROLES[role])
        for row, role in enumerate(structure.role)
    ]


def test_a_closure_may_wait_for_the_backward_pass_of_another_thread() -> None:
    stepping = optimizer(op("aten::linear", seq=3), wait(100.0), op("aten::_foreach_add_"))
    backward = node("AddmmBackward0", op("aten::mm"), seq=3)
    forest, structure = classified(thread(stepping), thread(backward, tid=2, start=30.0))
    named = zip(forest.name.tolist(), structure.role.tolist(), strict=True)
    found = {forest.names[name]: ROLES[role] for name, role in named}
    assert found["aten::linear"] == "FORWARD"
    assert found["aten::_foreach_add_"] == "OPTIMIZER"
    assert found["aten::mm"] == "FORMULA"


def test_a_node_has_its_number_where_its_range_has_none() -> None:
    # FSDP's tensor hooks leave the engine's range without a number, or with another node's.
    missing = op(ENGINE + "AddmmBackward0", op("AddmmBackward0", op("aten::mm"), seq=3))
    foreign = op(ENGINE + "GeluBackward0", op("GeluBackward0", op("aten::mul"), seq=2), seq=77)
    _, structure = classified(thread(missing, foreign))
    assert structure.number[structure.rows(Role.BACKWARD)].tolist() == [3, 2]


def test_a_scripted_operator_has_the_lowest_number_inside_it() -> None:
    scripted = op("fused_mlp", op("aten::linear", seq=8), op("aten::gelu", seq=9))
    _, structure = classified(thread(scripted))
    assert structure.number[structure.rows(Role.FORWARD)].tolist() == [8]


def test_before_torch_1_11_a_bare_node_is_its_own_engine_range() -> None:
    _, structure = classified(
        thread(op("aten::linear", seq=3), op("AddmmBackward", op("aten::mm")))
    )
    assert [ROLES[role] for role in structure.role] == ["FORWARD", "BACKWARD", "FORMULA"]
    (engine,) = structure.rows(Role.BACKWARD)
    assert structure.engine.tolist() == [-1, engine, engine]


def test_a_bare_node_counts_for_nothing_where_the_engine_marks_its_nodes() -> None:
    # `torch.autograd.Function`s may be called like a node, and be called in the forward pass.
    named = op("MyBackward", op("aten::mm"))
    found = dict(roles(named, node("ReluBackward0", op("aten::threshold_backward"), seq=0)))
    assert found["MyBackward"] == "FORWARD"


def test_a_range_that_is_called_like_a_function_is_no_call_of_it() -> None:
    inside = (op("aten::linear", seq=9), op("aten::mm"))
    calls = annotation("Own", op("aten::linear", seq=3)), node("OwnBackward", *inside, seq=3)
    assert roles(*calls)[-2:] == [("aten::linear", "RECOMPUTE"), ("aten::mm", "FORMULA")]
