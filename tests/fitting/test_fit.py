"""`recompute_scan.fit`: every arrangement computes the same, within its budget."""

import gc
import io
import json
import signal
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recompute_scan
from recompute_scan.cost.arrangement import KEEP, RECOMPUTE
from recompute_scan.errors import InputError, UsageError
from recompute_scan.fitting import control
from recompute_scan.fitting.control import Fitted
from tests.fitting.models import LIMIT, WORDS, Net, alike, loss_of, train
from tests.plan.oracle import Saved
from tests.present import present
from tests.record.residue import left_behind
from tests.record.runs import forked_script, record_target, write_script

KINDS = """plain, recurrent, dropout, batch, batch dropout averaged, counts, average, spectral,
random, aux, list, tuple, dropout keyword, tied, shared, in place, dropout accumulated, dropout
autocast, dropout twice, dropout evaluated clipped, penalty, dropout averaged, checkpoint
dropout, checkpoint reentrant dropout""".replace("\n", " ").split(", ")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.collect()  # a fitted model that is gone takes its hooks along
    for one in list(control._FITTED):  # a traceback can hold others
        one.stop()


def fitted(model: Any) -> Fitted:
    found = present(recompute_scan.fitted(model))
    assert found.failure is None
    return found


def _note(kept: list[Any], model: Any) -> None:
    kept.append(recompute_scan.fitted(model))


def choices(model: Any) -> list[int]:
    return [one.choice for one in fitted(model)._switch.layers if not one.is_part]


def peak_of(model: Any, tokens: Any) -> int:
    """Most that a step saves, by an oracle that knows nothing of fit."""
    saved = Saved(model)
    with saved.counting():
        models = model if isinstance(model, nn.ModuleList) else [model]
        total: Any = sum(loss_of(one, tokens) for one in models)
        total.backward()
    return saved.peak


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_state_are_those_of_the_plain_training(kind: str) -> None:
    plain, losses = train(kind)
    model, found = train(kind, fit=LIMIT)
    assert found == losses
    assert alike(model, plain)
    if "checkpoint" in kind:  # the script's own stay
        assert recompute_scan.fitted(model) is None
        return
    assert fitted(model).settled
    if "in place" not in kind:
        assert {KEEP, RECOMPUTE} <= set(choices(model))


@pytest.mark.parametrize("variant", ["", "reentrant"])
def test_checkpoints_of_the_script_are_replaced_where_asked(
    variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = f"checkpoint dropout {variant}"
    _, losses = train(kind)
    model, found = train(kind, fit=LIMIT, replace=True)
    assert found == losses
    assert {KEEP, RECOMPUTE} <= set(choices(model))
    recompute_scan.fit(model, LIMIT)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, torch.randint(0, WORDS, (4, 16))).backward()
    optimizer.step()
    assert "the script checkpoints 6 layers itself" in capsys.readouterr().err


def test_the_peak_is_the_predicted_one_and_within_the_limit() -> None:
    tokens = torch.randint(0, WORDS, (4, 16))
    for limit in ("50%", "70%", "95%"):
        model, _ = train(fit=limit)
        plan = present(fitted(model).plan)
        assert plan.plan.peak_bytes <= present(plan.budget_bytes)
        assert peak_of(model, tokens) == plan.plan.peak_bytes


def test_a_plan_is_saved_and_begun_with(tmp_path: Path) -> None:
    model, losses = train("dropout", fit=LIMIT)
    path = tmp_path / "plan.json"
    fitted(model).save(path)
    again, found = train("dropout", fit=LIMIT, plan=path, steps=20)
    assert found == losses
    assert choices(again) == choices(model)
    assert fitted(again).plan == fitted(model).plan
    path.write_text("{}")
    with pytest.raises(InputError, match="E306"):
        train(fit=LIMIT, plan=path)


def test_eighty_layers_are_solved_in_two_seconds() -> None:
    torch.manual_seed(0)
    model = recompute_scan.fit(Net("dropout", 80), LIMIT, quiet=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    took = []
    for _ in range(12):
        loss_of(model, torch.randint(0, WORDS, (4, 16))).backward()
        optimizer.zero_grad()
        began = time.process_time()
        optimizer.step()  # at whose end fit thinks
        took.append(time.process_time() - began)
    assert fitted(model).settled
    assert {KEEP, RECOMPUTE} <= set(choices(model))
    assert max(took) < 2


def test_longer_inputs_get_arrangements_of_their_own() -> None:
    def length(step: int) -> int:
        return (16, 16, 8, 16, 24, 12)[step % 6] if step < 30 else (16, 64)[step % 2]

    _, losses = train("dropout", steps=40, length=length)
    model, found = train("dropout", fit=LIMIT, steps=40, length=length)
    assert found == losses
    buckets = fitted(model)._buckets.values()
    assert len(buckets) >= 3
    assert all(peak <= limit for peak, limit in map(_peak_and_limit, buckets))


def _peak_and_limit(bucket: Any) -> tuple[int, int]:
    plan = bucket.decision.plan
    return plan.plan.peak_bytes, plan.budget_bytes


@pytest.mark.parametrize("kind", ["plain", "dropout"])
def test_a_kept_layer_that_runs_out_of_memory_runs_again_with_a_checkpoint(kind: str) -> None:
    raised: list[Any] = []

    def fail_once(model: Any) -> None:
        def hook(module: Any, _: Any) -> None:
            control = recompute_scan.fitted(model)
            if control and control.settled and not raised and model.layers[5].kind == kind:
                raised.append(control.steps)
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        model.layers[5].down.register_forward_pre_hook(hook)

    _, losses = train(kind)
    model, found = train(kind, fit="99%", prepare=fail_once)
    assert raised
    assert found == losses
    assert fitted(model)._lowered < 1


class Own(Exception):
    """One of the script's."""


@pytest.mark.parametrize("call", [1, 2, 4, 9, 14, 25])
@pytest.mark.parametrize("kind", [Own, RuntimeError, KeyboardInterrupt])
def test_exceptions_of_the_script_pass(call: int, kind: type[BaseException]) -> None:
    error, calls = kind("mine"), []

    def fail(model: Any) -> None:
        def hook(*_: Any) -> None:
            calls.append(1)
            if len(calls) == call:
                raise error

        model.layers[2].down.register_forward_pre_hook(hook)

    with pytest.raises(kind, match="mine") as caught:
        train("dropout", fit=LIMIT, prepare=fail)
    assert caught.value is error
    assert error.__context__ is None


def test_a_signal_handler_may_raise() -> None:
    def handler(*_: object) -> None:
        raise Own("by signal")

    before = signal.signal(signal.SIGVTALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.15)
        with pytest.raises(Own, match="by signal"):
            train("dropout", fit=LIMIT, steps=10_000)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.filterwarnings("ignore")
def test_a_bug_of_ours_leaves_the_training_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, losses = train("dropout")
    for name in ("decide", "measured", "trial"):
        with monkeypatch.context() as patched:
            patched.setattr(f"recompute_scan.fitting.control.{name}", lambda *_: 1 / 0)
            kept: list[Any] = []
            model, found = train(
                "dropout",
                fit=LIMIT,
                prepare=partial(_note, kept),
            )
        assert found == losses
        assert alike(model, plain)
        assert "ZeroDivisionError" in kept[0].failure
        assert recompute_scan.fitted(model) is None


@pytest.mark.parametrize("steps", [1, 20])
def test_a_model_that_is_gone_holds_nothing(steps: int) -> None:
    model, _ = train(fit=LIMIT, steps=steps)
    weight = weakref.ref(model.layers[0].up.weight)
    del model
    gc.collect()
    assert weight() is None
    train(steps=1)  # it ends the look, too, that a first step is followed by
    assert left_behind() <= {"torch.optim.optimizer._global_optimizer_post_hooks"}


def test_copies_and_pickles_are_plain_models() -> None:
    model, _ = train("dropout", fit=LIMIT)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"recompute_scan" not in buffer.getvalue()
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    again.eval()
    tokens = torch.randint(0, WORDS, (2, 8))
    model.eval()
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    assert recompute_scan.fitted(again) is None
    Net("dropout").load_state_dict(model.state_dict())
    fitted(model).stop()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_without_layers(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert recompute_scan.fit(model, "50%") is model
    assert "fit found no layers" in capsys.readouterr().err


@pytest.mark.parametrize("limits", [("much", None), (0, None), (None, -1.0), (None, 0.0)])
def test_limits_that_are_none(limits: tuple[Any, float | None]) -> None:
    with pytest.raises(UsageError, match=r"is no .*E232"):
        recompute_scan.fit(Net(), limits[0], step_time_ms=limits[1])


def test_a_limit_that_nothing_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    _, losses = train()
    model, found = train(fit=1000)
    assert found == losses
    assert set(choices(model)) == {RECOMPUTE}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["before", "after", "whole"])
def test_compiled_blocks(how: str) -> None:
    def compiled(fit: bool) -> tuple[Any, list[float]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(layers=4)

        def compile_blocks() -> None:
            for layer in model.layers:
                layer.compile(backend="aot_eager")

        if how == "before":
            compile_blocks()
        if fit:
            recompute_scan.fit(model, LIMIT, quiet=True)
        if how == "after":
            compile_blocks()
        runs: Any = torch.compile(model, backend="aot_eager") if how == "whole" else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for step in range(14):
            tokens = torch.arange(32).view(2, 16) + step
            loss = loss_of(runs, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return model, found

    _, losses = compiled(False)
    model, found = compiled(True)
    assert found == losses
    assert fitted(model).settled == (how != "whole")


def test_a_frozen_layer_that_is_trained_later_is_planned_again() -> None:
    torch.manual_seed(0)
    model = Net()
    model.words.requires_grad_(False)
    model.layers[:3].requires_grad_(False)
    recompute_scan.fit(model, "50%", quiet=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.randint(0, WORDS, (4, 16))
    for step in range(24):
        if step == 16:
            model.requires_grad_(True)
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = present(fitted(model).plan)
    assert peak_of(model, tokens) == plan.plan.peak_bytes


@pytest.mark.parametrize("way", ["two optimizers", "one optimizer", "one loss"])
def test_two_models_in_one_process(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    def both(fit: bool) -> tuple[list[Any], list[float]]:
        torch.manual_seed(0)
        models, found = [Net("dropout", 4), Net(layers=4)], []
        for model in models if fit else ():
            recompute_scan.fit(model, LIMIT)
        weights = [list(model.parameters()) for model in models]
        weights = weights if way == "two optimizers" else [[*weights[0], *weights[1]]]
        optimizers = [torch.optim.SGD(each, 0.1) for each in weights]
        for step in range(36):
            tokens = torch.arange(32).view(2, 16) + step % 7
            if way == "one loss":
                losses = [loss_of(models[0], tokens) + loss_of(models[1], tokens)]
            else:
                with torch.no_grad():
                    other = models[0](tokens)[0].argmax(-1)
                losses = [loss_of(one, tokens) - 0.1 * loss_of(one, other) for one in models]
            for loss, optimizer in zip(losses, optimizers * 2, strict=False):
                loss.backward()
                if way != "one optimizer" or loss is losses[-1]:
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.item())
        return models, found

    _, losses = both(False)
    models, found = both(True)
    assert found == losses
    assert all(fitted(model).settled for model in models)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" layers ")[0] for line in said] == ["recompute-scan: fit: of 4"] * 2
    if way != "one loss":
        return
    tokens = torch.arange(32).view(2, 16)
    peak = peak_of(nn.ModuleList(models), tokens)
    plans = [fitted(model).plan for model in models]
    # The later one has seen what the other does.
    assert peak == max(plan.plan.peak_bytes for plan in plans if plan is not None)


def test_a_part_of_a_fitted_model_is_not_fitted_once_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = nn.ModuleList([Net(layers=4), Net(layers=4)])
    recompute_scan.fit(both, LIMIT)
    whole = fitted(both)
    assert recompute_scan.fit(both[0], LIMIT) is both[0]
    assert fitted(both[0]) is whole
    assert "belong to another fitted model" in capsys.readouterr().err
    whole.stop()
    part = fitted(recompute_scan.fit(both[0], LIMIT))
    recompute_scan.fit(both, LIMIT)
    assert fitted(both) is part
    assert "belong to another fitted model" in capsys.readouterr().err
    assert fitted(recompute_scan.fit(nn.ModuleList([both[0]]), LIMIT)) is not part
    assert capsys.readouterr().err == ""


RECORDED = f"""
import sys
import torch
sys.path.append({str(Path(__file__).parents[2])!r})
import recompute_scan
from tests.fitting.models import LIMIT, WORDS, Net, loss_of

torch.set_num_threads(1)
torch.manual_seed(0)
model = recompute_scan.fit(Net("dropout", 4), LIMIT)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(60):
    loss = loss_of(model, torch.randint(0, WORDS, (4, 16)))
    loss.backward()
    EXPLICIT
    optimizer.step()
    optimizer.zero_grad()
choices = [one.choice for one in recompute_scan.fitted(model)._switch.layers if not one.is_part]
print(loss.item(), choices)
"""


@pytest.mark.parametrize("explicit", ["", "recompute_scan.step()"])
def test_a_run_waits_until_the_model_is_fitted(tmp_path: Path, explicit: str) -> None:
    script = write_script(tmp_path, RECORDED.replace("EXPLICIT", explicit))
    plain = forked_script(script)
    done = record_target(
        tmp_path, "train.py", steps=1, warmup=1, timing_steps=0, fidelity=False, keep_going=True
    )
    loss = plain.stdout.partition(" ")[0]
    assert loss
    assert done.stdout.partition(" ")[0] == loss
    assert "fit: of 4 layers" in done.stderr
    result = recompute_scan.analyze(tmp_path / "out").result
    again = [int(region.recompute_runs_per_backward) for region in result.regions]
    assert again == json.loads(done.stdout.partition(" ")[2])
    assert 0 < sum(again) < len(again)
    assert {c.mechanism for region in result.regions for c in region.checkpoints} == {"fit"}


def test_a_recording_and_a_fitted_model_beside_each_other() -> None:
    model, _ = train(fit=LIMIT)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recompute_scan.record(steps=1, timing_steps=0) as recording:
        for _ in range(8):
            loss_of(model, torch.randint(0, WORDS, (4, 16))).backward()
            optimizer.step()
            recording.step()
    assert recording.scan.verdict == "partial"
    steps = fitted(model).steps
    recompute_scan.step()
    assert fitted(model).steps == steps  # no layer was called
    loss_of(model, torch.randint(0, WORDS, (4, 16))).backward()
    recompute_scan.step()
    assert fitted(model).steps == steps + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [False, True])
def test_a_model_of_transformers(lora: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )

    def trained(fit: bool) -> tuple[Any, list[float]]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        if lora:
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        if fit:
            recompute_scan.fit(model, LIMIT, quiet=True)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        found = []
        for step in range(14):
            tokens = torch.arange(32).view(2, 16) + step
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        with torch.no_grad():
            found.append(model.eval().generate(input_ids=tokens, max_new_tokens=3).sum().item())
        return model, found

    _, losses = trained(False)
    model, found = trained(True)
    assert found == losses
    assert fitted(model).settled
    assert set(choices(model)) != {RECOMPUTE}


def test_a_call_costs_little_once_it_is_settled() -> None:
    model, _ = train(fit="100%")
    control = fitted(model)
    layer = control._switch.layers[0]
    kept, tokens = model.layers[0], torch.rand(4, 16, 32)
    began = time.perf_counter()
    for _ in range(1000):
        control.enter(layer, (tokens,), {})
        layer.calls = 0
        control._begun = True
        control.boundary()
    assert time.perf_counter() - began < 0.1  # a tenth of a millisecond per step
    assert kept.forward.__func__.__name__ == "forward"
