"""More scripts and configurations with what is true of them: frameworks, launchers, helpers.

Written and labelled before the linter knew of them. Those in ``HELD_OUT`` were not run while it was
mended on the others. As in ``cases.py``, files hold the keys that matter, and ``origin`` says where
the same keys stand in public.
"""

from tests.lint.cases import (
    _COUNTED,
    _HEAD,
    _ON,
    _ON_NEW,
    _ON_REENTRANT,
    _RAISES,
    _WRAP,
    Case,
    case,
)

_ACCELERATE = (
    "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n"
    "from transformers import AutoModelForCausalLM\n"
)
_PREPARE = "model = accelerator.prepare(model)\n"
_LOAD = "model = AutoModelForCausalLM.from_pretrained('x')\n"
_PLUGIN_PY = (
    "plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True,\n"
    "    auto_wrap_policy='transformer_based_wrap',\n"
    "    transformer_cls_names_to_wrap=['LlamaDecoderLayer'])\n"
    "accelerator = Accelerator(fsdp_plugin=plugin)\n"
)
_FSDP_ON = (
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
    "  fsdp_activation_checkpointing: true\n"
)
_LOOP = "from accelerate import Accelerator\n" + _HEAD + "accelerator = Accelerator()\n"
_LAUNCHED = "accelerate launch --config_file fsdp.yaml train.py\n"
_TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
_LLAMA_FACTORY = "model_name_or_path: x\nstage: sft\ndo_train: true\nfinetuning_type: full\n"
_LAUNCH_FACTORY = "accelerate launch --config_file fsdp.yaml src/train.py sft.yaml\n"
_FACTORY_CODE = (
    "LLaMA-Factory ff6d4d1, model_utils/checkpointing.py prepare_model_for_training: its own "
    "switch, which the Trainer does not see; reentrant unless use_reentrant_gc is off; counted so "
    "in tests/lint/truths.py"
)
_LIT = """\
import lightning as L
from lightning.pytorch.strategies import FSDPStrategy
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained("x")
        self.%s
strategy = FSDPStrategy(activation_checkpointing_policy={LlamaDecoderLayer})
L.Trainer(strategy=strategy).fit(Lit())
"""
_LIGHTNING = "lightning 2.6, fabric/strategies/fsdp.py _activation_checkpointing_kwargs"
_OWN_MODEL = """\
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant={})
        return x
model = Model()
apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
"""
_TUNE = "torchtune bd2a0fc, recipes/full_finetune_distributed.py"
_NEMO = "NeMo 8cfedd7, nlp/modules/common/megatron/transformer.py ParallelTransformer.__init__"
_COOKBOOK = "meta-llama/llama-cookbook 0e0033518623d03ac5c1654bf04b7e480f7d5e5a"
_POLICY = (
    "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (\n"
    "    CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper)\n"
    "from functools import partial\n"
    "from transformers.models.llama.modeling_llama import LlamaDecoderLayer\n"
    "non_reentrant_wrapper = partial(\n"
    "    checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)\n"
    "check_fn = lambda submodule: isinstance(submodule, LlamaDecoderLayer)\n"
    "def apply_fsdp_checkpointing(model):\n"
    "    apply_activation_checkpointing(\n"
    "        model, checkpoint_wrapper_fn=non_reentrant_wrapper, check_fn=check_fn)\n"
)
_RECIPE = "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\n"


def _ones(*lines: str) -> dict[str, str]:
    return {"train.py": "".join(lines)}


FRAMEWORKS = (
    case(
        "accelerate's plugin in Python, reentrant model",
        "RS601",
        known=f"accelerate 1.15, accelerator.py prepare_model wraps after FSDP; {_COUNTED}",
        origin="keys of the plugin: huggingface/accelerate benchmarks/fsdp2/utils.py",
    )(_ones(_ACCELERATE, _PLUGIN_PY, _LOAD, _ON_REENTRANT, _PREPARE)),
    case(
        "config launches a loop of its own, reentrant model",
        "RS601",
        known=f"accelerate 1.15, accelerator.py prepare_model; {_COUNTED}",
    )({"fsdp.yaml": _FSDP_ON, "go.sh": _LAUNCHED, **_ones(_LOOP, _ON_REENTRANT, _PREPARE)}),
    case("config launches a script whose arguments say it in Python", "RS604", known=_RAISES)(
        {
            "fsdp.yaml": _FSDP_ON,
            "go.sh": _LAUNCHED,
            **_ones(_TRAINER, "a = TrainingArguments('o', gradient_checkpointing=True)\n"),
        }
    ),
    Case(
        "PEFT's preparation under a wrapper",
        _ones(
            _HEAD,
            "from peft import prepare_model_for_kbit_training\n"
            "model = prepare_model_for_kbit_training(model,\n"
            "    gradient_checkpointing_kwargs={'use_reentrant': True})\n",
            _WRAP,
        ),
        ("RS602",),
        "counted with peft 0.21: doubles where the model is quantized, else PEFT switches nothing "
        "on",
    ),
    Case(
        "diffusers' switch under accelerate's plugin",
        {
            "fsdp.yaml": _FSDP_ON.replace("LlamaDecoderLayer", "FluxTransformerBlock"),
            "go.sh": _LAUNCHED,
            **_ones(
                "from accelerate import Accelerator\nfrom diffusers import FluxTransformer2DModel\n"
                "accelerator = Accelerator()\n"
                "transformer = FluxTransformer2DModel.from_pretrained('x')\n"
                "transformer.enable_gradient_checkpointing()\n"
                "transformer = accelerator.prepare(transformer)\n"
            ),
        },
        ("RS603",),
        "diffusers 0.42, modeling_utils.py enable_gradient_checkpointing is non-reentrant",
    ),
    case(
        "timm's switch",
        known="one switch",
        origin="huggingface/pytorch-image-models train.py aa4b5850c1543fa488abf260f18390eda46cf85d",
    )(_ones("import timm\nmodel = timm.create_model('x')\nmodel.set_grad_checkpointing(True)\n")),
    case(
        "Lightning's policy around a reentrant model",
        "RS601",
        known="counted with lightning 2.6: 2 recomputes",
    )(_ones(_LIT % _ON_REENTRANT)),
    case("Lightning's two arguments", "RS604", known=f"{_LIGHTNING} raises")(
        _ones(
            "from lightning.pytorch.strategies import FSDPStrategy\n"
            "s = FSDPStrategy(activation_checkpointing=[Block],\n"
            "    activation_checkpointing_policy={Block})\n"
        )
    ),
    case(
        "Lightning's two arguments, to see them refused",
        known=f"{_LIGHTNING} raises, as the test expects",
    )(
        _ones(
            "import pytest\n"
            "from lightning.pytorch.strategies import FSDPStrategy\n"
            "def test_both():\n"
            "    with pytest.raises(ValueError):\n"
            "        FSDPStrategy(activation_checkpointing=[Block],\n"
            "            activation_checkpointing_policy={Block})\n"
        )
    ),
    case("Lightning CLI, a policy", known="one switch")(
        {
            "config.yaml": "trainer:\n  strategy:\n"
            "    class_path: lightning.pytorch.strategies.FSDPStrategy\n    init_args:\n"
            "      activation_checkpointing_policy: [torch.nn.TransformerEncoderLayer]\n"
        }
    ),
    Case(
        "torchtune, both ways at once",
        {
            "r.yaml": _RECIPE + "enable_activation_checkpointing: True\n"
            "ac_mode: selective\nac_option: 2\n"
        },
        ("RS606",),
        f"{_TUNE}:659 and 667: then neither is applied",
        "keys: pytorch/torchtune recipes/configs/dev/8B_full_experimental.yaml",
    ),
    case("torchtune, offloading without checkpoints", "RS604", known=f"{_TUNE}:260 raises")(
        {
            "r.yaml": _RECIPE + "enable_activation_checkpointing: False\n"
            "enable_activation_offloading: True\n"
        }
    ),
    case("torchtitan, full", known="one switch")(
        {
            "t.toml": '[job]\ndump_folder = "o"\n[model]\nname = "llama3"\n'
            '[activation_checkpoint]\nmode = "full"\n'
        }
    ),
    case("LLaMA-Factory under the plugin", "RS601", known=_FACTORY_CODE)(
        {"fsdp.yaml": _FSDP_ON, "sft.yaml": _LLAMA_FACTORY, "go.sh": _LAUNCH_FACTORY}
    ),
    case("LLaMA-Factory under the plugin, non-reentrant", "RS603", known=_FACTORY_CODE)(
        {
            "fsdp.yaml": _FSDP_ON,
            "sft.yaml": _LLAMA_FACTORY + "use_reentrant_gc: false\n",
            "go.sh": _LAUNCH_FACTORY,
        }
    ),
    case(
        "LLaMA-Factory with DeepSpeed",
        known="one switch",
        origin="hiyouga/LLaMA-Factory examples/train_full/llama3_full_sft.yaml "
        "ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30",
    )(
        {
            "sft.yaml": _LLAMA_FACTORY + "deepspeed: ds.json\noutput_dir: o\n",
            "ds.json": '{"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}',
        }
    ),
    Case(
        "axolotl's full fine-tuning of Qwen 3.5",
        {
            "a.yaml": "base_model: x\noutput_dir: o\ngradient_checkpointing: true\n"
            "gradient_checkpointing_kwargs:\n  use_reentrant: false\nfsdp_config:\n"
            "  fsdp_version: 2\n  activation_checkpointing: true\n"
        },
        ("RS602",),
        "axolotl 067b021, core/builders/base.py gives both to the Trainer, which raises in 5.14; "
        "its FSDP 2 is patched and restores random numbers",
        "axolotl-ai-cloud/axolotl examples/qwen3.5/27b-fft.yaml "
        "067b021c8b87a9e5e380b9173c704cf7340e30f5",
    ),
    case("DeepSpeed section, all off", known="nothing is asked for")(
        {
            "ds.json": '{"zero_optimization": {"stage": 2}, "train_batch_size": 8,\n'
            ' "activation_checkpointing": {"partition_activations": false,\n'
            ' "cpu_checkpointing": false}}'
        }
    ),
    Case(
        "Trainer arguments, newer name",
        _ones(
            _TRAINER,
            "a = TrainingArguments('o', activation_checkpointing=True, fsdp='full_shard',\n"
            "    fsdp_config={'activation_checkpointing': True})\n",
        ),
        ("RS604",),
        "transformers 5.23, training_args.py: gradient_checkpointing is an alias of it; " + _RAISES,
    ),
    Case(
        "Trainer arguments, transformers 4.31 pinned",
        {
            **_ones(
                _TRAINER,
                "a = TrainingArguments('o', gradient_checkpointing=True, fsdp='full_shard',\n"
                "    fsdp_config={'activation_checkpointing': True})\n",
            ),
            "requirements.txt": "transformers==4.31.0\n",
        },
        ("RS602",),
        "transformers 4.31 and 4.32 do not refuse it; 4.33 does (trainer.py, each version's wheel)",
    ),
    case("TRL's recipe file", known="one switch", origin="huggingface/trl examples")(
        {"sft.yaml": "model_name_or_path: x\ngradient_checkpointing: true\noutput_dir: o\n"}
    ),
    case("a model's own reentrant checkpoints, wrapped", "RS601", known="counted: 2 recomputes")(
        _ones(_OWN_MODEL.format(True))
    ),
    case(
        "NeMo's defaults",
        known="nothing is on",
        origin="NVIDIA/NeMo examples/nlp/language_modeling/conf/megatron_gpt_config.yaml "
        "8cfedd7203462cb251a914e700e5605444277561",
    )(
        {
            "m.yaml": "model:\n  encoder_seq_length: 4096\n"
            "  activations_checkpoint_granularity: null\n"
            "  activations_checkpoint_method: null\n  activations_checkpoint_num_layers: null\n"
        }
    ),
    case("NeMo, full without a method", "RS604", known=f"{_NEMO} raises")(
        {"m.yaml": "model:\n  activations_checkpoint_granularity: full\n"}
    ),
    case("Hydra, keys of a project's own", known="what the keys do is in the project's own code")(
        {
            "config.yaml": "defaults:\n  - _self_\nmodel:\n  gradient_checkpointing: true\n"
            "trainer:\n  activation_checkpointing: true\n"
        }
    ),
    case("arguments in an array", "RS604", known=_RAISES)(
        {
            "fsdp.yaml": _FSDP_ON,
            **_ones(_TRAINER),
            "go.sh": "ARGS=(\n  --bf16 true\n  --gradient_checkpointing true\n)\n"
            'accelerate launch --config_file fsdp.yaml train.py "${ARGS[@]}"\n',
        }
    ),
    Case(
        "helper in another file, transformers 4 pinned",
        {
            "policies.py": _POLICY,
            "train.py": "from transformers import LlamaForCausalLM\n"
            "from policies import apply_fsdp_checkpointing\n"
            "def main(config):\n    model = LlamaForCausalLM.from_pretrained('x')\n"
            "    if config.fsdp_activation_checkpointing:\n"
            "        model.gradient_checkpointing_enable()\n"
            "        apply_fsdp_checkpointing(model)\n",
            "requirements.txt": "transformers==4.45.2\n",
        },
        ("RS601",),
        "the reported case, with the variant of transformers 4; " + _COUNTED,
        f"{_COOKBOOK} src/llama_cookbook/finetuning.py and policies/",
    ),
)

HELD_OUT = (
    case("accelerate's plugin in Python, non-reentrant model", "RS603", known=_COUNTED)(
        _ones(_ACCELERATE, _PLUGIN_PY, _LOAD, _ON_NEW, _PREPARE)
    ),
    case("accelerate's plugin in Python, alone", known="one switch")(
        _ones(_ACCELERATE, _PLUGIN_PY, _LOAD, _PREPARE)
    ),
    case("config launches a loop of its own, non-reentrant model", "RS603", known=_COUNTED)(
        {"fsdp.yaml": _FSDP_ON, "go.sh": _LAUNCHED, **_ones(_LOOP, _ON_NEW, _PREPARE)}
    ),
    case("config launches a loop of its own, no switch in it", known="one switch")(
        {"fsdp.yaml": _FSDP_ON, "go.sh": _LAUNCHED, **_ones(_LOOP, _PREPARE)}
    ),
    case("PEFT's preparation without checkpoints", known="counted with peft 0.21: one recompute")(
        _ones(
            _HEAD,
            "from peft import prepare_model_for_kbit_training\n"
            "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)\n",
            _WRAP,
        )
    ),
    Case(
        "PEFT's preparation, non-reentrant, under a wrapper",
        _ones(
            _HEAD,
            "import peft\n"
            "model = peft.prepare_model_for_kbit_training(\n"
            "    model, True, {'use_reentrant': False})\n",
            _WRAP,
        ),
        ("RS603",),
        "counted with peft 0.21: one recompute",
    ),
    case(
        "diffusers' switch alone",
        known="one switch",
        origin="huggingface/diffusers examples/dreambooth 58eb52c0803ea9af3abec60841c2a093bdf1f951",
    )(
        _ones(
            "from diffusers import UNet2DModel\nunet = UNet2DModel.from_pretrained('x')\n"
            "if args.gradient_checkpointing:\n    unet.enable_gradient_checkpointing()\n"
        )
    ),
    case(
        "Fabric's policy alone",
        known="one switch",
        origin="Lightning-AI/litgpt litgpt/finetune/full.py "
        "26857050fe3ff627cd714fe92f5838f51a3d5efa",
    )(
        _ones(
            "from lightning.fabric.strategies import FSDPStrategy\nfrom litgpt.model import Block\n"
            "s = FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block})\n"
        )
    ),
    case(
        "Lightning's policy around a non-reentrant model",
        "RS603",
        known="counted with lightning 2.6: one recompute",
    )(_ones(_LIT % _ON_NEW)),
    case(
        "Lightning's policy around a model, transformers 4 pinned",
        "RS601",
        known="counted with lightning 2.6 and the variant of transformers 4: 2 recomputes",
    )({**_ones(_LIT % _ON), "requirements.txt": "transformers<5\n"}),
    case("Lightning CLI, both arguments", "RS604", known=f"{_LIGHTNING} raises")(
        {
            "config.yaml": "trainer:\n  strategy:\n"
            "    class_path: lightning.pytorch.strategies.FSDPStrategy\n    init_args:\n"
            "      activation_checkpointing: [torch.nn.TransformerEncoderLayer]\n"
            "      activation_checkpointing_policy: [torch.nn.TransformerEncoderLayer]\n"
        }
    ),
    case(
        "torchtune, selective",
        known=f"{_TUNE}:659",
        origin="pytorch/torchtune recipes/configs/dev/8B_full_experimental.yaml "
        "bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1",
    )(
        {
            "r.yaml": _RECIPE + "enable_activation_checkpointing: False\n"
            "enable_activation_offloading: False\nac_mode: 'selective'\nac_option: 2\n"
        }
    ),
    case(
        "torchtune, on",
        known=f"{_TUNE}:667",
        origin="pytorch/torchtune recipes/configs/llama3_1/8B_full.yaml "
        "bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1",
    )(
        {
            "r.yaml": _RECIPE + "enable_activation_checkpointing: True\n"
            "enable_activation_offloading: False\n"
        }
    ),
    case(
        "torchtitan, off with an option left",
        known="nothing is on",
        origin="keys as in several public files; repository not given by the index",
    )(
        {
            "t.toml": '[model]\nname = "llama3"\n[activation_checkpoint]\nmode = "none"\n'
            'selective_ac_option = "2"\n'
        }
    ),
    case("LLaMA-Factory with FSDP's section of its own", "RS601", known=_FACTORY_CODE)(
        {
            "sft.yaml": _LLAMA_FACTORY + "fsdp: full_shard auto_wrap\nfsdp_config:\n"
            "  activation_checkpointing: true\n"
            "  transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
        }
    ),
    case("LLaMA-Factory under the plugin, its own off", known="one switch")(
        {
            "fsdp.yaml": _FSDP_ON,
            "sft.yaml": _LLAMA_FACTORY + "disable_gradient_checkpointing: true\n",
            "go.sh": "accelerate launch --config_file fsdp.yaml src/train.py sft.yaml\n",
        }
    ),
    case(
        "LLaMA-Factory's FSDP example",
        known="one switch",
        origin="hiyouga/LLaMA-Factory examples/accelerate/fsdp_config.yaml "
        "ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30",
    )(
        {
            "fsdp.yaml": _FSDP_ON.replace("checkpointing: true", "checkpointing: false"),
            "sft.yaml": _LLAMA_FACTORY,
            "go.sh": _LAUNCH_FACTORY,
        }
    ),
    case(
        "axolotl with FSDP's checkpoints alone",
        known="one switch",
        origin="axolotl-ai-cloud/axolotl examples/mistral4/fft-text.yml "
        "067b021c8b87a9e5e380b9173c704cf7340e30f5",
    )(
        {
            "a.yaml": "base_model: x\noutput_dir: o\nfsdp_version: 2\nfsdp_config:\n"
            "  activation_checkpointing: true\n"
        }
    ),
    case("newer argument on the command line", "RS604", known=_RAISES)(
        {
            "fsdp.yaml": _FSDP_ON,
            **_ones(_TRAINER),
            "go.sh": _LAUNCHED.rstrip() + " --activation_checkpointing true\n",
        }
    ),
    case("newer method's name", "RS601", known="transformers 5.23, modeling_utils.py; " + _COUNTED)(
        _ones(
            _HEAD,
            "model.activation_checkpointing_enable(\n"
            "    activation_checkpointing_kwargs={'use_reentrant': True})\n",
            _WRAP,
        )
    ),
    Case(
        "Trainer arguments, transformers 4.57 pinned",
        {
            **_ones(
                _TRAINER,
                "a = TrainingArguments('o', gradient_checkpointing=True, fsdp='full_shard',\n"
                "    fsdp_config={'activation_checkpointing': True})\n",
            ),
            "requirements.txt": "transformers==4.57.0\n",
        },
        ("RS604",),
        "transformers 4.57, trainer.py:5530",
    ),
    case(
        "a model's own non-reentrant checkpoints, wrapped", "RS603", known="counted: one recompute"
    )(_ones(_OWN_MODEL.format(False))),
    case("NeMo, full and uniform", known="one switch")(
        {
            "m.yaml": "model:\n  activations_checkpoint_granularity: full\n"
            "  activations_checkpoint_method: uniform\n  activations_checkpoint_num_layers: 1\n"
        }
    ),
    case("verl's overrides on the command line", known="one switch")(
        {
            "go.sh": "python3 -m verl.trainer.main_ppo \\\n"
            "  actor_rollout_ref.model.enable_gradient_checkpointing=True \\\n"
            "  actor_rollout_ref.actor.fsdp_config.param_offload=False\n"
        }
    ),
    case(
        "Megatron's arguments in an array",
        known="one switch",
        origin="keys as in several public scripts; repository not given by the index",
    )(
        {
            "go.sh": "PERF_ARGS=(\n  --recompute-granularity full\n  --recompute-method uniform\n"
            '  --recompute-num-layers 1\n)\ntorchrun pretrain_gpt.py "${PERF_ARGS[@]}"\n'
        }
    ),
    case("arguments in a variable", "RS604", known=_RAISES)(
        {
            "fsdp.yaml": _FSDP_ON,
            **_ones(_TRAINER),
            "go.sh": 'CONFIG=fsdp.yaml\nOPTIONS="--bf16 True --gradient_checkpointing True"\n'
            "accelerate launch --config_file $CONFIG train.py $OPTIONS\n",
        }
    ),
    case("helper in another file that nothing calls", known="the wrapper is never applied")(
        {"policies.py": _POLICY, **_ones(_HEAD, "from policies import *\n", _ON_REENTRANT)}
    ),
    case(
        "a plain GPT without checkpoints",
        known="nothing is on",
        origin="karpathy/nanoGPT train.py 3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    )(
        _ones(
            "import torch\nfrom model import GPT, GPTConfig\nmodel = GPT(GPTConfig())\n"
            "checkpoint = torch.load('ckpt.pt')\nmodel.load_state_dict(checkpoint['model'])\n"
            "torch.save(checkpoint, 'ckpt.pt')\n"
        )
    ),
)
