"""A fingerprint tells tensors apart, and nobody sees it being taken."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recompute_scan.fidelity import tensors
from recompute_scan.fidelity.runs import ForwardRun
from recompute_scan.fidelity.tape import Prints
from recompute_scan.fidelity.tensors import (
    Fingerprint,
    fingerprint,
    number_of,
    table_of,
    unseen,
)
from tests.present import present

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def taken(tensor: torch.Tensor) -> Fingerprint:
    return present(unseen(fingerprint, tensor))


def number(tensor: torch.Tensor) -> int:
    """As it is worked out on a GPU."""
    found = torch.empty((), dtype=torch.int64)
    number_of(tensor.reshape(-1), found)
    return int(found)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are treated as those of a GPU are."""
    monkeypatch.setattr(tensors, "_on_host", lambda _: False)


def lying_print(tensor: torch.Tensor) -> Fingerprint | None:
    return Prints(()).of(tensor)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_copy_has_the_same_bits_whatever_its_strides(dtype: torch.dtype) -> None:
    one = (torch.randn(40, 33) * 3).to(dtype)
    assert taken(one).same_bits(taken(one.t().contiguous().t()))
    assert taken(one).distance(taken(one.clone())) == 0


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 33), (2, 3, 1, 8), (600, 700)], ids=str)
def test_tensors_looked_at_as_they_lie_are_compared_in_one_order(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    one = (torch.randn(shape) * 3).to(dtype)
    lying = one.transpose(0, -1).contiguous().transpose(0, -1)
    assert lying.stride() != one.stride()
    changed = lying.clone()
    changed[(0,) * len(shape)] = 1 - changed[(0,) * len(shape)].to(torch.float32)
    prints = [unseen(lying_print, t) for t in (one, lying, changed)]
    straight, across, other = (print_ for print_ in prints if print_ is not None)
    assert across.order == lying.stride()
    assert straight.same_bits(across)
    assert across.same_bits(straight)
    assert straight.distance(across) == 0
    assert across.same_bits(taken(one))
    assert not straight.same_bits(other)
    assert not other.same_bits(straight)
    straight.let_go(keep=True)
    assert straight.same_bits(across)
    apart = present(straight.distance(other))
    assert apart > 0


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(4, 6)[:, ::2], torch.randn(4, 1).expand(4, 6), torch.randn(9).unfold(0, 3, 2)],
    ids=["gaps", "one for many", "overlaps"],
)
def test_what_does_not_lie_in_one_piece_is_looked_at_as_it_counts(tensor: torch.Tensor) -> None:
    lying = present(unseen(lying_print, tensor))
    assert lying.order == ()
    assert lying.same_bits(taken(tensor.contiguous()))


@settings(deadline=None)
@given(st.integers(1, 5000), st.data())
def test_one_changed_element_changes_the_bits(size: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, size - 1))
    one = torch.arange(size, dtype=torch.float32)
    other = one.clone()
    other[place] += 0.5
    assert not taken(one).same_bits(taken(other))
    assert number(one) != number(other)


@settings(deadline=None)
@given(st.integers(2, 5000), st.data())
def test_two_elements_exchanged_change_the_bits(size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 2))
    second = data.draw(st.integers(first + 1, size - 1))
    one = torch.arange(size, dtype=torch.float32)
    other = one.clone()
    other[first], other[second] = one[second], one[first]
    assert not taken(one).same_bits(taken(other))
    assert number(one) != number(other)


def test_another_order_of_summation_is_rounding_and_another_mask_is_not() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 512), torch.randn(512, 64)
    whole = x @ w
    # No whole number of any kernel's blocks, which would be summed in the same order.
    uneven = (101, 411)
    parts = zip(x.split(uneven, dim=1), w.split(uneven), strict=True)
    apart = taken(whole).distance(taken(sum((a @ b for a, b in parts), torch.zeros(64, 64))))
    assert apart is not None
    assert 0 < apart < taken(whole).rounding()
    masked = present(taken(whole * (torch.rand_like(whole) > 0.1)).distance(taken(whole)))
    assert masked > taken(whole).rounding()


def test_memory_can_be_resized_as_before() -> None:
    tensor = torch.randn(100)
    taken(tensor)
    tensor.untyped_storage().resize_(0)  # as FSDP frees its parameters
    assert tensor.untyped_storage().size() == 0


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_tensors_without_elements_and_with_infinite_ones(rows: int) -> None:
    empty = torch.empty(rows, 0)
    assert taken(empty).same_bits(taken(torch.empty(rows, 0)))
    mask = torch.full((rows + 1, 3), float("-inf"))
    assert taken(mask).distance(taken(mask.clone())) == 0


@pytest.mark.parametrize("dtype", TYPES[:4], ids=str)
def test_numpy_says_nothing_of_infinities_however_strict_the_script_set_it(
    dtype: torch.dtype,
) -> None:
    one = torch.rand(70, 80, dtype=torch.float64).mul_(torch.finfo(dtype).max).to(dtype)
    one[::7], one[1::7] = float("inf"), float("-inf")
    other = one.clone()
    other[2] = float("nan")
    with np.errstate(all="raise"):
        assert taken(one).distance(taken(other)) == float("inf")
        assert taken(one).distance(taken(one.clone())) == 0


def test_what_has_no_elements_to_look_at_has_no_fingerprint() -> None:
    assert fingerprint(torch.empty(3, device="meta")) is None


def test_a_sparse_tensor_is_its_values_and_where_they_are() -> None:
    one, moved = torch.eye(3), torch.eye(3).roll(1, 0)
    assert taken(one.to_sparse()).same_bits(taken(one.clone().to_sparse()))
    assert not taken(one.to_sparse()).same_bits(taken(moved.to_sparse()))
    assert not taken(one.to_sparse()).same_bits(taken((one * 2).to_sparse()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("place", [0, 1, 77777, 299999])
def test_one_element_that_differs_altogether_is_no_rounding(dtype: torch.dtype, place: int) -> None:
    one = torch.randn(300, 1000).to(dtype)
    other = one.clone()
    other.view(-1)[place] = 100
    apart = present(taken(one).distance(taken(other)))
    exact = float((one - other).double().norm() / one.double().norm())
    assert apart == pytest.approx(exact, rel=0.2)
    assert apart > taken(one).rounding()


@pytest.mark.parametrize("shape", [(300, 1000), (1, 7, 513), (256, 256), (70000,)], ids=str)
def test_the_distance_is_that_of_all_elements(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    one = torch.randn(shape)
    constant = taken(one).distance(taken(one + 0.01))
    assert constant == pytest.approx(0.01, rel=0.5)
    for other in (one * 1.01, one + 0.01 * torch.randn(shape), one.roll(7, -1)):
        apart = taken(one).distance(taken(other))
        exact = float((one - other).norm() / one.norm())
        assert apart == pytest.approx(exact, rel=0.35)


class Seen:
    """Notes what a mode is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def note(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Dispatches(Seen, TorchDispatchMode):
    __torch_dispatch__ = Seen.note


class Functions(Seen, TorchFunctionMode):
    __torch_function__ = Seen.note


def test_no_mode_of_the_script_sees_one_being_taken() -> None:
    tensor = torch.randn(100, requires_grad=True)
    with Dispatches() as dispatches, Functions() as functions:
        found = present(unseen(fingerprint, tensor))
        sums = found.sums
    assert dispatches.seen == []
    assert functions.seen == []
    assert sums is not None
    assert len(sums.values) == 32


@pytest.mark.parametrize(
    "saved", [torch.ones(3), torch.eye(3).to_sparse()], ids=["dense", "sparse"]
)
def test_no_mode_of_the_script_sees_what_is_saved_being_looked_at(saved: torch.Tensor) -> None:
    failures: list[str] = []
    run = ForwardRun(failures.append, None, {}, {})
    with Dispatches() as dispatches, Functions() as functions:
        run.saved(saved, 0)
    with Dispatches() as alone:
        run.saved(saved, 1)
    assert dispatches.seen == functions.seen == alone.seen == []
    assert failures == []
    first, second = run.prints
    assert first is not None
    assert second is not None
    assert first.same_bits(second)


def test_the_distance_is_worked_out_later_and_holds_no_tensor_behind() -> None:
    one, other = torch.randn(40, 33), torch.randn(40, 33)
    kept, gone = taken(one), taken(other)
    kept.let_go(keep=True)
    exact = float((one - other).norm() / one.norm())
    assert kept.distance(gone) == pytest.approx(exact, rel=0.35)
    gone = taken(other)
    gone.let_go(keep=False)
    assert kept.distance(gone) is None
    assert kept.distance(gone.held(other)) == pytest.approx(exact, rel=0.35)
    before = sys.getrefcount(one)
    kept.let_go(keep=True)
    assert sys.getrefcount(one) == before


def test_the_same_elements_in_another_shape_keep_their_fingerprint() -> None:
    one = torch.randn(6, 50)
    other = taken(one).held(one.view(3, 100))
    assert other.same_bits(taken(one.view(3, 100)))
    assert not other.same_bits(taken(one))


def _given_back(tensor: torch.Tensor, size: int = 0) -> torch.Tensor:
    tensor.untyped_storage().resize_(size)
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: _given_back(torch.randn(1000)),
        lambda: _given_back(torch.randn(1000)[100:]),
        lambda: _given_back(torch.randn(40, 30).t()),
        lambda: _given_back(torch.randn(40, 30)[:, ::2]),
        lambda: _given_back(torch.randn(1_000_000), 64),
        lambda: _given_back(torch.randn(1000, 1000)[:, ::2], 64),
        lambda: torch._efficientzerotensor(300),
        lambda: torch._to_functional_tensor(torch.randn(300)),
    ],
    ids=[
        "all",
        "at an offset",
        "turned",
        "with gaps",
        "part",
        "part of gaps",
        "zeros",
        "transform",
    ],
)
def test_memory_that_is_not_there_is_not_looked_at(make: Any) -> None:
    assert unseen(fingerprint, make()) is None


def test_signs_that_a_view_turns_count() -> None:
    one = torch.randn(300, dtype=torch.complex64)
    turned = torch._neg_view(one)
    assert taken(turned).same_bits(taken(-one))
    assert not taken(turned).same_bits(taken(one))


def test_where_one_cannot_be_summed_up_none_is_held() -> None:
    prints = Prints([ForwardRun(print, None, {}, {})])
    nowhere = torch.zeros(300, dtype=torch.uint8).view(torch.bits8)
    made = [prints.of(one) for one in (nowhere, torch.randn(300))]
    with pytest.raises(RuntimeError):
        unseen(prints.let_go)
    assert [print_._tensor for print_ in made if print_ is not None] == [None, None]


WIDTHS = {
    torch.uint8: 1,
    torch.bool: 1,
    torch.float8_e4m3fn: 1,
    torch.bfloat16: 2,
    torch.float32: 4,
    torch.float64: 8,
}
# Less than a word, one that is not full, and on both sides of where words are added up first.
SIZES = (1, 3, 8, 9, 1001, 131_071, 131_072, 131_080, 500_001)


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_bit_and_its_place_count_on_a_gpu(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    one = (torch.randn(size, generator=generator) * 3).to(dtype)
    mine = number(one)
    assert number(one.clone()) == mine
    width = WIDTHS[dtype]
    for place in {0, width * size - 1, width * (size // 2), width * (size // 3)}:
        for bit in (1,) if dtype is torch.bool else (1, 8, 128):
            other = one.clone()
            other.view(torch.uint8)[place] ^= bit
            assert number(other) != mine
    other = one.clone().view(torch.uint8)
    first, last = other[:width].clone(), other[-width:].clone()
    other[:width], other[-width:] = last, first
    assert (number(other.view(dtype)) == mine) == bool((first == last).all())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_turned_signs_count_on_a_gpu(dtype: torch.dtype, size: int) -> None:
    one = torch.rand(size, dtype=dtype) + 0.5
    turned = [-one, torch.cat((-one[: size // 2], one[size // 2 :]))]
    every_other = one.clone()
    every_other[1::2] *= -1  # as the conjugates of complex numbers
    numbers = [number(each) for each in (one, *turned, every_other)]
    assert len(set(numbers)) == (
        4 if size > 3 else len({tuple(t.tolist()) for t in (one, *turned, every_other)})
    )


@pytest.mark.parametrize("width", [8, 64, 1021, 1024])
def test_rows_that_are_exchanged_count_on_a_gpu(width: int) -> None:
    """Each holds the same numbers, as where tokens are sent to experts."""
    torch.manual_seed(0)
    chosen = torch.randint(width, (8192,))
    one = torch.nn.functional.one_hot(chosen, width).to(torch.bfloat16)
    mine = number(one)
    for row in (1, 2, 64, 1021, 1024, 4096, 8191):
        other = one.clone()
        other[[0, row]] = other[[row, 0]]
        assert (number(other) == mine) == (chosen[0] == chosen[row])


@given(st.integers(2**14 + 1, 2**33))
def test_the_table_holds_each_word_and_no_other(words: int) -> None:
    rows, stride, length = table_of(words)
    assert (rows - 1) * stride + length == words
    assert length >= stride
    assert length % 2
    assert max(rows, length) < 3000 + words // 500


class Kernels(TorchDispatchMode):
    """Counts operators that run something, and those that wait for what has run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        returns = func._schema.returns
        name = func._schema.name.partition("::")[2]
        if not any(one.alias_info and not one.alias_info.is_write for one in returns) and (
            name != "empty"
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(64, 64), (2048, 2048)], ids=str)
@pytest.mark.usefixtures("away")
def test_on_a_gpu_six_kernels_take_a_fingerprint_and_nothing_waits(shape: tuple[int, ...]) -> None:
    one = torch.randn(shape)
    for each in (fingerprint(one), fingerprint(one)):  # what is kept for all is there then
        assert each is not None
        each.let_go(keep=True)
        _ = each.bits, each.sums
    with Kernels() as taking:
        mine = fingerprint(one)
    assert mine is not None
    assert 0 < len(taking.names) <= 6
    with Kernels() as keeping:
        mine.let_go(keep=True)
    assert 0 < len(keeping.names) <= 4
    waits = {"_local_scalar_dense", "_to_copy", "item", "nonzero"}
    assert not waits & {*taking.names, *keeping.names}


@pytest.mark.usefixtures("away")
def test_numbers_of_a_gpu_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    rest = tensors.Ledger._rest

    def counted(ledger: tensors.Ledger) -> list[int]:
        found = rest(ledger)
        read.append(len(found))
        return found

    monkeypatch.setattr(tensors.Ledger, "_rest", counted)
    monkeypatch.setattr(tensors, "_LEDGER", 50)
    monkeypatch.setattr(tensors, "_ledgers", tensors._Ledgers())
    each = [torch.randn(3, 5) for _ in range(70)]
    prints, again = [taken(one) for one in each], [taken(one.clone()) for one in each]
    assert read == []
    assert [one.same_bits(other) for one, other in zip(prints, again, strict=True)] == [True] * 70
    assert not prints[0].same_bits(again[1])
    assert read == [50, 50, 40]


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1024, 1024), (300, 1000), (1, 7, 513), (5,)], ids=str)
def test_the_distance_on_a_gpu_is_that_of_all_elements(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    features = torch.rand(shape[-1]) * 4
    near = 0.45 if len(shape) == 1 or shape[0] == 1 else 0.3
    for one in (torch.randn(shape), torch.randn(shape).relu() + 1, torch.randn(shape) + features):
        mine = one.to(dtype)
        for other in (one * 1.1, one + 0.1 * torch.randn(shape), one.roll(7, -1), one + 0.1):
            theirs = other.to(dtype)
            exact = float((mine.double() - theirs.double()).norm() / mine.double().norm())
            apart = taken(mine).distance(taken(theirs))
            assert apart == pytest.approx(exact, rel=near)


@pytest.mark.usefixtures("away")
def test_infinities_on_a_gpu_are_compared_where_they_are() -> None:
    one = torch.randn(4, 8)
    one[0] = float("-inf")
    other = one.clone()
    other[1, 1] += 1
    assert taken(one).distance(taken(one.clone())) == 0
    apart = present(taken(one).distance(taken(other)))
    assert apart > 0.01
    other[2, 2] = float("inf")
    assert taken(one).distance(taken(other)) == float("inf")
