"""Scripts and configurations with what is true of them.

Each is written here with the keys that matter; ``origin`` says where the same keys stand in public,
as repository, path and commit, or is empty for one that is made up. The truth comes from counting
(``truths.py``) or from the framework's code, never from what this tool says.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from recompute_scan.lint import lint


class Case(NamedTuple):
    """Files by name, the codes that are true of them, and how that is known."""

    name: str
    files: dict[str, str]
    codes: tuple[str, ...]
    known: str
    origin: str = ""


def answer(case: Case, folder: Path) -> tuple[str, ...]:
    """The codes that are found in the case's files, written to the folder."""
    for name, text in case.files.items():
        (folder / name).write_text(text)
    return tuple(finding.code for finding in lint([folder]).found)


_HEAD = """\
from functools import partial
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper)
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
model = AutoModelForCausalLM.from_pretrained("x")
"""
_WRAP = """\
apply_activation_checkpointing(model, checkpoint_wrapper_fn=partial(
    checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    check_fn=lambda m: isinstance(m, LlamaDecoderLayer))
"""
_WRAP_REENTRANT = _WRAP.replace("NO_REENTRANT", "REENTRANT")
_ON = "model.gradient_checkpointing_enable()\n"
_ON_REENTRANT = (
    'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})\n'
)
_ON_NEW = _ON_REENTRANT.replace("True", "False")
_FSDP = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: {}\n"
_PLUGIN = _FSDP + "  fsdp_activation_checkpointing: {}\n"
_TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
_TRL = "from trl import SFTConfig, SFTTrainer\n"
_DEEPSPEED = '{"zero_optimization": {"stage": 3}, "train_batch_size": "auto"%s}\n'
_PARTITION = ', "activation_checkpointing": {"partition_activations": true}'
_LAUNCH = "accelerate launch --config_file fsdp.yaml train.py \\\n  --bf16 true {}\n"
_COUNTED = "counted: tests/lint/truths.py"
_RAISES = "transformers 5.23, trainer.py:877"
_ACCELERATE = "accelerate 1.15, fsdp_utils.py:722"
_ONE = "one switch"


def _script(*parts: str) -> dict[str, str]:
    return {"train.py": _HEAD + "".join(parts)}


def _inside(*parts: str) -> str:
    return "".join("    " + line + "\n" for part in parts for line in part.splitlines())


_HELPER = "def apply_fsdp_checkpointing(model):\n" + _inside(_WRAP)

CASES = (
    Case("wrapper and reentrant model", _script(_WRAP, _ON_REENTRANT), ("RS601",), _COUNTED),
    Case("reentrant model, then wrapper", _script(_ON_REENTRANT, _WRAP), ("RS601",), _COUNTED),
    Case("reentrant wrapper and model", _script(_WRAP_REENTRANT, _ON), ("RS601",), _COUNTED),
    Case(
        "reentrant wrapper and reentrant model",
        _script(_WRAP_REENTRANT, _ON_REENTRANT),
        ("RS601",),
        _COUNTED,
    ),
    Case(
        "wrapper in a helper of the script",
        _script(
            _HELPER, "def main():\n", _inside(_ON_REENTRANT, "apply_fsdp_checkpointing(model)")
        ),
        ("RS601",),
        _COUNTED,
    ),
    Case(
        "transformers 4 pinned",
        {**_script(_WRAP, _ON), "requirements.txt": "transformers==4.46.1\n"},
        ("RS601",),
        "docs/mechanisms.md: transformers < 5 is reentrant by default",
    ),
    Case(
        "check_fn and offload_to_cpu as in T5 tutorials",
        _script(
            "wrapper = partial(checkpoint_wrapper, offload_to_cpu=False,\n"
            "    checkpoint_impl=CheckpointImpl.NO_REENTRANT)\n"
            "def check_fn(submodule):\n    return isinstance(submodule, LlamaDecoderLayer)\n",
            "apply_activation_checkpointing(\n"
            "    model, checkpoint_wrapper_fn=wrapper, check_fn=check_fn)\n",
            _ON_REENTRANT,
        ),
        ("RS601",),
        _COUNTED,
        "keys of the wrapper: SumanthRH/learnings "
        "pytorch/fsdp/policies/activation_checkpointing_functions.py",
    ),
    Case(
        "imported helper under a condition",
        _script(
            "from llama_cookbook.policies import apply_fsdp_checkpointing\n",
            "if fsdp_config.fsdp_activation_checkpointing:\n",
            _inside(_ON, "apply_fsdp_checkpointing(model)"),
        ),
        ("RS602",),
        "the reported case: doubles with transformers < 5",
        "meta-llama/llama-cookbook src/llama_cookbook/finetuning.py "
        "1a97f6fd66552295b706e8fe12187e1dbd4126f2",
    ),
    Case("version not known", _script(_WRAP, _ON), ("RS602",), _COUNTED),
    Case(
        "early stop off",
        _script(
            "from torch.utils.checkpoint import set_checkpoint_early_stop\n",
            "set_checkpoint_early_stop(False)\n",
            _WRAP,
            _ON_NEW,
        ),
        ("RS602",),
        _COUNTED,
    ),
    Case(
        "one of two under a condition",
        _script(_WRAP, "if args.gc:\n", _inside(_ON_REENTRANT)),
        ("RS602",),
        "doubles where args.gc is set",
    ),
    Case(
        "a helper switches one off",
        _script(
            "def off(m):\n    m.gradient_checkpointing_disable()\n",
            _ON_REENTRANT,
            "off(model)\n",
            _WRAP,
        ),
        ("RS602",),
        "one recompute; what a function does to its argument is not followed",
    ),
    Case("two non-reentrant", _script(_WRAP, _ON_NEW), ("RS603",), _COUNTED),
    Case(
        "transformers 5 pinned",
        {**_script(_WRAP, _ON), "requirements.txt": "transformers>=5.1\n"},
        ("RS603",),
        _COUNTED,
    ),
    Case(
        "Trainer arguments with both",
        {
            "train.py": _TRAINER + "a = TrainingArguments('o', gradient_checkpointing=True,\n"
            "    fsdp='full_shard', fsdp_config={'activation_checkpointing': True})\n"
        },
        ("RS604",),
        _RAISES,
    ),
    Case(
        "launch with both",
        {
            "fsdp.yaml": _PLUGIN.format(1, "true"),
            "train.py": _TRAINER,
            "go.sh": _LAUNCH.format("--gradient_checkpointing true"),
        },
        ("RS604",),
        _RAISES,
    ),
    Case(
        "launch with both, own trainer",
        {
            "train.py": "import torch\n",
            "go.sh": "python -m accelerate.commands.launch --use_fsdp \\\n"
            "  --fsdp_activation_checkpointing true train.py --gradient-checkpointing\n",
        },
        ("RS602",),
        "what the flag does is in the script's own code",
        "a public shell script; repository not given by the index",
    ),
    Case(
        "launch with both, Trainer with a parser of its own",
        {
            "fsdp.yaml": _PLUGIN.format(1, "true"),
            "train.py": "from transformers import Trainer\n",
            "go.sh": _LAUNCH.format("--gradient_checkpointing true"),
        },
        ("RS602",),
        "what the flag does is in the script's own code",
    ),
    Case(
        "TRL's default under the plugin",
        {
            "fsdp.yaml": _PLUGIN.format(1, "true"),
            "train.py": _TRL,
            "go.sh": _LAUNCH.format(""),
        },
        ("RS602",),
        "TRL's default is True",
    ),
    Case(
        "accelerate FSDP 2 with dropout not known",
        {"fsdp.yaml": _PLUGIN.format(2, "true")},
        ("RS605",),
        _ACCELERATE,
        "keys: TRL's documentation of context parallelism",
    ),
    Case(
        "preserve_rng_state off",
        {
            "train.py": "from torch.utils.checkpoint import checkpoint\n"
            "checkpoint(f, x, use_reentrant=False, preserve_rng_state=False)\n"
        },
        ("RS605",),
        "torch.utils.checkpoint's documentation",
    ),
    Case("DeepSpeed section", {"ds.json": _DEEPSPEED % _PARTITION}, ("RS606",), "DeepSpeed's code"),
    Case(
        "axolotl with both",
        {
            "a.yaml": "base_model: x\ngradient_checkpointing: true\nfsdp: [full_shard]\n"
            "fsdp_config:\n  activation_checkpointing: true\n"
        },
        ("RS602",),
        "the Trainer raises; axolotl's own check was not read",
    ),
    Case("wrapper alone", _script(_WRAP), (), _ONE),
    Case("model alone", _script(_ON_REENTRANT), (), _ONE),
    Case("enabled twice", _script(_ON, _ON), (), _COUNTED),
    Case(
        "enabled, then disabled",
        _script(_ON_REENTRANT, "model.gradient_checkpointing_disable()\n", _WRAP),
        (),
        _COUNTED,
    ),
    Case(
        "either, by a condition",
        _script("if args.wrap:\n", _inside(_WRAP), "else:\n", _inside(_ON_REENTRANT)),
        (),
        "never both",
    ),
    Case(
        "two models",
        _script(_WRAP, "teacher = AutoModelForCausalLM.from_pretrained('t')\n")
        | {"b.py": _HEAD + _ON_REENTRANT.replace("model.", "teacher.")},
        (),
        "other models",
    ),
    Case(
        "another model under the same name",
        _script(_WRAP, "model = AutoModelForCausalLM.from_pretrained('t')\n", _ON_REENTRANT),
        (),
        "the wrapped one is gone",
    ),
    Case("own wrapper of that name", {"t.py": "apply_activation_checkpointing(dit)\n"}, (), _ONE),
    Case(
        "TRL FSDP 2",
        {"fsdp2.yaml": _PLUGIN.format(2, "false")},
        (),
        "off",
        "huggingface/trl examples/accelerate_configs/fsdp2.yaml "
        "a91c73c661285796de59614309a3079bd430b7f4",
    ),
    Case(
        "LLaMA-Factory FSDP",
        {"fsdp.yaml": _FSDP.format(1)},
        (),
        "no checkpointing in it",
        "hiyouga/LLaMA-Factory examples/accelerate/fsdp_config.yaml "
        "300437a5e9e52673d7e47367f73b45f881e64388",
    ),
    Case(
        "axolotl QLoRA under FSDP",
        {
            "a.yaml": "base_model: x\noutput_dir: o\ngradient_checkpointing: true\n"
            "gradient_checkpointing_kwargs:\n  use_reentrant: true\nfsdp:\n  - full_shard\n"
            "fsdp_config:\n  fsdp_offload_params: true\n"
        },
        (),
        _ONE,
        "axolotl-ai-cloud/axolotl examples/llama-3/qlora-fsdp-70b.yaml "
        "1c14c4a15cb2cb70d90bedd0a1580e30314c90cb",
    ),
    Case(
        "axolotl ZeRO 3",
        {"zero3.json": _DEEPSPEED % ""},
        (),
        "no checkpointing in it",
        "axolotl-ai-cloud/axolotl deepspeed_configs/zero3_bf16.json "
        "1aaebb0dc1229adf56a7c8e0eeed91c6094b7715",
    ),
    Case(
        "TRL ZeRO 3",
        {"z.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"},
        (),
        "no checkpointing in it",
        "huggingface/trl examples/accelerate_configs/deepspeed_zero3.yaml "
        "7d75884abd06b8acd5b5745ba0d8b5423f6475b3",
    ),
    Case(
        "torchtitan debug model",
        {"debug.toml": '[activation_checkpoint]\nmode = "selective"\n'},
        (),
        _ONE,
        "pytorch/torchtitan torchtitan/models/llama3/train_configs/debug_model.toml "
        "026cb7ea3bc4d7fcc45d7d9379757f45d038c82a",
    ),
    Case(
        "DeepSpeed section that is used",
        {
            "ds.json": _DEEPSPEED % _PARTITION,
            "model.py": "import deepspeed\ndeepspeed.checkpointing.checkpoint(f, x)\n",
        },
        (),
        "DeepSpeed's code",
    ),
    Case(
        "plugin, flag off",
        {
            "fsdp.yaml": _PLUGIN.format(1, "true"),
            "train.py": _TRL,
            "go.sh": _LAUNCH.format("--gradient_checkpointing False"),
        },
        (),
        _ONE,
    ),
    Case(
        "a launch that is commented out",
        {
            "fsdp.yaml": _PLUGIN.format(1, "true"),
            "train.py": _TRAINER,
            "go.sh": "# accelerate launch --config_file fsdp.yaml train.py "
            "--gradient_checkpointing\n",
        },
        (),
        "a comment",
    ),
)
