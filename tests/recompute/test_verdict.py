"""Each verdict, and each reason for having none, from traces of a few lines."""

import pytest

from recompute_scan.recompute.study import RecomputeFacts
from tests.recompute.training import (
    gradients,
    no_grad,
    run,
    study_step,
)
from tests.trace_builder import Call, annotation, launch, node, op, step, studied, thread


def verdict(*calls: Call) -> str:
    return study_step(*calls).judgement.verdict


def test_none_where_a_gradient_of_gradients_convolves() -> None:
    """Its formula is made of the forward's operators, each twice, down to the library's own."""

    def convolution(seq: int | None) -> Call:
        return op("aten::convolution", op("aten::cudnn_convolution"), seq=seq)

    forward = [op("aten::conv2d", convolution(place)) for place in range(3)]
    first = [node("ConvolutionBackward0", op("aten::mm", seq=10 + n), seq=n) for n in (2, 1, 0)]
    formula = op("aten::_convolution_double_backward", convolution(None), convolution(None))
    second = [node("ConvolutionBackwardBackward0", formula, seq=10 + n) for n in (0, 1, 2)]
    facts = study_step(*forward, *first, *second)
    assert (facts.judgement.verdict, facts.plain.agrees) == ("none", True)


def test_what_takes_no_time_does_not_make_a_verdict() -> None:
    """One operator of 0.1 % of the forward runs twice, all else once."""
    layer = [
        op("aten::linear", op("aten::addmm", us=10_000), seq=0),
        op("aten::relu", op("aten::clamp_min", us=10), seq=1),
        op("aten::gelu", op("aten::_gelu", us=10_000), seq=2),
    ]
    tail = [call.again() for call in layer[1:2]]
    again = [call.again() for call in layer]
    backward = gradients(layer, [*tail, *again])
    numbered = op("aten::detach", seq=99)  # the recompute's end
    backward[0] = node("GeluBackward0", *tail, *again, numbered, op("aten::mm"), seq=2)
    facts = study_step(*layer, *backward)
    assert facts.judgement.verdict == "full"


def without_verdict(facts: RecomputeFacts) -> str:
    judgement = facts.judgement
    assert judgement.verdict == "inconclusive"
    assert (judgement.highest, judgement.mean, judgement.share) == (None, None, None)
    assert judgement.reason is not None
    return judgement.reason


def test_no_verdict_without_operators() -> None:
    facts = studied(thread(step(0, launch("gemm"), launch("gemm"))))
    assert "no operators" in without_verdict(facts)


def test_no_verdict_without_a_backward_pass() -> None:
    assert "no backward" in without_verdict(study_step(*run(0), *no_grad(run(10))))


def test_no_verdict_where_the_backward_belongs_to_no_recorded_forward() -> None:
    # Recording began between the two.
    facts = studied(thread(step(0, *gradients(run(0))), step(1, *no_grad(run(0)))))
    assert "with its backward pass" in without_verdict(facts)


def test_no_verdict_from_recomputes_of_a_forward_that_has_no_backward() -> None:
    teacher, trained = no_grad(run(0)), run(40, ("relu", "mse_loss", "relu"))
    again = run(50)
    backward = gradients(trained, again)
    facts = study_step(*teacher, *trained, *backward)
    assert "without a backward pass" in without_verdict(facts)


@pytest.mark.parametrize("name", ["CompiledFunctionBackward", "torch::CompiledFunctionBackward"])
def test_no_verdict_where_the_backward_is_compiled(name: str) -> None:
    forward = op("CompiledFunction", op("aten::mm"), seq=0)
    backward = node(name, annotation("Torch-Compiled Region", op("triton_poi_fused_add_0")), seq=0)
    assert "compiled" in without_verdict(study_step(forward, backward))


def test_a_recompute_is_seen_beside_a_compiled_backward() -> None:
    compiled, layer = op("CompiledFunction", op("aten::mm"), seq=0), run(10)
    backward = [*gradients(layer, run(50)), node("CompiledFunctionBackward", op("aten::mm"), seq=0)]
    assert verdict(compiled, *layer, *backward) == "full"
