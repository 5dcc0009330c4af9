"""RS003 to RS008 fire on the state that they are named for, and stay silent on the others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from recompute_scan.analysis.pipeline import analyse, result_of
from recompute_scan.findings.base import Evidence
from recompute_scan.findings.registry import check_all, check_ranks
from recompute_scan.recompute.checks import confidence
from recompute_scan.recompute.regions import list_regions
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Checkpoint, Finding, Rank, Result
from recompute_scan.result.run_record import SwitchedOn
from tests.cases.distributed import record_ranks
from tests.recompute.training import (
    checkpointed_step,
    gradients,
    marked_step,
    no_grad,
    plain_step,
    run,
    training_step,
)
from tests.record.runs import LAYERS, record_script
from tests.trace_builder import (
    Call,
    annotation,
    document,
    launch,
    loaded,
    node,
    op,
    studied,
    thread,
)

N, R = "non-reentrant", "reentrant"


def looked(facts: RecomputeFacts, code: str, **more: object) -> tuple[str, list[Finding]]:
    evidence = Evidence(facts, list_regions(facts), None, confidence(facts), {}, **more)  # type: ignore[arg-type]
    findings, checked = check_all(evidence)
    (status,) = [one.status for one in checked if one.code == code]
    return status, [finding for finding in findings if finding.code == code]


def only(facts: RecomputeFacts, code: str, **more: object) -> Finding:
    status, findings = looked(facts, code, **more)
    assert status == "found"
    (finding,) = findings
    return finding


def marked(
    recomputes: int, variants: tuple[str, str] = (N, N), options: str = ""
) -> RecomputeFacts:
    return studied(thread(marked_step(0, recomputes, variants, options=options)))


def test_a_module_in_three_places_has_one_line() -> None:
    facts = marked(2)
    shared = tuple(structs.replace(one, module="layer") for one in list_regions(facts))
    findings, _ = check_all(Evidence(facts, shared, None, confidence(facts), {}))
    (doubled,) = [finding for finding in findings if finding.code == "RS001"]
    assert doubled.evidence[-1] == "layer: 3 forward runs per step, 2 recomputes of each"


# RS003

ON = (SwitchedOn("hf-gradient-checkpointing", "train.py:24"),)


def test_a_marked_block_without_a_recompute_is_idle() -> None:
    finding = only(marked(0), "RS003")
    assert finding.title.startswith("3 of 3 blocks are checkpointed and nothing")


def test_a_switch_that_no_call_came_from_is_idle() -> None:
    facts = studied(thread(plain_step(0)))
    finding = only(facts, "RS003", switched_on=ON)
    assert "is switched on at train.py:24, and no checkpoint was called" in finding.title
    assert finding.severity == "warning"
    own = structs.replace(
        list_regions(marked(1))[0], checkpoints=(Checkpoint(0, "reentrant", "own-function"),)
    )
    findings, _ = check_all(Evidence(facts, (own,), None, "high", {}, switched_on=ON))
    assert [finding for finding in findings if finding.code == "RS003"] == []


# RS004


def together(*recomputes: float | None) -> Result:
    result = result_of(loaded(thread(checkpointed_step(0))))
    ranks = tuple(
        Rank(rank, f"{rank}.json", "full", 10.0, value, 2.0)
        for rank, value in enumerate(recomputes)
    )
    return check_ranks(structs.replace(result, ranks=ranks))


def uneven(result: Result) -> tuple[str, list[Finding]]:
    (status,) = [one.status for one in result.checked if one.code == "RS004"]
    return status, [finding for finding in result.findings if finding.code == "RS004"]


def test_ranks_that_recompute_more_are_named() -> None:
    status, (finding,) = uneven(together(1.0, 1.0, 0.5, 1.0))
    assert status == "found"
    assert finding.title == "Ranks recompute from 0.5 to 1 times per block; most on ranks 0, 1, 3"
    assert finding.evidence[2] == "rank 2: 0.5 recomputes per block, 2.0 ms per step"


@pytest.mark.parametrize(
    ("recomputes", "status"),
    [
        ((1.0, 1.0), "clean"),
        ((1.0, 0.95), "clean"),
        ((1.0,), "not-applicable"),
        ((1.0, None), "not-applicable"),
    ],
)
def test_even_ranks_are_not_uneven(recomputes: tuple[float | None, ...], status: str) -> None:
    assert uneven(together(*recomputes))[0] == status


def test_two_traces_of_one_run_are_compared(tmp_path: Path) -> None:
    names = []
    for rank, calls in enumerate((checkpointed_step(0), checkpointed_step(0, recomputes={0: 0}))):
        names.append(tmp_path / f"rank{rank}.json")
        write(names[-1], calls)
    assert uneven(analyse([tmp_path]))[0] == "found"
    assert uneven(analyse([names[0], names[0]]))[0] == "clean"
    assert uneven(analyse([names[0]]))[0] == "not-applicable"


def write(path: Path, calls: Call) -> None:
    path.write_text(json.dumps(document(thread(calls))))


# RS005 and RS006

GATHER = annotation(
    "FullyShardedDataParallel._pre_forward",
    op("c10d::allgather_", op("record_param_comms", launch("ncclAllGather", 40.0))),
)
REDUCE = op("c10d::allreduce_", op("record_param_comms"))


def sharded_step(
    *first: Call,
    in_recompute: tuple[Call, ...] = (),
    in_hook: tuple[Call, ...] = (),
    reentrantly: bool = True,
) -> RecomputeFacts:
    """Three layers under FSDP, with communication where it is asked for."""
    forward: list[Call] = []
    backward: list[Call] = []
    for layer in range(3):
        own, again = run(100 * layer), run(100 * layer + 50)
        if reentrantly:
            inside = op("CheckpointFunction", *first, *no_grad(own), seq=100 * layer + 9)
            nodes = [
                node(
                    "CheckpointFunctionBackward",
                    *in_recompute,
                    *again,
                    *in_hook,
                    *gradients(again),
                    seq=100 * layer + 9,
                )
            ]
            if in_hook:
                engine = nodes[0]
                nodes = [replace(engine, inside=(*in_hook, *engine.inside))]
            forward.append(annotation("FullyShardedDataParallel.forward", inside))
        else:
            forward += [*first, *own]
            nodes = gradients(own, [*in_recompute, *again])
            if in_hook:
                nodes[0] = replace(nodes[0], inside=(*in_hook, *nodes[0].inside))
        backward = [*nodes, *backward]
    return studied(thread(training_step(0, *forward, *backward)))


@pytest.mark.parametrize("reentrantly", [True, False])
def test_gathers_in_recomputes_are_counted_and_timed(reentrantly: bool) -> None:
    facts = sharded_step(GATHER, in_recompute=(GATHER,), reentrantly=reentrantly)
    assert facts.judgement.verdict == "full"
    finding = only(facts, "RS005")
    assert finding.title == "Recomputes gather parameters again: 3 of 6 all-gathers per step"
    assert finding.evidence == (
        "c10d::allgather_: 3 per step inside recomputes",
        "0.12 ms per step with no computation at the same time",
    )
    assert "0.12 ms of a recorded step" in finding.detail


def test_other_communication_in_recomputes_is_told_apart() -> None:
    finding = only(sharded_step(REDUCE, in_recompute=(REDUCE,)), "RS005")
    assert finding.title == "Recomputes repeat communication: 3 collectives per step"
    assert finding.severity == "info"


def test_a_reentrant_checkpoint_under_fsdp() -> None:
    finding = only(sharded_step(GATHER), "RS006")
    assert finding.title == "3 of 3 blocks are checkpointed reentrantly under FSDP"
    assert finding.fix is not None
    assert "use_reentrant=False" in finding.fix.summary


@pytest.mark.parametrize(
    ("variants", "status"), [((N, R), "clean"), ((R, N), "clean"), ((R, R), "found")]
)
def test_what_the_advice_on_doubling_takes_out_is_not_reported_again(
    variants: tuple[str, str], status: str
) -> None:
    # The outer one is FSDP's wrapper. It stays, but for a non-reentrant one inside it.
    step = marked_step(0, 2, variants)
    facts = studied(thread(replace(step, inside=(*step.inside, annotation("FSDP::post_forward")))))
    assert looked(facts, "RS006")[0] == status


@pytest.mark.slow
def test_real_ranks_gather_again_for_a_reentrant_checkpoint_outside(tmp_path: Path) -> None:
    """Counted by hand in these traces: 13 gathers per step, 4 of them for the recomputes."""
    for name, statuses in (
        ("fsdp1_wrapper_outside_r", ("found", "found")),
        ("fsdp1_wrapper_outside", ("clean", "clean")),
        ("fsdp1_wrapper_n", ("clean", "clean")),
    ):
        (tmp_path / name).mkdir()
        record_ranks(name, tmp_path / name)
        result = analyse(sorted((tmp_path / name).glob("*.json.gz")))
        checked = {one.code: one.status for one in result.checked}
        assert (checked["RS005"], checked["RS006"]) == statuses
        assert checked["RS004"] == "clean"
        titles = [finding.title for finding in result.findings if finding.code == "RS005"]
        if titles:
            assert titles == ["Recomputes gather parameters again: 4 of 13 all-gathers per step"]


# RS008


def test_early_stop_off_is_named() -> None:
    finding = only(marked(1, options="early-stop-off"), "RS008")
    assert finding.title == "3 of 3 blocks are recomputed to their end: early stop is off"
    assert finding.severity == "warning"  # another checkpoint inside it is recomputed too
    assert (
        "depth 0: PyTorch's checkpoint wrapper, non-reentrant, early stop off"
        in (finding.evidence[0])
    )


PLAIN, CHECKPOINTED = (studied(thread(calls(0))) for calls in (plain_step, checkpointed_step))
HOOK = annotation("FullyShardedDataParallel._pre_backward_hook", op("c10d::allgather_"))


@pytest.mark.parametrize(
    ("code", "facts", "more", "status"),
    [
        ("RS001", PLAIN, {}, "clean"),
        ("RS001", CHECKPOINTED, {}, "clean"),
        ("RS002", marked(2), {}, "clean"),
        ("RS002", CHECKPOINTED, {}, "not-applicable"),
        ("RS003", marked(1), {"switched_on": ON}, "clean"),
        ("RS003", marked(2), {"switched_on": ON}, "clean"),
        ("RS003", PLAIN, {}, "not-applicable"),
        ("RS003", CHECKPOINTED, {}, "not-applicable"),
        # Compiled code calls no checkpoint while it runs.
        ("RS003", PLAIN, {"switched_on": ON, "environment": {"torch_compile": "used"}}, "clean"),
        # A gather in a hook of the backward pass is not in a recompute.
        ("RS005", sharded_step(GATHER, in_hook=(HOOK,), reentrantly=False), {}, "clean"),
        ("RS005", CHECKPOINTED, {}, "not-applicable"),
        ("RS006", sharded_step(GATHER, reentrantly=False), {}, "clean"),
        ("RS006", marked(1, (R, R)), {}, "not-applicable"),
        ("RS008", marked(1), {}, "clean"),
        ("RS008", marked(1, options="selective"), {}, "clean"),
        ("RS008", CHECKPOINTED, {}, "not-applicable"),
        ("RS008", PLAIN, {}, "clean"),
    ],
)
def test_a_rule_is_silent_on_other_states(
    code: str, facts: RecomputeFacts, more: dict[str, object], status: str
) -> None:
    assert looked(facts, code, **more)[0] == status


STEPS = LAYERS + (
    "from torch.utils.checkpoint import set_checkpoint_early_stop\n"
    "model, head = nn.Sequential(*(LAYER for _ in range(3))), Layer()\n"
    "optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 1e-3)\n"
    "for step in range(9):\n"
    "    x = torch.randn(4, 8)\n"
    "    with set_checkpoint_early_stop(ON):\n"
    "        for layer in model:\n"
    "            x = checkpoint(layer, x, use_reentrant=False)\n"
    "    head(x).sum().backward()\n"
    "    optimizer.step()\n"
)
IDLE = STEPS.replace("LAYER ", "nn.Linear(8, 8) ").replace("ON)", "True)")
EARLY_STOP = STEPS.replace("LAYER ", "Layer() ")
HUGGING_FACE = """\
import torch, warnings
from transformers import LlamaConfig, LlamaForCausalLM
warnings.simplefilter("ignore")
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, use_cache=False,
))
model.activation_checkpointing_enable()
MODE
tokens = torch.randint(0, 32, (2, 8))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(9):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
"""
# transformers checkpoints a layer in the `forward` that its class was made with.
PATCHED_CLASS = """\
class_ = type(model.model.layers[0])
forward = class_.forward
class_.forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs)
model.train()
"""
SUBCLASS = """\
class_ = type(model.model.layers[0])
class Layer(class_):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
for layer in model.model.layers:
    layer.__class__ = Layer
model.train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "found"),
    [
        (IDLE, "RS003", True),
        (HUGGING_FACE.replace("MODE", "model.eval()"), "RS003", True),
        (HUGGING_FACE.replace("MODE", "model.train()"), "RS003", False),
        (HUGGING_FACE.replace("MODE", PATCHED_CLASS), "RS003", True),
        (HUGGING_FACE.replace("MODE", SUBCLASS), "RS003", False),
        (EARLY_STOP.replace("ON", "False"), "RS008", True),
        (EARLY_STOP.replace("ON", "True"), "RS008", False),
    ],
    ids=[
        "idle",
        "evaluation",
        "training",
        "forward-replaced",
        "subclass",
        "early-stop-off",
        "early-stop-on",
    ],
)
def test_real_scripts(tmp_path: Path, script: str, code: str, found: bool) -> None:
    recorded = record_script(tmp_path, script, steps=2)
    assert recorded.status == 0, recorded.stderr
    result = analyse([recorded.output])
    assert (code in {finding.code for finding in result.findings}) == found
    assert [one.status for one in result.checked if one.code == code] == [
        "found" if found else "clean"
    ]
