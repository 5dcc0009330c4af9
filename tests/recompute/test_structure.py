"""What each call of a trace is, before anything is matched."""

from __future__ import annotations

from recompute_scan.recompute.roles import Role, Structure, classify
from recompute_scan.trace.calls import Calls, nest
from tests.recompute.training import reentrant_backward, run
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


def test_what_runs_before_the_last_numbered_operator_of_a_node_can_be_a_recompute() -> None:
    recompute = (op("aten::empty"), op("aten::linear", op("aten::addmm"), seq=40))
    assert roles(node("GeluBackward0", *recompute, op("aten::gelu_backward"), seq=3)) == [
        ("engine:GeluBackward0", "BACKWARD"),
        ("GeluBackward0", "FORMULA"),
        ("aten::empty", "RECOMPUTE"),
        ("aten::linear", "RECOMPUTE"),
        ("aten::addmm", "INNER"),
        ("aten::gelu_backward", "FORMULA"),
    ]


def test_a_closure_is_forward_work_and_what_follows_it_the_update() -> None:
    closure = (op("aten::linear", seq=3), node("AddmmBackward0", op("aten::mm"), seq=3))
    assert roles(optimizer(*closure, annotation("any", op("aten::_foreach_add_")))) == [
        ("Optimizer.step#AdamW.step", "RANGE"),
        ("aten::linear", "FORWARD"),
        ("engine:AddmmBackward0", "BACKWARD"),
        ("AddmmBackward0", "FORMULA"),
        ("aten::mm", "FORMULA"),
        ("any", "RANGE"),
        ("aten::_foreach_add_", "OPTIMIZER"),
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


def test_communication_is_no_forward_pass() -> None:
    gather = op("c10d::_allgather_base_", op("record_param_comms"))
    unshard = annotation("FSDP::pre_forward", op("aten::split"), gather)
    assert roles(gather, unshard) == [
        ("c10d::_allgather_base_", "PLUMBING"),
        ("record_param_comms", "INNER"),
        ("FSDP::pre_forward", "PLUMBING"),
        ("aten::split", "INNER"),
        ("c10d::_allgather_base_", "INNER"),
        ("record_param_comms", "INNER"),
    ]


def test_a_reentrant_recompute_and_the_backward_pass_it_starts() -> None:
    calls, structure = classified(thread(reentrant_backward(5, run(0, ("linear", "gelu")))))
    engines = structure.rows(Role.BACKWARD)
    outer, *nested = engines.tolist()
    assert structure.checkpoint_node[engines].tolist() == [True, False, False]
    candidates = structure.rows(Role.RECOMPUTE)
    assert [calls.names[calls.name[row]] for row in candidates] == ["aten::linear", "aten::gelu"]
    assert set(structure.engine[candidates]) == {outer}
    formulas = structure.rows(Role.FORMULA)
    assert set(structure.engine[formulas]) == set(nested)


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
