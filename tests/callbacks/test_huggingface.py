"""The callback under the real Trainer of transformers, on the CPU."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import recompute_scan as rs
from recompute_scan.integrations import RecomputeScanCallback
from tests.callbacks.counted import Counter
from tests.present import present
from tests.record.residue import left_behind

# What the frameworks warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

PLAN: dict[str, Any] = {"steps": 1, "warmup": 2, "timing_steps": 0}


# Every worker collects this file, and most of transformers is loaded where it is first used.
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def arguments(
    folder: Path, *, max_steps: int = 6, **options: Any
) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=max_steps,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        **options,
    )


def data() -> Any:
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (4, 8))]


def trainer(
    folder: Path, callback: RecomputeScanCallback, made: Any, **options: Any
) -> transformers.Trainer:
    return transformers.Trainer(
        made, arguments(folder, **options), train_dataset=data(), callbacks=[callback]
    )


def checkpointing() -> dict[str, Any]:
    """The setting under its name of the day, with the variant that recomputes all of it."""
    known = transformers.TrainingArguments.__dataclass_fields__
    old = "gradient" if "gradient_checkpointing" in known else ""
    name = f"{old or 'activation'}_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": True}}


@pytest.mark.parametrize(
    ("twice", "verdict"),
    [(True, "doubled"), pytest.param(False, "full", marks=pytest.mark.slow)],
)
def test_a_trainer_is_recorded(tmp_path: Path, twice: bool, verdict: str) -> None:
    callback = RecomputeScanCallback(**PLAN, folder=tmp_path / "scan")
    made = model()
    counters = [Counter(layer.mlp) for layer in made.model.layers]
    training = trainer(tmp_path, callback, made, **checkpointing())
    if twice:
        block = type(made.model.layers[0])
        apply_activation_checkpointing(
            made,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper),
            check_fn=lambda part: isinstance(part, block),
        )
    training.train()
    assert {counter.recomputes for counter in counters} == {2 if twice else 1}
    scan = callback.scan
    assert scan.verdict == verdict
    assert scan.regions["recompute_runs_per_backward"].tolist() == [2.0 if twice else 1.0] * 2
    assert scan.regions["module"].tolist() == ["model.layers.0", "model.layers.1"]
    asked = scan.result.regions[0].checkpoints[-1]
    assert present(asked.call_site).startswith("tests/callbacks/test_huggingface.py:")
    assert (tmp_path / "scan" / "report.html").exists()
    assert left_behind() == set()


def test_steps_are_optimizer_steps_and_a_second_training_is_recorded_too(tmp_path: Path) -> None:
    callback = RecomputeScanCallback(**PLAN)
    made = model()
    training = trainer(tmp_path, callback, made, gradient_accumulation_steps=2)
    training.train()
    first = callback.scan
    assert first.verdict == "none"
    assert [step.micro_batches for step in first.result.steps if step.complete] == [2]
    made.gradient_checkpointing_enable({"use_reentrant": True})
    made.enable_input_require_grads()
    training.train()
    assert callback.scan.verdict == "full"
    assert callback.scan.result.regions[0].checkpoints
    assert first.verdict == "none"


def test_a_training_that_fails_is_followed_by_another(tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                raise ZeroDivisionError("theirs")

    failing, callback = RecomputeScanCallback(**PLAN), RecomputeScanCallback(**PLAN)
    training = trainer(tmp_path, failing, model())
    training.add_callback(Stop())
    with pytest.raises(ZeroDivisionError):
        training.train()
    trainer(tmp_path, callback, model(), **checkpointing()).train()
    assert callback.scan.verdict == "full"
    assert failing.scan.result.crash is not None
    assert left_behind() == set()


def test_a_trainer_that_never_trains_is_in_nobodys_way(tmp_path: Path) -> None:
    idle = RecomputeScanCallback(**PLAN)
    trainer(tmp_path, idle, model())
    assert left_behind()  # it watches for the lines that switch checkpointing on
    with rs.record(**PLAN) as recording:
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        while not recording.done:
            layer(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            recording.step()
    assert recording.scan.verdict == "none"
    assert left_behind() == set()
    crash = present(idle.scan.result.crash)
    assert "did not say that it ended" in (crash.traceback or "")


def test_the_weights_are_the_same_with_it(tmp_path: Path) -> None:
    def weights(*callbacks: RecomputeScanCallback) -> list[torch.Tensor]:
        made = model()
        transformers.Trainer(
            made, arguments(tmp_path), train_dataset=data(), callbacks=list(callbacks)
        ).train()
        return list(made.parameters())

    watched, plain = weights(RecomputeScanCallback(**PLAN)), weights()
    assert all(torch.equal(one, other) for one, other in zip(watched, plain, strict=True))
