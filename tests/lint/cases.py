"""Scripts and configurations with what is true of them.

Each is written here with the keys that matter; ``origin`` says where the same keys stand in public,
as repository, path and commit, or is empty for one that is made up. The truth comes from counting
(``truths.py``) or from the framework's code, never from what this tool says.
"""

from collections.abc import Callable
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


def case(name: str, *codes: str, known: str, origin: str = "") -> Callable[[dict[str, str]], Case]:
    """The case of the files that come next: what is true of them stands first."""
    return lambda files: Case(name, files, codes, known, origin)


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
    case("wrapper and reentrant model", "RS601", known=_COUNTED)(_script(_WRAP, _ON_REENTRANT)),
    case("reentrant model, then wrapper", "RS601", known=_COUNTED)(_script(_ON_REENTRANT, _WRAP)),
    case("reentrant wrapper and model", "RS601", known=_COUNTED)(_script(_WRAP_REENTRANT, _ON)),
    case("reentrant wrapper and reentrant model", "RS601", known=_COUNTED)(
        _script(_WRAP_REENTRANT, _ON_REENTRANT)
    ),
    case("wrapper in a helper of the script", "RS601", known=_COUNTED)(
        _script(_HELPER, "def main():\n", _inside(_ON_REENTRANT, "apply_fsdp_checkpointing(model)"))
    ),
    case(
        "transformers 4 pinned",
        "RS601",
        known="docs/mechanisms.md: transformers < 5 is reentrant by default",
    )({**_script(_WRAP, _ON), "requirements.txt": "transformers==4.46.1\n"}),
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
    case("version not known", "RS602", known=_COUNTED)(_script(_WRAP, _ON)),
    case("early stop off", "RS602", known=_COUNTED)(
        _script(
            "from torch.utils.checkpoint import set_checkpoint_early_stop\n",
            "set_checkpoint_early_stop(False)\n",
            _WRAP,
            _ON_NEW,
        )
    ),
    case("one of two under a condition", "RS602", known="doubles where args.gc is set")(
        _script(_WRAP, "if args.gc:\n", _inside(_ON_REENTRANT))
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
    case("two non-reentrant", "RS603", known=_COUNTED)(_script(_WRAP, _ON_NEW)),
    case("transformers 5 pinned", "RS603", known=_COUNTED)(
        {**_script(_WRAP, _ON), "requirements.txt": "transformers>=5.1\n"}
    ),
    case("Trainer arguments with both", "RS604", known=_RAISES)(
        {
            "train.py": _TRAINER + "a = TrainingArguments('o', gradient_checkpointing=True,\n"
            "    fsdp='full_shard', fsdp_config={'activation_checkpointing': True})\n"
        }
    ),
    case("launch with both", "RS604", known=_RAISES)(
        {
            "fsdp.yaml": _PLUGIN.format(1, "true"),
            "train.py": _TRAINER,
            "go.sh": _LAUNCH.format("--gradient_checkpointing true"),
        }
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
    case("TRL's default under the plugin", "RS602", known="TRL's default is True")(
        {"fsdp.yaml": _PLUGIN.format(1, "true"), "train.py": _TRL, "go.sh": _LAUNCH.format("")}
    ),
    case(
        "accelerate FSDP 2 with dropout not known",
        "RS605",
        known=_ACCELERATE,
        origin="keys: TRL's documentation of context parallelism",
    )({"fsdp.yaml": _PLUGIN.format(2, "true")}),
    case("preserve_rng_state off", "RS605", known="torch.utils.checkpoint's documentation")(
        {
            "train.py": "from torch.utils.checkpoint import checkpoint\n"
            "checkpoint(f, x, use_reentrant=False, preserve_rng_state=False)\n"
        }
    ),
    Case("DeepSpeed section", {"ds.json": _DEEPSPEED % _PARTITION}, ("RS606",), "DeepSpeed's code"),
    case(
        "axolotl with both", "RS602", known="the Trainer raises; axolotl's own check was not read"
    )(
        {
            "a.yaml": "base_model: x\ngradient_checkpointing: true\nfsdp: [full_shard]\n"
            "fsdp_config:\n  activation_checkpointing: true\n"
        }
    ),
    case("wrapper alone", known=_ONE)(_script(_WRAP)),
    case("model alone", known=_ONE)(_script(_ON_REENTRANT)),
    case("enabled twice", known=_COUNTED)(_script(_ON, _ON)),
    case("enabled, then disabled", known=_COUNTED)(
        _script(_ON_REENTRANT, "model.gradient_checkpointing_disable()\n", _WRAP)
    ),
    case("either, by a condition", known="never both")(
        _script("if args.wrap:\n", _inside(_WRAP), "else:\n", _inside(_ON_REENTRANT))
    ),
    case("two models", known="other models")(
        _script(_WRAP, "teacher = AutoModelForCausalLM.from_pretrained('t')\n")
        | {"b.py": _HEAD + _ON_REENTRANT.replace("model.", "teacher.")}
    ),
    case("another model under the same name", known="the wrapped one is gone")(
        _script(_WRAP, "model = AutoModelForCausalLM.from_pretrained('t')\n", _ON_REENTRANT)
    ),
    case("own wrapper of that name", known=_ONE)({"t.py": "apply_activation_checkpointing(dit)\n"}),
    case(
        "TRL FSDP 2",
        known="off",
        origin="huggingface/trl examples/accelerate_configs/fsdp2.yaml "
        "a91c73c661285796de59614309a3079bd430b7f4",
    )({"fsdp2.yaml": _PLUGIN.format(2, "false")}),
    case(
        "LLaMA-Factory FSDP",
        known="no checkpointing in it",
        origin="hiyouga/LLaMA-Factory examples/accelerate/fsdp_config.yaml "
        "300437a5e9e52673d7e47367f73b45f881e64388",
    )({"fsdp.yaml": _FSDP.format(1)}),
    case(
        "axolotl QLoRA under FSDP",
        known=_ONE,
        origin="axolotl-ai-cloud/axolotl examples/llama-3/qlora-fsdp-70b.yaml "
        "1c14c4a15cb2cb70d90bedd0a1580e30314c90cb",
    )(
        {
            "a.yaml": "base_model: x\noutput_dir: o\ngradient_checkpointing: true\n"
            "gradient_checkpointing_kwargs:\n  use_reentrant: true\nfsdp:\n  - full_shard\n"
            "fsdp_config:\n  fsdp_offload_params: true\n"
        }
    ),
    case(
        "axolotl ZeRO 3",
        known="no checkpointing in it",
        origin="axolotl-ai-cloud/axolotl deepspeed_configs/zero3_bf16.json "
        "1aaebb0dc1229adf56a7c8e0eeed91c6094b7715",
    )({"zero3.json": _DEEPSPEED % ""}),
    case(
        "TRL ZeRO 3",
        known="no checkpointing in it",
        origin="huggingface/trl examples/accelerate_configs/deepspeed_zero3.yaml "
        "7d75884abd06b8acd5b5745ba0d8b5423f6475b3",
    )({"z.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"}),
    case(
        "torchtitan debug model",
        known=_ONE,
        origin="pytorch/torchtitan torchtitan/models/llama3/train_configs/debug_model.toml "
        "026cb7ea3bc4d7fcc45d7d9379757f45d038c82a",
    )({"debug.toml": '[activation_checkpoint]\nmode = "selective"\n'}),
    case("DeepSpeed section that is used", known="DeepSpeed's code")(
        {
            "ds.json": _DEEPSPEED % _PARTITION,
            "model.py": "import deepspeed\ndeepspeed.checkpointing.checkpoint(f, x)\n",
        }
    ),
    case("plugin, flag off", known=_ONE)(
        {
            "fsdp.yaml": _PLUGIN.format(1, "true"),
            "train.py": _TRL,
            "go.sh": _LAUNCH.format("--gradient_checkpointing False"),
        }
    ),
    case("a launch that is commented out", known="a comment")(
        {
            "fsdp.yaml": _PLUGIN.format(1, "true"),
            "train.py": _TRAINER,
            "go.sh": "# accelerate launch --config_file fsdp.yaml train.py "
            "--gradient_checkpointing\n",
        }
    ),
)
