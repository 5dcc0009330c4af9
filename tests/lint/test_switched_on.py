"""Which checkpoints are on, on which layers and by which variant, as frameworks read the keys."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from recompute_scan.cli import cli
from recompute_scan.lint import lint
from tests.lint.cases import PARTS

SCRIPT = PARTS["HEAD"] + PARTS["WRAP"] + "if args.gc:\n    " + PARTS["ON_REENTRANT"]
ON = {
    # torchtitan 0.2.2, distributed/activation_checkpoint.py
    "titan.toml": (
        '[activation_checkpoint]\nmode = "full"\n',
        [("torchtitan", "each TransformerBlock", "non-reentrant", False)],
    ),
    "off.toml": ('[activation_checkpoint]\nmode = "none"\n', []),
    # torchtune bd2a0fc, recipes/full_finetune_distributed.py
    "tune.yaml": (
        "enable_activation_checkpointing: True\n",
        [("torchtune", "each TransformerSelfAttentionLayer", "non-reentrant", False)],
    ),
    # LLaMA-Factory ff6d4d1, model_utils/checkpointing.py: on and reentrant unless told otherwise
    "factory.yaml": (
        "stage: sft\nfinetuning_type: full\n",
        [("LLaMA-Factory, by default", "the layers that", "reentrant", False)],
    ),
    "factory_off.yaml": (
        "stage: sft\nfinetuning_type: full\ndisable_gradient_checkpointing: true\n",
        [],
    ),
    # accelerate 1.15, utils/fsdp_utils.py
    "fsdp.yaml": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing: true\n"
        "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n",
        [("FSDP's wrapper", "each LlamaDecoderLayer", "non-reentrant", False)],
    ),
    # transformers 5.23, training_args.py
    "trainer.yaml": (
        "output_dir: o\ngradient_checkpointing: true\n"
        "gradient_checkpointing_kwargs:\n  use_reentrant: true\n",
        [("gradient_checkpointing", "the layers that", "reentrant", False)],
    ),
    # NeMo 8cfedd7, megatron/transformer.py: Megatron's own function, which is reentrant
    "nemo.yaml": (
        "model:\n  activations_checkpoint_granularity: full\n"
        "  activations_checkpoint_method: uniform\n",
        [("NeMo", "whole layers", "reentrant", False)],
    ),
    # nemo-automodel 0.7.0, components/distributed
    "automodel.yaml": (
        "distributed:\n  strategy: fsdp2\n  activation_checkpointing: true\n",
        [("NeMo Automodel", "the layers that", "non-reentrant", False)],
    ),
    # Megatron-LM, arguments.py --recompute-granularity; accelerate and Hydra in commands
    "go.sh": (
        "ARGS=(\n  --recompute-granularity full\n)\ntorchrun pretrain_gpt.py ${ARGS[@]}\n"
        "accelerate launch t.py --gradient_checkpointing True --use_reentrant True\n"
        "python t.py model.activations_checkpoint_granularity=selective\n",
        [
            ("Megatron-core", "whole layers", "reentrant", False),
            ("--gradient_checkpointing", "the layers that", "reentrant", False),
            ("NeMo", "the attention", "reentrant", False),
        ],
    ),
    "model.py": (
        "from torch.utils.checkpoint import checkpoint\nclass B:\n    def forward(self, x):\n"
        "        return checkpoint(self.f, x, use_reentrant=False)\n",
        [("torch.utils.checkpoint", "self.f in B.forward", "non-reentrant", False)],
    ),
    "train.py": (
        SCRIPT,
        [
            ("a checkpoint wrapper", "each LlamaDecoderLayer in model", "non-reentrant", False),
            ("the model's own switch", "the layers that", "reentrant", True),
        ],
    ),
}


@pytest.mark.parametrize("name", ON)
def test_what_a_file_switches_on(name: str, tmp_path: Path) -> None:
    text, expected = ON[name]
    (tmp_path / name).write_text(text)
    found = lint([tmp_path]).switched_on
    assert len(found) == len(expected)
    for one, (by, layers, variant, conditional) in zip(found, expected, strict=True):
        assert (one.by, one.variant, one.conditional) == (by, variant, conditional)
        assert one.layers.startswith(layers)


@pytest.mark.parametrize(
    ("installed", "pinned", "code"),
    [
        ("4.46.1", "", "RS601"),
        ("5.2.0.dev0", "", "RS603"),
        (None, "", "RS602"),
        ("unknown", "", "RS602"),
        ("5.2.0", "transformers==4.46.1\n", "RS601"),
    ],
)
def test_the_installed_version_counts_where_none_is_pinned(
    installed: str | None, pinned: str, code: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PARTS["HEAD"] + PARTS["WRAP"] + PARTS["ON"])
    (tmp_path / "requirements.txt").write_text(pinned)
    (found,) = lint([tmp_path], installed=installed).found
    assert found.code == code
    assert ("pinned in its folder" in found.why) == bool(pinned)
    assert ("being installed" in found.why) == (not pinned and code != "RS602")


def test_the_list_has_a_line_for_each(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    printed = CliRunner().invoke(cli, ["lint", "--list", str(tmp_path)])
    *told, closing = printed.output.splitlines()
    assert len(told) == 2
    assert told[1].endswith("reentrant, under a condition")
    assert closing == "2 switched on (1 file read)"


_SECTION = (
    '{"train_batch_size": 8, "zero_optimization": {"stage": 2},\n'
    ' "activation_checkpointing": {"partition_activations": %s}}'
)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("ds.py", "x = 1\nds = " + _SECTION % "True" + "\n", 3),
        ("go.sh", "DS='" + _SECTION % "true" + "'\ndeepspeed train.py\n", 2),
        ("go.sh", "cat <<EOF > ds.json\n" + _SECTION % "true" + "\nEOF\ndeepspeed train.py\n", 3),
    ],
)
def test_sections_of_deepspeed_wherever_they_are(
    name: str, text: str, line: int, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert [(found.code, found.line) for found in lint([tmp_path]).found] == [("RS606", line)]
    (tmp_path / "model.py").write_text(
        "import deepspeed\ndeepspeed.checkpointing.checkpoint(f, x)\n"
    )
    assert not lint([tmp_path]).found
