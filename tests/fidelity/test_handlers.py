"""An exception that a signal handler raises reaches the program, whatever of ours it interrupts."""

import functools
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from recompute_scan.crash import is_from_handler
from recompute_scan.fidelity.lost_gradients import Leaving
from recompute_scan.fidelity.runs import RecomputeRun
from recompute_scan.fidelity.tape import Prints
from tests.fidelity.cases import CASES
from tests.fidelity.compare import compare


class Late(Exception):
    """The program's."""


def late(*_: object) -> None:
    raise Late


class Handler:
    def __call__(self, *_: object) -> None:
        raise Late

    def method(self, *_: object) -> None:
        raise Late


@pytest.fixture(autouse=True)
def _handler_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def _interrupt(*_: object, **__: object) -> Any:
    signal.raise_signal(signal.SIGUSR1)
    raise AssertionError("the handler returned")


@pytest.mark.parametrize(
    "handler", [late, Handler(), Handler().method, functools.partial(late, 1), lambda *_: late()]
)
def test_every_kind_of_handler_is_known(handler: Any) -> None:
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(Late) as raised:
        _interrupt()
    assert is_from_handler(raised.value)


def test_an_exception_that_no_handler_raises() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with pytest.raises(ValueError, match="99") as raised:
        signal.Handlers(99)  # through the class that `SIG_DFL` is one of
    assert not is_from_handler(raised.value)


@pytest.mark.parametrize(
    ("owner", "function"),
    [
        (Prints, "of"),
        (RecomputeRun, "_see_saved"),
        (RecomputeRun, "_see_graphs"),
        (Leaving, "follow"),
        (Leaving, "note"),
    ],
)
def test_the_comparison_passes_it_on(
    owner: type, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGUSR1, late)
    monkeypatch.setattr(owner, function, _interrupt)
    with pytest.raises(Late):
        for case in CASES:
            compare(case)
