"""What modules count or collect outside of buffers: changed twice is said, set again is not."""

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from recompute_scan.result.fidelity import KeptState
from tests.fidelity.cases import Case, Own, net
from tests.fidelity.compare import compare, wrong
from tests.findings.test_fidelity_rules import result

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Stats:
    calls: int = 0


class Keeping(Own):
    """Has all that the cases below count in."""

    total = 0

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__(then)
        self.seen: list[int] = []
        self.by_name = {"n": 0, "deep": {"n": [0]}}
        self.stats, self.mean = Stats(), torch.zeros(32)
        self.names, self.last = {"a"}, collections.deque[float](maxlen=3)
        self.weights: Any = None
        self.cache: Any = None


def _in_attribute(layer: Any, x: torch.Tensor) -> Any:
    layer.n += 1
    return x.sin()


def _in_list(layer: Any, x: torch.Tensor) -> Any:
    layer.seen.append(1)
    return x.sin()


def _in_dictionary(layer: Any, x: torch.Tensor) -> Any:
    layer.by_name["deep"]["n"][0] += 1
    return x.sin()


def _in_object(layer: Any, x: torch.Tensor) -> Any:
    layer.stats.calls += 1
    return x.sin()


def _in_mean(layer: Any, x: torch.Tensor) -> Any:
    layer.mean = 0.9 * layer.mean + 0.1 * x.detach().mean(0)
    return x.sin()


def _in_class(layer: Any, x: torch.Tensor) -> Any:
    type(layer).total += 1
    return x.sin()


def _in_set(layer: Any, x: torch.Tensor) -> Any:
    layer.names.add(f"{len(layer.names)}")
    return x.sin()


def _set_again(layer: Any, x: torch.Tensor) -> Any:
    layer.weights, layer.flag = x.detach().softmax(-1), True
    layer.shape = {"last": tuple(x.shape)}
    return x.sin()


def _made_once(layer: Any, x: torch.Tensor) -> Any:
    if layer.cache is None:
        layer.cache = torch.ones(x.shape[-1])
    return x * layer.cache


def _only_in_the_forward(layer: Any, x: torch.Tensor) -> Any:
    if torch._C._current_graph_task_id() == -1:
        layer.n += 1
    return x.sin()


def states(then: Callable[..., Any]) -> list[KeptState]:
    found, _, untrained = compare(Case("", False, net(lambda: Keeping(then), use_reentrant=False)))
    assert wrong(found, untrained) == []
    return [state for region in found.regions for state in region.states]


@pytest.mark.parametrize(
    ("then", "name", "before", "behind"),
    [
        (_in_attribute, "n", "0", "2"),
        (_in_list, "seen", "0 items", "2 items"),
        (_in_dictionary, "by_name['deep']['n'][0]", "0", "2"),
        (_in_object, "stats.calls", "0", "2"),
        (_in_mean, "mean", "0", None),
        (_in_set, "names", "1 items", "3 items"),
    ],
)
def test_what_is_changed_twice_is_named(
    then: Callable[..., Any], name: str, before: str, behind: str | None
) -> None:
    found = states(then)
    assert {state.name for state in found} == {f"layers.{at}.{name}" for at in range(3)}
    assert not any(state.is_buffer for state in found)
    assert found[0].before == before
    assert behind in (None, found[0].recompute)


def test_what_the_class_counts_is_named() -> None:
    assert "layers.0.total" in {state.name for state in states(_in_class)}


@pytest.mark.parametrize("then", [_set_again, _made_once, _only_in_the_forward])
def test_what_is_set_again_or_once_is_not(then: Callable[..., Any]) -> None:
    assert states(then) == []


@pytest.mark.parametrize(("then", "severity"), [(_in_attribute, "info"), (_in_mean, "warning")])
def test_the_finding_says_nothing_of_gradients(then: Callable[..., Any], severity: str) -> None:
    case = Case("", False, net(lambda: Keeping(then), use_reentrant=False))
    found, _, _ = compare(case)
    (finding,) = [one for one in result(found).findings if one.code == "RS404"]
    assert finding.severity == severity
    assert not finding.wrong_gradients
    assert "layers.0." in finding.title


def test_no_code_of_the_script_runs_for_a_look() -> None:
    class Touchy:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        @property
        def calls(self) -> int:
            raise AssertionError

        def __len__(self) -> int:
            raise AssertionError

        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __hash__ = None  # type: ignore[assignment]

    def then(layer: Any, x: torch.Tensor) -> Any:
        layer.touchy = Touchy()
        return x.sin()

    assert states(then) == []
