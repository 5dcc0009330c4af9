"""RS007 fires where the backward pass is compiled, and says what can be seen in it."""

import pytest
import torch
import torch._functorch.config
from msgspec.structs import replace

from recompute_scan.analysis.ranks import bare_result
from recompute_scan.findings.base import Evidence, NotApplicable
from recompute_scan.findings.compiled import compiled_recompute
from recompute_scan.findings.policies import policy_matches_nothing
from recompute_scan.recompute.checks import confidence
from recompute_scan.recompute.regions import list_regions
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.report.summary import how_to_record
from recompute_scan.result import Finding, Step
from recompute_scan.result.fidelity import DecidedOperator, Policies, PolicyEntry, WatchedPolicy
from tests.present import present
from tests.recompute.attention_traces import Layout, each_layer, recorded
from tests.recompute.training import checkpointed_step, gradients, plain_step, run, study_step
from tests.trace.kineto_reading import parse
from tests.trace_builder import Call, as_bytes, document, node, op, step, studied, thread


def findings(facts: RecomputeFacts) -> list[Finding]:
    return compiled_recompute.look(
        Evidence(facts, list_regions(facts), None, confidence(facts), {})
    )


def finding(facts: RecomputeFacts) -> Finding:
    (one,) = findings(facts)
    assert (one.code, one.name, one.fix) == ("RS007", "compiled-recompute", None)
    assert "TORCH_COMPILE_DISABLE=1" in one.detail
    return one


def call(number: int) -> Call:
    """A compiled layer's forward."""
    inside = op("CompiledFunction", op("aten::mm"), seq=number)
    return op("Torch-Compiled Region: 0/0", inside)


def backward(number: int, *inside: str, recompute: tuple[Call, ...] = ()) -> Call:
    formula = [op(name) for name in (*inside, "aten::mm")]
    return node("CompiledFunctionBackward", *recompute, *formula, seq=number)


@pytest.mark.parametrize("calls", [plain_step(0), checkpointed_step(0)])
def test_silent_where_nothing_is_compiled(calls: Call) -> None:
    assert findings(studied(thread(calls))) == []


def test_not_applicable_without_a_backward_pass() -> None:
    with pytest.raises(NotApplicable):
        findings(studied(thread(step(0, op("aten::mm")))))


def test_a_compiled_backward_is_named() -> None:
    found = finding(study_step(call(0), backward(0)))
    assert found.severity == "info"
    assert found.title == (
        "100 % of the backward pass is compiled: what the compiler recomputes there cannot be seen"
    )
    assert found.evidence == ("1 compiled node in the backward pass",)


def test_its_share_is_that_of_the_backward_pass() -> None:
    layer = run(10)
    found = finding(study_step(call(0), *layer, *gradients(layer), backward(0)))
    assert found.title.startswith("20 % of the backward pass")


@pytest.mark.parametrize(
    ("operator", "recomputes"),
    [
        ("aten::_scaled_dot_product_flash_attention", True),
        ("flash_attn_3::fwd", True),
        ("aten::convolution", True),
        ("aten::linear", True),
        # A product and a sum, made one by Inductor.
        ("aten::addmm", False),
        ("aten::bmm", False),
        ("triton_poi_fused_gelu_0", False),
        ("flash_attn_3::bwd", False),
        ("aten::_scaled_dot_product_flash_attention_backward", False),
        ("aten::convolution_backward", False),
    ],
)
def test_forward_work_inside_is_told_from_a_formula(operator: str, recomputes: bool) -> None:
    facts = study_step(call(0), backward(0, operator))
    found = finding(facts)
    assert ("runs forward work again" in found.title) == recomputes
    assert found.severity == "info"
    assert facts.judgement.verdict == "inconclusive"
    assert "compiled" in (facts.judgement.reason or "")


def test_a_recompute_of_compiled_code_is_counted_and_named() -> None:
    facts = study_step(call(0), backward(0, recompute=(call(50),)))
    found = finding(facts)
    assert facts.judgement.highest == 1.0
    assert found.severity == "info"
    assert found.evidence[1] == "1 compiled call ran again outside these nodes"
    assert "by checkpoints around compiled code" in found.detail


@pytest.mark.parametrize(("again", "confidence_of_it"), [(True, "medium"), (False, "high")])
def test_a_policy_around_compiled_code_sees_no_operator_of_it(
    again: bool, confidence_of_it: str
) -> None:
    """An operator that it names and never meets may be in the compiled code."""
    facts = study_step(call(0), backward(0, recompute=(call(50),) if again else ()))
    asked = DecidedOperator("aten.view.default", 2, {"PREFER_RECOMPUTE": 2})
    entry = PolicyEntry("aten.mm.default", "operator", "kept", met=0, kept=0)
    policy = WatchedPolicy(
        "keep", "train.py:3", True, "train.py:9", "", 1, 1, operators=(asked,), entries=(entry,)
    )
    regions = list_regions(facts)
    evidence = Evidence(facts, regions, None, confidence(facts), {}, policies=Policies((policy,)))
    (one,) = policy_matches_nothing.check(evidence)
    assert one.confidence == confidence_of_it
    assert ("compiled" in one.detail) == again
    assert ("Compile the code that calls the checkpoint" in present(one.fix).summary) == again


def test_both_at_once_is_a_warning() -> None:
    attention = "aten::_scaled_dot_product_flash_attention"
    facts = study_step(call(0), backward(0, attention, recompute=(call(50),)))
    found = finding(facts)
    assert found.severity == "warning"
    assert facts.judgement.verdict == "inconclusive"


def test_attention_kernels_are_told() -> None:
    compiled = document(thread(step(99, call(0), backward(0))), tid=1)["traceEvents"]
    kernels = recorded(Layout(4, each_layer(4)))
    last = max(event["ts"] + event["dur"] for event in kernels)
    events = kernels + [{**event, "ts": event["ts"] + last + 50} for event in compiled]
    found = finding(study(parse(as_bytes({"traceEvents": events}), "kernels")))
    assert found.evidence[-1] == ("attention kernels: 12 backward, 12 forward ones that ran again")


def test_a_memory_budget_below_one_is_a_warning_about_gradients() -> None:
    facts = study_step(call(0), backward(0))
    environment = {"activation_memory_budget": "0.5"}
    known = Evidence(facts, list_regions(facts), None, confidence(facts), {})
    found = compiled_recompute.look(replace(known, environment=environment))
    assert isinstance(found, list)
    assert found[0].severity == "warning"
    assert "memory budget was 0.5" in found[0].detail
    assert "190758" in found[0].detail
    assert "memory budget" not in finding(facts).detail


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(("budget", "same"), [(1.0, True), (0.5, False)])
def test_below_one_the_compiler_draws_another_mask(budget: float, same: bool) -> None:
    @torch.compile
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.sin().exp(), 0.5, True).cos()

    torch.manual_seed(0)
    x = torch.ones(64, 64, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        out = dropped(x)
        out.sum().backward()
    torch._dynamo.reset()
    assert torch.equal(present(x.grad) == 0, out == 1) is same  # cos(0) where the mask is off


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"torch_compile": "used", "torch": "2.6.0+cu124"}, "torch 2.10 or newer"),
        ({"torch_compile": "used", "torch": "2.14.1"}, "logging.disable()"),
        ({}, "run keeps them"),
    ],
)
def test_what_to_record_says_why_the_graphs_do_not_tell(
    environment: dict[str, str], said: str
) -> None:
    reason = "The backward pass is compiled: nobody knows."
    result = bare_result(reason, "", environment=environment)
    advice = how_to_record(result)
    assert said in advice.why
    assert ("TORCH_COMPILE_DISABLE" in advice.command) is bool(environment)
    other = how_to_record(replace(result, reason="The trace holds no backward pass."))
    assert "TORCH_COMPILE_DISABLE" not in other.command


def test_what_was_just_recorded_is_not_asked_for_again() -> None:
    result = bare_result("A checkpoint ran something else.", "")
    whole = Step(0, 0.0, 1.0, complete=True, micro_batches=1, forward_ops=1, recomputed_ops=0)
    recorded = replace(result, evidence_level="annotated", steps=(whole,))
    assert "--verify --without-checkpointing" in how_to_record(recorded).command
    assert "whole training step" not in how_to_record(recorded).why
    assert "whole training step" in how_to_record(replace(recorded, steps=())).why
