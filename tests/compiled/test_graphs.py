"""Reading the compiler's records and graphs, from text alone."""

from pathlib import Path

import pytest

from recompute_scan.compiled.code import checkpoints_around
from recompute_scan.compiled.graphs import (
    PrintedNode,
    find_repeats,
    graph_breaks,
    has_price,
    parse_graph,
    read_partitions,
    shape_of,
)
from recompute_scan.compiled.logs import logs_alone, read_records, read_text_log, write_record
from recompute_scan.trace import Limits

_FORWARD = """
class GraphModule(torch.nn.Module):
    def forward(
        self,
        primals_1: "f32[4, 8][8, 1]cpu",  # PlainAOTInput(idx=0)
        primals_2: "f32[8, 8][8, 1]cpu",  # PlainAOTInput(idx=1)
    ):
        # ac_graph_id: 4 - PREFER_RECOMPUTE File: /home/a b/train.py:6 in forward, code: f(x)
        mm: "f32[4, 8][8, 1]cpu" = torch.ops.aten.mm.default(primals_1, primals_2)
        relu: "f32[4, 8][8, 1]cpu" = torch.ops.aten.relu.default(mm);  mm = None

        # File: /home/a b/train.py:9 in forward, code: g(x)
        run_and_save_rng_state = torch.ops.higher_order.run_and_save_rng_state(\
torch.ops.aten.native_dropout.default, relu, 0.1, True)
        getitem: "u8[16][1]cpu" = run_and_save_rng_state[0]
        getitem_1 = run_and_save_rng_state[1];  run_and_save_rng_state = None
        getitem_2: "f32[4, 8][8, 1]cpu" = getitem_1[0];  getitem_1 = None
        sin: "f32[4, 8][8, 1]cpu" = torch.ops.aten.sin.default(getitem_2)
        return (sin, primals_1, primals_2, getitem)
"""
_BACKWARD = """
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[4, 8]", primals_2: "f32[8, 8]", state: "u8[16]", \
tangents_1: "f32[4, 8]"):
        mm_7: "f32[4, 8]" = torch.ops.aten.mm.default(primals_1, primals_2);  primals_2 = None
        relu_7: "f32[4, 8]" = torch.ops.aten.relu.default(mm_7)
        run = torch.ops.higher_order.run_with_rng_state(state, \
torch.ops.aten.native_dropout.default, relu_7, 0.1, True)
        getitem: "f32[4, 8]" = run[0]
        cos: "f32[4, 8]" = torch.ops.aten.cos.default(getitem)
        mul: "f32[4, 8]" = torch.ops.aten.mul.Tensor(tangents_1, cos)
        mm: "f32[4, 8]" = torch.ops.aten.mm.default(mul, primals_1)
        return (mm, None)
"""


def test_equal_work_is_found_under_other_names() -> None:
    repeats = find_repeats(parse_graph(_FORWARD), parse_graph(_BACKWARD))
    times = {node.operator: count for node, count in zip(repeats.nodes, repeats.times, strict=True)}
    # `cos` is part of the gradient's formula, and `mm` of the gradient is another product.
    assert times == {"mm": 1, "relu": 1, "native_dropout": 1, "sin": 0}
    assert repeats.gradients == {"mul": 1, "mm": 1}
    assert repeats.strange == ()


def test_an_operator_has_its_line_and_checkpoint() -> None:
    nodes = {node.name: node for node in parse_graph(_FORWARD).nodes}
    assert (nodes["mm"].file, nodes["mm"].group) == ("/home/a b/train.py:6", 4)
    assert (nodes["sin"].file, nodes["sin"].group) == ("/home/a b/train.py:9", None)
    assert shape_of(nodes["mm"].type) == (4, 8)
    assert nodes["mm"].reads == ("primals_1", "primals_2")


def test_a_product_of_nothing_known_is_strange() -> None:
    odd = _BACKWARD.replace("mm.default(primals_1, primals_2)", "mm.default(primals_2, primals_1)")
    assert find_repeats(parse_graph(_FORWARD), parse_graph(odd)).strange == ("mm",)


def test_a_length_that_changes_is_the_same_in_both_graphs() -> None:
    def graph(length: str, more: str) -> str:
        return (
            "class G(torch.nn.Module):\n"
            f'    def forward(self, s: "Sym(s27)", x: "f32[s27, 8]"{more}):\n'
            f'        {length}: "Sym(2*s27)" = 2 * s\n'
            f'        view: "f32[2*s27, 4]" = torch.ops.aten.view.default(x, [{length}, 4])\n'
            '        mm: "f32[2*s27, 4]" = torch.ops.aten.mm.default(view, view)\n'
            "        return (mm,)\n"
        )

    backward = graph("mul_9", ', tangents_1: "f32[8]"')
    assert find_repeats(parse_graph(graph("mul", "")), parse_graph(backward)).times == (1,)


def _log(*, frame: int = 0, start: bool = True) -> str:
    where = {"frame_id": frame, "frame_compile_id": 0, "attempt": 0}
    parts = [write_record({"dynamo_start": {}, **where}, "")] if start else []
    parts.append(write_record({"aot_forward_graph": {}, **where}, _FORWARD))
    parts.append(write_record({"aot_backward_graph": {}, **where}, _BACKWARD))
    return "".join(parts)


def test_records_are_read_as_they_are_written() -> None:
    partitions = read_partitions(list(read_records(_log().split("\n"))))
    (partition,) = partitions["0/0"]
    assert sum(partition.repeats.times) == 3
    assert partition.asked == (1, 1, 0, 0)  # the dropout is the compiler's own choice


def test_one_compilation_can_have_several_graphs_and_the_latest_counts() -> None:
    divided = _log() + _log(start=False)
    assert len(read_partitions(list(read_records(divided.split("\n"))))["0/0"]) == 2
    again = divided + _log()
    assert len(read_partitions(list(read_records(again.split("\n"))))["0/0"]) == 1


def test_what_is_no_record_is_passed_over() -> None:
    odd = [
        "V1 nonsense",
        'V0101 00:00:00.000000 0 a.py:1] {"aot_forward_graph": ',
        'V0101 00:00:00.000000 0 a.py:1] {"str": ["a", 1]}',
        "\tpayload of nothing",
        "V0101 00:00:00.000000 0 a.py:1] " + "[" * 100_000,
        "V0101 00:00:00.000000 0 a.py:1] {" + '"a":{' * 100_000,
    ]
    records = list(read_records([*odd, *_log().split("\n")]))
    assert [record.name for record in records][-2:] == ["aot_forward_graph", "aot_backward_graph"]


def test_a_broken_graph_gives_no_error() -> None:
    for cut in range(0, len(_BACKWARD), 37):
        find_repeats(parse_graph(_FORWARD[: 3 * cut]), parse_graph(_BACKWARD[:cut]))


def test_graph_breaks_are_told_once() -> None:
    fields = {"artifact": {"name": "dynamo_graph_break_reason", "encoding": "string"}}
    text = write_record(fields, "Graph break in user code at a.py:5") * 2
    assert graph_breaks(list(read_records(text.split("\n")))) == (
        "Graph break in user code at a.py:5",
    )


def _printed(rank: str, process: int) -> list[str]:
    """The graphs as `TORCH_LOGS=aot_graphs` prints them."""
    prefix = f"{rank}V1123 18:59:00.000000 {process} torch/_functorch/a.py:1] [0/0] [__aot_graphs] "
    said = ["TRACED GRAPH", " ===== Forward graph 0 =====", *_FORWARD.split("\n")]
    said += ["TRACED GRAPH", " ===== Backward graph 0 =====", *_BACKWARD.split("\n")]
    return [prefix + line for line in said]


def test_what_a_program_prints_has_the_same_graphs() -> None:
    (records,) = read_text_log(["step 1: loss 2.3", *_printed("", 7), "done"]).values()
    (partition,) = read_partitions(records)["0/0"]
    (structured,) = read_partitions(list(read_records(_log().split("\n"))))["0/0"]
    assert partition.repeats == structured.repeats


def test_lines_of_several_ranks_and_processes_are_told_apart() -> None:
    for one, other in ((("[rank0]:", 7), ("[rank3]:", 7)), (("", 7), ("", 8))):
        pairs = zip(_printed(*one), _printed(*other), strict=True)
        found = read_text_log([line for pair in pairs for line in pair])
        assert len(found) == 2
        assert all(len(read_partitions(records)["0/0"]) == 1 for records in found.values())


def test_what_no_gradient_asks_for_comes_last_of_its_checkpoint() -> None:
    # The mask is drawn again from its seed, so that nobody asks for the product before it.
    forward = """
class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[4, 8]", w: "f32[8, 8]", seed: "i64[]"):
        # ac_graph_id: 1 - PREFER_RECOMPUTE File: /a.py:6 in f, code: f(x)
        sin: "f32[4, 8]" = torch.ops.aten.sin.default(x)
        mm: "f32[4, 8]" = torch.ops.aten.mm.default(sin, w)
        # ac_graph_id: 1 - PREFER_RECOMPUTE File: /a.py:7 in f, code: f(x)
        mask: "f32[4, 8]" = torch.ops.prims.inductor_random.default([4, 8], seed, 'rand')
        mul: "f32[4, 8]" = torch.ops.aten.mul.Tensor(mm, mask)
        return (mul, x, seed)
"""
    backward = """
class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[4, 8]", w: "f32[8, 8]", seed: "i64[]", tangents_1: "f32[4, 8]"):
        sin: "f32[4, 8]" = torch.ops.aten.sin.default(x)
        mask: "f32[4, 8]" = torch.ops.prims.inductor_random.default([4, 8], seed, 'rand')
        mul: "f32[4, 8]" = torch.ops.aten.mul.Tensor(tangents_1, mask)
        mm: "f32[4, 8]" = torch.ops.aten.mm.default(sin, mul)
        return (mm, None)
"""

    def order(backward: str) -> list[str]:
        return [node.name for node in find_repeats(*map(parse_graph, (forward, backward))).nodes]

    assert order(backward) == ["sin", "mask", "mm", "mul"]
    # A result that is kept for the same checkpoint's own recompute is asked for.
    keeping = backward.replace('seed: "i64[]"', 'seed: "i64[]", mm: "f32[4, 8]"')
    assert order(keeping) == ["sin", "mm", "mask", "mul"]


def test_only_what_the_compiler_fuses_is_free() -> None:
    def node(target: str) -> PrintedNode:
        return PrintedNode("a", target, (), "", "f32[4]", None, None)

    priced = "aten.mm.default", "mine.mix.default", "higher_order.flex_attention"
    assert all(has_price(node(one)) for one in priced)
    free = "aten.gelu.default", "prims.convert_element_type.default"
    assert not any(has_price(node(one)) for one in free)


@pytest.mark.parametrize(
    "reentrant",
    [
        [("torch/autograd/function.py", "apply"), ("torch/utils/checkpoint.py", "forward")],
        # torch 2.14: `apply` is no Python code.
        [
            ("torch/utils/checkpoint.py", "_checkpoint_impl"),
            ("torch/utils/checkpoint.py", "forward"),
        ],
    ],
)
def test_the_variant_of_a_checkpoint_around_compiled_code_is_on_its_stack(
    reentrant: list[tuple[str, str]],
) -> None:
    called = [
        ("torch/_compile.py", "inner"),
        ("torch/_dynamo/eval_frame.py", "_fn"),
        ("torch/utils/checkpoint.py", "checkpoint"),
    ]
    module = ("torch/nn/modules/module.py", "_call_impl")
    frames = [("train.py", "step"), *called, ("model.py", "forward"), module]
    frames += [("model.py", "layer"), *called, *reentrant, module, ("model.py", "forward")]
    stack = [
        {"filename": file, "name": name, "line": number}
        for number, (file, name) in enumerate(frames)
    ]
    fields = {"dynamo_start": {"stack": stack}, "frame_id": 0, "frame_compile_id": 0}
    around = checkpoints_around(read_records(write_record(fields, "").split("\n")))["0/0"]
    assert [one.variant for one in around] == ["non-reentrant", "reentrant"]
    assert [one.call_site for one in around] == ["train.py:0", "model.py:6"]


def test_a_log_is_of_the_rank_that_its_name_tells(tmp_path: Path) -> None:
    for name in ("rank_0_6u3fubwl", "rank_12", "rank_3_a"):
        (tmp_path / f"dedicated_log_torch_trace_{name}.log").write_text(_log())
    assert [log.rank for log in logs_alone(tmp_path, Limits())] == [0, 3, 12]
