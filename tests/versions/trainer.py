"""A small Llama under Hugging Face's Trainer, checkpointed twice, recorded by the callback.

python tests/versions/trainer.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers import Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from recompute_scan.integrations import RecomputeScanCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.versions.finetuning import LENGTH, VOCABULARY, small_llama


def checkpointing() -> dict[str, Any]:
    """The setting under its name of the day, with the variant that recomputes all of it."""
    old = "gradient" if "gradient_checkpointing" in TrainingArguments.__dataclass_fields__ else ""
    name = f"{old or 'activation'}_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": True}}


def main() -> None:
    folder = Path(sys.argv[1])
    model = small_llama()
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda layer: checkpoint_wrapper(
            layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT
        ),
        check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
    )
    arguments = TrainingArguments(
        str(folder / "trainer"),
        use_cpu=True,
        max_steps=10,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        **checkpointing(),
    )
    rows = torch.randint(0, VOCABULARY, (16, LENGTH))
    callback = RecomputeScanCallback(steps=2, warmup=2, timing_steps=2, folder=folder)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    print(callback.scan.verdict)


if __name__ == "__main__":
    main()
