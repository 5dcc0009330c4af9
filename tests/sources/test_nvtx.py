"""What an NVTX text says: operators, nodes and annotations as torch writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recompute_scan.trace import Kind
from recompute_scan.trace.nsys import parse_range

ENGINE = "autograd::engine::evaluate_function: "
OP, NOTE = Kind.OP, Kind.ANNOTATION


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aten::mm", ("aten::mm", OP, -1, "")),
        ("aten::mm, seq = 12", ("aten::mm", OP, 12, "")),
        ("aten::mm, op_id = 3", ("aten::mm", OP, -1, "")),
        ("aten::mm, seq = 0, op_id = 3", ("aten::mm", OP, 0, "")),
        (
            "aten::linear, seq = 12, op_id = 345, sizes = [[2, 8], [], [8]], "
            "input_op_ids = [(344,0), (0,-1)]",
            ("aten::linear", OP, 12, "[[2, 8], [], [8]]"),
        ),
        ("aten::cat, op_id = 4, sizes = [[]]", ("aten::cat", OP, -1, "[[]]")),
        ("AddmmBackward0, seq = 9, op_id = 8", ("AddmmBackward0", OP, 9, "")),
        ("AddBackward, stashed seq = 9", ("AddBackward", OP, 9, "")),
        (f"{ENGINE}AddmmBackward0, op_id = 7", (f"{ENGINE}AddmmBackward0", OP, -1, "")),
        (f"{ENGINE}AddmmBackward0", (f"{ENGINE}AddmmBackward0", OP, -1, "")),
        ("torch::autograd::AccumulateGrad", ("torch::autograd::AccumulateGrad", OP, -1, "")),
        ("CheckpointFunction, seq = 40, op_id = 1", ("CheckpointFunction", OP, 40, "")),
        ("_flash::fwd.default, op_id = 1", ("_flash::fwd.default", OP, -1, "")),
        ("CopyBackwards, op_id = 2", ("CopyBackwards", NOTE, -1, "")),
        ("ProfilerStep#3, op_id = 6", ("ProfilerStep#3", NOTE, -1, "")),
        ("Optimizer.step#AdamW.step, seq = 1", ("Optimizer.step#AdamW.step", NOTE, 1, "")),
        ("my::range", ("my::range", NOTE, -1, "")),
        ("forward", ("forward", NOTE, -1, "")),
        ("nccl:all_reduce, op_id = 5", ("nccl:all_reduce", NOTE, -1, "")),
        ("", ("", NOTE, -1, "")),
        ("a, seq = x, op_id = 1", ("a, seq = x", NOTE, -1, "")),
        ("a, seq = ²", ("a, seq = ²", NOTE, -1, "")),
        ("a, seq = -1", ("a, seq = -1", NOTE, -1, "")),
        (f"a, seq = {10**40}", (f"a, seq = {10**40}", NOTE, -1, "")),
        ("aten::mm, seq = 1, sizes = [<script>]", ("aten::mm", OP, 1, "")),
        ("aten::mm, seq = 1, sizes = [[2, 3", ("aten::mm", OP, 1, "")),
    ],
)
def test_the_parts_of_a_text(text: str, expected: tuple[str, int, int, str]) -> None:
    assert parse_range(text) == expected


NAMES = st.text(min_size=1, max_size=30).filter(
    lambda name: not any(part in name for part in (" = ", "seq", "op_id", "sizes"))
)
SHAPES = st.lists(st.lists(st.integers(0, 2**40), max_size=4), min_size=1, max_size=4)


@given(NAMES, st.none() | st.integers(0, 2**59), st.none() | st.integers(1, 2**59), SHAPES)
def test_what_torch_writes_is_read_back(
    name: str, sequence: int | None, number: int | None, shapes: list[list[int]]
) -> None:
    text = name if sequence is None else f"{name}, seq = {sequence}"
    text += "" if number is None else f", op_id = {number}"
    found = parse_range(f"{text}, sizes = {shapes}, input_op_ids = [(0,-1)]")
    assert (found.name, found.sequence, found.sizes) == (
        name,
        -1 if sequence is None else sequence,
        str(shapes),
    )


@given(st.text(max_size=200))
def test_any_text_has_a_meaning(text: str) -> None:
    found = parse_range(text)
    assert text.startswith(found.name)
    assert found.sequence >= -1
