"""Which scripts ``real_scripts.py`` runs, from where, with what, and what was changed in them.

``source`` is a folder below the sources that the benchmark is given: a checkout of the repository
at the commit. Without one the script comes from an installed package. Nothing of them is kept here;
licences are those of the repositories.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One training: ``{in}`` in a command stands for the inputs, ``{out}`` for a scratch folder."""

    name: str
    command: tuple[str, ...]
    source: str = ""
    origin: str = ""
    where: str = "."
    change: Callable[[Path], None] | None = None


_NANO = "karpathy/nanoGPT 3adf61e154c3fe3fca428ad6bc3818b27a3b8291, MIT"
_MIN = "karpathy/minGPT 37baab71b9abea1b76ab957409a1cc2fbfba8a26, MIT"
_EXAMPLES = "pytorch/examples 77f55b912142e11fcfdf5b530231fb9c52f181e8, BSD-3-Clause"
_TRL = "trl from its package, Apache-2.0"
_PEFT = "huggingface/peft 5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40, Apache-2.0"
_TIMM = "huggingface/pytorch-image-models aa4b5850c1543fa488abf260f18390eda46cf85d, Apache-2.0"
_DIFFUSERS = "huggingface/diffusers 58eb52c0803ea9af3abec60841c2a093bdf1f951, Apache-2.0"

_NANO_ARGS = (
    *("train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False"),
    *("--eval_iters=1", "--eval_interval=1000", "--batch_size=4", "--block_size=64", "--n_layer=4"),
    *("--n_head=2", "--n_embd=64", "--max_iters=30", "--out_dir={out}/nano"),
)
_TRL_ARGS = (
    *("--model_name_or_path", "{in}/llama", "--output_dir", "{out}/trl", "--max_steps", "12"),
    *("--per_device_train_batch_size", "4", "--report_to", "none", "--save_strategy", "no"),
    *("--eval_strategy", "no", "--use_cpu", "true", "--bf16", "false"),
)
_SFT = ("-m", "trl.scripts.sft", "--dataset_name", "{in}/lm", *_TRL_ARGS)
_TIMM_ARGS = (
    *("train.py", "--data-dir", "{in}/pictures", "--model", "vit_tiny_patch16_224", "--device"),
    *("cpu", "--img-size", "32", "--model-kwargs", "patch_size=16", "depth=4", "--num-classes"),
    *("2", "-b", "4", "-vb", "4", "-j", "1", "--epochs", "4", "--warmup-epochs", "0"),
    *("--output", "{out}/timm", "--no-prefetcher", "--log-interval", "1"),
)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if old not in text:
        raise ValueError(f"{path.name} is not the version that this row is for")
    path.write_text(text.replace(old, new, 1))


def _nano_once(folder: Path) -> None:
    """nanoGPT with torch's checkpoint around each block."""
    _replace(folder / "model.py", "            x = block(x)", _NANO_LOOP)


_NANO_LOOP = (
    "            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True) "
    "if self.training else block(x)"
)


def _nano_doubled(folder: Path) -> None:
    """The same, with torch's wrapper around each block as well."""
    _nano_once(folder)
    _replace(
        folder / "train.py",
        "model.to(device)\n",
        "model.to(device)\n"
        "from model import Block\n"
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (\n"
        "    apply_activation_checkpointing)\n"
        "apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))\n",
    )


def _peft_doubled(folder: Path) -> None:
    """PEFT's SFT script with FSDP's wrapper around the layers, as its plugin puts it there."""
    _replace(
        folder / "train.py",
        "    # train\n",
        "    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (\n"
        "        apply_activation_checkpointing)\n"
        "    from transformers.models.llama.modeling_llama import LlamaDecoderLayer\n"
        "    apply_activation_checkpointing(\n"
        "        trainer.model, check_fn=lambda m: isinstance(m, LlamaDecoderLayer))\n"
        "    # train\n",
    )


_PEFT_ARGS = (
    *("train.py", "--dataset_name", "{in}/lm", "--dataset_text_field", "text", "--splits"),
    *("train,test", *_TRL_ARGS, "--use_peft_lora", "true", "--lora_r", "4"),
    *("--lora_target_modules", "q_proj,v_proj", "--gradient_checkpointing", "true"),
)
_REENTRANT = ("--gradient_checkpointing_kwargs", '{"use_reentrant": true}')

ROWS = (
    Row("nanoGPT", _NANO_ARGS, "nanoGPT", _NANO),
    Row("nanoGPT, checkpoints", _NANO_ARGS, "nanoGPT", _NANO, change=_nano_once),
    Row("nanoGPT, doubled", _NANO_ARGS, "nanoGPT", _NANO, change=_nano_doubled),
    Row(
        "minGPT adder",
        ("adder.py", "--trainer.max_iters=12", "--model.model_type=gpt-nano"),
        "minGPT",
        _MIN,
        "projects/adder",
    ),
    Row(
        "minGPT chargpt",
        ("chargpt.py", "--trainer.max_iters=12", "--model.model_type=gpt-nano"),
        "minGPT",
        _MIN,
        "projects/chargpt",
    ),
    *(
        Row(
            f"word_language_model, {kind}",
            (
                *("main.py", "--data", "{in}/corpus", "--model", kind, "--emsize", "32", "--nhid"),
                *("32", "--nlayers", "2", "--nhead", "2", "--batch_size", "4", "--bptt", "8"),
                *("--lr", "0.001", "--epochs", "1", "--save", "{out}/lm.pt", "--use-optimizer"),
            ),
            "examples",
            _EXAMPLES,
            "word_language_model",
        )
        for kind in ("LSTM", "Transformer")
    ),
    Row("TRL SFT", _SFT, origin=_TRL),
    Row("TRL SFT, off", (*_SFT, "--gradient_checkpointing", "false"), origin=_TRL),
    Row("TRL SFT, reentrant", (*_SFT, *_REENTRANT), origin=_TRL),
    Row("TRL SFT, LoRA", (*_SFT, "--use_peft", "true", "--lora_r", "4"), origin=_TRL),
    Row(
        "TRL DPO",
        ("-m", "trl.scripts.dpo", "--dataset_name", "{in}/preferences", *_TRL_ARGS),
        origin=_TRL,
    ),
    Row("PEFT LoRA", _PEFT_ARGS, "peft", _PEFT, "examples/sft"),
    Row(
        "PEFT LoRA, doubled",
        (*_PEFT_ARGS, "--use_reentrant", "true"),
        "peft",
        _PEFT,
        "examples/sft",
        _peft_doubled,
    ),
    Row("timm", _TIMM_ARGS, "pytorch-image-models", _TIMM),
    Row("timm, checkpoints", (*_TIMM_ARGS, "--grad-checkpointing"), "pytorch-image-models", _TIMM),
    Row(
        "diffusers unconditional",
        (
            *("train_unconditional.py", "--train_data_dir", "{in}/pictures/train"),
            *("--model_config_name_or_path", "{in}/unet", "--output_dir", "{out}/unet"),
            *("--resolution", "16", "--train_batch_size", "4", "--num_epochs", "2"),
            *("--save_images_epochs", "9", "--save_model_epochs", "9", "--mixed_precision", "no"),
        ),
        "diffusers",
        _DIFFUSERS,
        "examples/unconditional_image_generation",
    ),
)
