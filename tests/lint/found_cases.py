"""Scripts and configurations as others have them: found and labelled, then read by the linter.

Files hold the keys that matter, in the shape that they have in public; ``origin`` says where. The
labels come from the code of the frameworks that read the keys, or from the script's own logic.
"""

from tests.lint.cases import _HEAD, _ON_NEW, Case, case

_AXOLOTL = "axolotl-ai-cloud/axolotl {} 067b021c8b87a9e5e380b9173c704cf7340e30f5"
_ONE_OF_AXOLOTL = (
    "axolotl 067b021, utils/trainer.py setup_fsdp_envs: the plugin's wrapper; its own switch is off"
)
_GIVEN_UP = "a public script; repository not given by the index"
_POLICY = (
    "from functools import partial\n"
    "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (\n"
    "    checkpoint_wrapper, CheckpointImpl, apply_activation_checkpointing)\n"
    "non_reentrant_wrapper = partial(checkpoint_wrapper,\n"
    "    checkpoint_impl=CheckpointImpl.NO_REENTRANT)\n"
)
_T5_POLICY = (
    _POLICY + "from transformers.models.t5.modeling_t5 import T5Block\n"
    "check_fn = lambda submodule: isinstance(submodule, T5Block)\n"
    "def apply_fsdp_checkpointing(model):\n"
    "    apply_activation_checkpointing(\n"
    "        model, checkpoint_wrapper_fn=non_reentrant_wrapper, check_fn=check_fn)\n"
)
_T5 = (
    "import policies\nfrom transformers import AutoModelForSeq2SeqLM\n"
    "def main(cfg):\n    model = AutoModelForSeq2SeqLM.from_pretrained(cfg.model)\n"
    "    if cfg.hf_activation_checkpointing:\n        model.gradient_checkpointing_enable()\n"
    "    model = FSDP(model)\n{}"
    "    if cfg.fsdp_activation_checkpointing:\n        policies.apply_fsdp_checkpointing(model)\n"
)
_REFUSED = (
    "    if cfg.hf_activation_checkpointing and cfg.fsdp_activation_checkpointing:\n"
    "        print('not compatible. Aborting.')\n        return\n"
)
_CONTEXT_PARALLEL = (
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing: true\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_version: 2\nparallelism_config:\n"
    "  parallelism_config_cp_size: 2\n"
)
_NO_STATE = (
    "accelerate 16cb6eb, utils/fsdp_utils.py: checkpoint_wrapper(…, preserve_rng_state=False)"
)
_CHOSEN = (
    "import json\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
    "def main(args):\n    fsdp_config = json.loads(args.fsdp_config_json)\n"
    "    use_fsdp = bool(fsdp_config.get('activation_checkpointing'))\n"
    "    model = AutoModelForCausalLM.from_pretrained(args.model_path)\n"
    "    if not use_fsdp and hasattr(model, 'gradient_checkpointing_enable'):\n"
    "        model.gradient_checkpointing_enable()\n"
    "    kwargs = {'gradient_checkpointing': not use_fsdp, 'fsdp_config': fsdp_config}\n"
    "    Trainer(model=model, args=TrainingArguments(**kwargs)).train()\n"
)

FOUND = (
    case(
        "axolotl, wrapper of FSDP 2 alone",
        known=_ONE_OF_AXOLOTL,
        origin=_AXOLOTL.format("examples/mistral4/fft-vision.yml"),
    )(
        {
            "fft.yml": "base_model: x\nfsdp_version: 2\nfsdp_config:\n"
            "  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
            "  transformer_layer_cls_to_wrap: Mistral4DecoderLayer\n"
            "  activation_checkpointing: true\n"
        }
    ),
    case(
        "axolotl, QLoRA and prefixed keys",
        known=_ONE_OF_AXOLOTL,
        origin=_AXOLOTL.format("examples/llama-4/scout-qlora-flexattn-fsdp2.yaml"),
    )(
        {
            "scout.yaml": "base_model: x\nadapter: qlora\nfsdp:\n  - auto_wrap\nfsdp_config:\n"
            "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
            "  fsdp_activation_checkpointing: true\n"
        }
    ),
    case(
        "axolotl, its own switch off for the wrapper",
        known=_ONE_OF_AXOLOTL,
        origin=_AXOLOTL.format("examples/archived/dbrx/16bit-lora.yaml"),
    )(
        {
            "lora.yaml": "base_model: x\nadapter: lora\nlora_dropout: 0.05\n"
            "gradient_checkpointing: false  # don't use with fsdp_activation_checkpointing\n"
            "fsdp:\n  - full_shard\nfsdp_config:\n  fsdp_activation_checkpointing: true\n"
        }
    ),
    case(
        "axolotl, its own switch without a value",
        known=_ONE_OF_AXOLOTL,
        origin=_AXOLOTL.format("examples/magistral/magistral-small-fsdp-qlora.yaml"),
    )(
        {
            "qlora.yaml": "base_model: x\nadapter: qlora\ngradient_checkpointing:\nfsdp:\n"
            "  - full_shard\nfsdp_config:\n  fsdp_activation_checkpointing: true\n"
        }
    ),
    Case(
        "axolotl, both on",
        {
            "moe.yaml": "base_model: x\nadapter: qlora\ngradient_checkpointing: true\n"
            "gradient_checkpointing_kwargs:\n  use_reentrant: false\nfsdp_config:\n"
            "  fsdp_version: 2\n  activation_checkpointing: true\n"
        },
        ("RS602",),
        "axolotl 067b021, core/builders/base.py hands both to the Trainer, which refuses them",
        _AXOLOTL.format("examples/qwen3.5/122b-a10b-moe-qlora-fsdp.yaml"),
    ),
    case(
        "accelerate, context parallel",
        "RS605",
        known=_NO_STATE,
        origin="huggingface/accelerate examples/torch_native_parallelism/configs/cp.yaml "
        "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    )({"cp.yaml": _CONTEXT_PARALLEL}),
    Case(
        "TRL's context parallel configuration, launched",
        {
            "cp.yaml": _CONTEXT_PARALLEL,
            "go.sh": "accelerate launch --config_file cp.yaml sft.py\n",
            "sft.py": "from trl import SFTConfig, SFTTrainer\n"
            "args = SFTConfig('o', gradient_checkpointing=False)\n",
        },
        ("RS605",),
        _NO_STATE,
        "huggingface/trl examples/accelerate_configs/context_parallel_2gpu.yaml "
        "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    ),
    case(
        "a project's own key of that name",
        known="HALOs 4831988, train: one wrapper",
        origin="ContextualAI/HALOs config/model/base_model.yaml "
        "4831988636b4cbc1c30c0bce78df568cf0f8103b",
    )({"base_model.yaml": "activation_checkpointing: true\npolicy_dtype: bfloat16\n"}),
    case(
        "a wrapper behind an import that may fail",
        known="one switch",
        origin="eric-mitchell/direct-preference-optimization trainers.py "
        "f8b8c0f49dc92a430bae41585f9d467d3618fe2f",
    )(
        {
            "trainers.py": "import functools\nclass FSDPTrainer:\n"
            "    def __init__(self, config, p):\n        self.policy = FSDP(p)\n"
            "        if config.activation_checkpointing:\n"
            "            try:\n"
            "                from torch.distributed.algorithms._checkpoint.checkpoint_wrapper "
            "import (\n                    checkpoint_wrapper, apply_activation_checkpointing,\n"
            "                    CheckpointImpl)\n"
            "                wrapper = functools.partial(checkpoint_wrapper,\n"
            "                    checkpoint_impl=CheckpointImpl.NO_REENTRANT)\n"
            "            except Exception as e:\n                print(e)\n            else:\n"
            "                check_fn = lambda submodule: isinstance(submodule, wrap_class)\n"
            "                apply_activation_checkpointing(self.policy,\n"
            "                    checkpoint_wrapper_fn=wrapper, check_fn=check_fn)\n"
        }
    ),
    case(
        "a wrapper of either variant by an argument",
        known="one switch",
        origin="AnswerDotAI/fsdp_qlora train.py 05ed9f2a60f96a0795cb082bceab70a9b19fd213",
    )(
        {
            "train.py": _POLICY + "def main(args):\n    model = load()\n"
            "    if args['use_gradient_checkpointing']:\n"
            "        if args['reentrant_checkpointing']:\n"
            "            model.enable_input_require_grads()\n"
            "        wrapper = partial(checkpoint_wrapper,\n"
            "            checkpoint_impl=CheckpointImpl.REENTRANT\n"
            "            if args['reentrant_checkpointing'] else CheckpointImpl.NO_REENTRANT)\n"
            "        check_fn = lambda m: isinstance(m, (LlamaDecoderLayer, MistralDecoderLayer))\n"
            "        apply_activation_checkpointing(\n"
            "            model, checkpoint_wrapper_fn=wrapper, check_fn=check_fn)\n"
        }
    ),
    case(
        "a wrapper that counts its blocks",
        known="one switch",
        origin="foundation-model-stack/fms-fsdp fms_fsdp/policies/ac_handler.py "
        "5a296afe42f9932f590783cb053fa0f9384e01fc",
    )(
        {
            "ac_handler.py": _POLICY + "from fms.models.llama import LLaMABlock\n"
            "def apply_fsdp_checkpointing(model, every):\n"
            "    def selective(submodule):\n"
            "        selective.__dict__.setdefault('_count', 0)\n"
            "        if isinstance(submodule, LLaMABlock):\n"
            "            selective._count += 1\n"
            "            return not every or selective._count % every == 0\n"
            "    apply_activation_checkpointing(model,\n"
            "        checkpoint_wrapper_fn=non_reentrant_wrapper, check_fn=selective)\n"
        }
    ),
    case(
        "the model's own switch in a comment",
        known="one switch",
        origin="okoge-kaz/llm-recipes src/llama_recipes/finetuning.py "
        "890d9dd6067345634af2fb8b097c69579774e64a",
    )(
        {
            "policies.py": _T5_POLICY,
            "finetuning.py": "from policies import apply_fsdp_checkpointing\n"
            "from transformers import AutoModelForCausalLM\n"
            "model = AutoModelForCausalLM.from_pretrained('x')\n"
            "# model.gradient_checkpointing_enable()\n"
            "apply_fsdp_checkpointing(model=model, model_name=args.base_model)\n",
        }
    ),
    Case(
        "a wrapper around the attention, and the model's own switch",
        {
            "train.py": _HEAD
            + "from transformers.models.llama.modeling_llama import LlamaAttention\n"
            "apply_activation_checkpointing(model, checkpoint_wrapper_fn=partial(\n"
            "    checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),\n"
            "    check_fn=lambda m: isinstance(m, LlamaAttention))\n" + _ON_NEW
        },
        ("RS602",),
        "the attention runs twice again, though both are non-reentrant: counted in test_truths.py; "
        "that it lies inside a layer is in no file here",
        "the wrapper: seopbo/llmpy "
        "pre-training/fsdp_policies/activation_checkpointing_functions.py "
        "a18cf298d1886bd532af50333c686b92499280b8",
    ),
    case(
        "Trainer arguments as a dict, FSDP without its wrapper",
        known="one switch",
        origin="shikras/shikra config/_base_/train/shikra_fsdp.py "
        "ff79a4ced85d21739e1a4c5cec9e1e8f896b962c",
    )(
        {
            "shikra_fsdp.py": "training_args = dict(output_dir=None, gradient_checkpointing=True,\n"
            "    fsdp='full_shard auto_wrap',\n"
            "    fsdp_transformer_layer_cls_to_wrap='LlamaDecoderLayer')\n"
        }
    ),
    case(
        "the model's switch only where FSDP's is off",
        known="the script's own condition: never both",
        origin=_GIVEN_UP,
    )({"train.py": _CHOSEN}),
    case(
        "a flag for each of the two",
        "RS602",
        known="both where both flags are set, and the model's own is reentrant before "
        "transformers 5",
        origin=_GIVEN_UP,
    )({"policies.py": _T5_POLICY, "train.py": _T5.format("")}),
    case(
        "a flag for each of the two, refused together",
        known="the script's own return: never both",
        origin=_GIVEN_UP,
    )({"policies.py": _T5_POLICY, "train.py": _T5.format(_REFUSED)}),
    case("accelerate's plugin, off", known="one switch", origin=_GIVEN_UP)(
        {
            "train.py": "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n"
            "accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(\n"
            "    activation_checkpointing=False))\n"
            "from transformers import AutoModel\nmodel = AutoModel.from_pretrained('x')\n"
            "model.gradient_checkpointing_enable()\nmodel = accelerator.prepare(model)\n"
        }
    ),
    Case(
        "wrappers in a loop without random states",
        {
            "ac.py": "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (\n"
            "    checkpoint_wrapper as ptd_checkpoint_wrapper)\n"
            "def apply_ac(model):\n"
            "    for name, block in model.layers.named_children():\n"
            "        block = ptd_checkpoint_wrapper(block, preserve_rng_state=False)\n"
            "        model.layers.register_module(name, block)\n"
        },
        ("RS605",),
        "torch 2.13, utils/checkpoint.py: preserve_rng_state",
        _GIVEN_UP,
    ),
    Case(
        "a checkpoint of a method without random states",
        {
            "model.py": "from torch.utils.checkpoint import checkpoint\n"
            "class FeedForward:\n    def forward(self, x):\n"
            "        if self.training and self.gradient_checkpointing:\n"
            "            return checkpoint(self.mlp, x, use_reentrant=False,\n"
            "                preserve_rng_state=False)\n        return self.mlp(x)\n"
        },
        ("RS605",),
        "torch 2.13, utils/checkpoint.py: preserve_rng_state",
        _GIVEN_UP,
    ),
    case(
        "a script's own flags of accelerate's names",
        known="behind the script they are its own; accelerate was told of no FSDP",
        origin=_GIVEN_UP,
    )(
        {
            "go.sh": "accelerate launch --num_processes 8 \\\n  train.py \\\n"
            "  --distributed_backend fsdp --fsdp_activation_checkpointing \\\n"
            "  --gradient_checkpointing\n",
            "train.py": "import torch\n",
        }
    ),
    case(
        "PEFT's SFT example under FSDP",
        known="one switch",
        origin="huggingface/peft examples/sft/run_peft_fsdp.sh "
        "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
    )(
        {
            "fsdp_config.yaml": "distributed_type: FSDP\nfsdp_config:\n"
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_use_orig_params: false\n",
            "go.sh": 'accelerate launch --config_file "fsdp_config.yaml"  train.py \\\n'
            "  --gradient_checkpointing True \\\n  --use_reentrant False\n",
            "train.py": "from transformers import HfArgumentParser\nfrom trl import SFTConfig\n",
        }
    ),
    case(
        "Fabric's strategy with a policy, and a library's layers",
        known="one switch",
        origin=_GIVEN_UP,
    )(
        {
            "train.py": "import lightning as L\n"
            "from lightning.fabric.strategies import FSDPStrategy\n"
            "from transformers.models.mistral.modeling_mistral import MistralDecoderLayer\n"
            "if devices > 1:\n    strategy = FSDPStrategy(auto_wrap_policy={MistralDecoderLayer},\n"
            "        activation_checkpointing_policy={MistralDecoderLayer})\n"
            "else:\n    strategy = 'auto'\n"
            "fabric = L.Fabric(devices=devices, strategy=strategy)\n"
        }
    ),
    case("Trainer arguments by name, under DeepSpeed", known="one switch", origin=_GIVEN_UP)(
        {
            "train.py": "from transformers import Trainer, TrainingArguments\n"
            "targs = TrainingArguments(**supported(TrainingArguments, dict(\n"
            "    output_dir='o', gradient_checkpointing=True,\n"
            "    gradient_checkpointing_kwargs={'use_reentrant': False},\n"
            "    deepspeed='zero3.json')))\n",
            "zero3.json": '{"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}\n',
        }
    ),
)
