"""Rows from other fields than language models: pictures, graphs, recommendations, reinforcement.

Each has another way to checkpoint: a function of its own, autograd functions of its own, some
layers only, or none. What is counted in them was known before the tool saw them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.real_rows import (
    _DIFFUSERS,
    _LM,
    _TRAINER_ARGS,
    _TRANSFORMERS,
    _TRL_ARGS,
    Row,
    Source,
    _replace,
)

_DENSE = Source(
    "efficient_densenet_pytorch", "gpleiss", "d2d0629dae2912ec4f0444fab5e3df4c375c44fd", "MIT"
)
_GUIDED = Source("guided-diffusion", "openai", "22e0df8183507e13a7813f8d38d51b072ca1e67c", "MIT")
_PYG = Source("pytorch_geometric", "pyg-team", "5c6461b2305ad068a6d61165b3c55852a11aaa41", "MIT")
_DLRM = Source("dlrm", "facebookresearch", "090956ee2319ddd349a42232958aefccfe3f7b0a", "MIT")
_CLEANRL = Source("cleanrl", "vwxyzjn", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb", "MIT")
_CLIP = Source("open_clip", "mlfoundations", "89fb801f1e6087880e951fc8354b8a2077b79c6d", "MIT")
_ALPACA = Source(
    "stanford_alpaca", "tatsu-lab", "761dc5bfbdeeffa89b8bff5d038781a4055f796a", "Apache-2.0"
)


def _made_pictures(folder: Path, _: Path) -> None:
    """Pictures of torchvision's instead of CIFAR10, which it would load."""
    demo = folder / "demo.py"
    for part, kind in (("True", "train"), ("False", "test")):
        load = "True" if part == "True" else "False"
        _replace(
            demo,
            f"datasets.CIFAR10(data, train={part}, transform={kind}_transforms, download={load})",
            f"datasets.FakeData(80, (3, 32, 32), 10, {kind}_transforms)",
        )


_OGB = """import torch
from sklearn.metrics import roc_auc_score
from torch_geometric.data import Data


class PygNodePropPredDataset(list):
    def __init__(self, *_, **__):
        torch.manual_seed(7)
        edges, given = torch.randint(0, 400, (2, 3000)), torch.rand(3000, 8)
        answers = torch.randint(0, 2, (400, 4))
        super().__init__([Data(edge_index=edges, edge_attr=given, y=answers, num_nodes=400)])

    def get_idx_split(self):
        return dict(zip(("train", "valid", "test"), torch.arange(400).split((240, 80, 80))))


class Evaluator:
    def __init__(self, *_):
        pass

    def eval(self, told):
        return {"rocauc": roc_auc_score(told["y_true"], told["y_pred"])}
"""


def _graph(folder: Path, _: Path) -> None:
    """The data set's package, with a graph made by chance."""
    (folder / "ogb").mkdir()
    (folder / "ogb/nodeproppred.py").write_text(_OGB)


def _few_layers(folder: Path, _: Path) -> None:
    """Six layers instead of 28, and two epochs."""
    script = folder / "ogbn_proteins_deepgcn.py"
    _replace(script, "num_layers=28", "num_layers=6")
    _replace(script, "range(1, 1001)", "range(1, 3)")
    _replace(script, "import torch\n", "import torch\ntorch.manual_seed(7)\n")
    for old in ("num_workers=5)\ntest", "num_workers=5)\n\n\nclass"):
        _replace(script, old, old.replace("5", "0"))


def _residual_twice(folder: Path, _: Path) -> None:
    """Torch's checkpoint around the one that the repository has of its own, in its main block."""
    _replace(
        folder / "guided_diffusion/unet.py",
        "        return checkpoint(\n"
        "            self._forward, (x, emb), self.parameters(), self.use_checkpoint\n"
        "        )\n",
        "        return th.utils.checkpoint.checkpoint(self._once, x, emb, use_reentrant=True)\n\n"
        "    def _once(self, x, emb):\n"
        "        return checkpoint(\n"
        "            self._forward, (x, emb), self.parameters(), self.use_checkpoint\n"
        "        )\n",
    )
    _replace(
        folder / "guided_diffusion/unet.py",
        "import torch as th\n",
        "import torch as th\nimport torch.utils.checkpoint\n",
    )


def _reward(folder: Path, _: Path) -> None:
    (folder / "rewards.py").write_text(
        "def length(completions, **_):\n    return [float(len(one)) for one in completions]\n"
    )


def _clip(folder: Path, inputs: Path) -> None:
    shutil.copytree(inputs / "clip", folder / "tiny")


_CLIP_ARGS = (
    *("-m", "open_clip_train.main", "--model", "local-dir:tiny", "--dataset-type", "synthetic"),
    *("--train-num-samples", "48", "--batch-size", "4", "--epochs", "1", "--workers", "0"),
    *("--device", "cpu", "--precision", "fp32", "--log-every-n-steps", "1", "--warmup", "1"),
    *("--logs", "{out}/clip", "--seed", "7", "--save-frequency", "0", "--train-data", "none"),
)
_DENSE_ARGS = (
    *("demo.py", "--data", "none", "--save", "{out}", "--depth", "16", "--growth_rate", "4"),
    *("--valid_size", "0", "--n_epochs", "1", "--batch_size", "8", "--seed", "7", "--efficient"),
)
_GUIDED_ARGS = (
    *("scripts/image_train.py", "--data_dir", "{in}/pictures/train", "--image_size", "32"),
    *("--channel_mult", "1,2", "--num_channels", "32", "--num_res_blocks", "1", "--num_heads", "2"),
    *("--attention_resolutions", "16", "--batch_size", "4", "--lr_anneal_steps", "12"),
    *("--log_interval", "1", "--save_interval", "1000", "--diffusion_steps", "50"),
    "--use_checkpoint",
)
_PICTURE_ARGS = (
    *("train_text_to_image.py", "--pretrained_model_name_or_path", "{in}/stable"),
    *("--train_data_dir", "{in}/captioned", "--output_dir", "{out}/stable", "--resolution", "32"),
    *("--train_batch_size", "2", "--max_train_steps", "12", "--seed", "7", "--mixed_precision"),
    *("no", "--checkpointing_steps", "1000", "--lr_warmup_steps", "0"),
)
_EXPERTS = (
    "hidden_size=32,intermediate_size=64,num_hidden_layers=3,num_attention_heads=2,"
    "num_key_value_heads=2,num_local_experts=4,max_position_embeddings=64"
)

ELSEWHERE = (
    *(
        Row(
            f"efficient DenseNet{name}",
            (*_DENSE_ARGS, efficient),
            _DENSE,
            ("demo.py", "models"),
            change=_made_pictures,
        )
        for name, efficient in ((", off", "False"), ("", "True"))
    ),
    *(
        Row(
            f"guided-diffusion{name}",
            (*_GUIDED_ARGS, use),
            _GUIDED,
            ("scripts", "guided_diffusion"),
            change=change,
            variables=(("OPENAI_LOGDIR", "logs"),),
            python_path=(".",),
        )
        for name, use, change in (
            (", off", "False", None),
            ("", "True", None),
            (", doubled", "True", _residual_twice),
        )
    ),
    Row(
        "PyG DeeperGCN",
        ("ogbn_proteins_deepgcn.py",),
        _PYG,
        ("examples/ogbn_proteins_deepgcn.py",),
        "examples",
        data=_graph,
        change=_few_layers,
    ),
    Row(
        "DLRM",
        (
            *("dlrm_s_pytorch.py", "--arch-sparse-feature-size", "4", "--arch-embedding-size"),
            *("50-60-70", "--arch-mlp-bot", "6-8-4", "--arch-mlp-top", "10-8-1", "--data-size"),
            *("96", "--mini-batch-size", "8", "--print-freq", "1", "--num-indices-per-lookup", "3"),
        ),
        _DLRM,
        (
            *(
                "dlrm_s_pytorch.py",
                "dlrm_data_pytorch.py",
                "data_utils.py",
                "data_loader_terabyte.py",
            ),
            *("extend_distributed.py", "mlperf_logger.py", "optim", "tricks"),
        ),
    ),
    Row(
        "CleanRL PPO",
        (
            *("ppo.py", "--total-timesteps", "512", "--num-envs", "2", "--num-steps", "64"),
            *("--num-minibatches", "2", "--update-epochs", "2", "--no-cuda"),
        ),
        _CLEANRL,
        ("cleanrl/ppo.py",),
        "cleanrl",
    ),
    *(
        Row(
            f"open_clip{name}",
            (*_CLIP_ARGS, *more),
            _CLIP,
            ("src",),
            "src",
            data=_clip,
        )
        for name, more in (("", ()), (", checkpoints", ("--grad-checkpointing",)))
    ),
    Row(
        "Alpaca",
        (
            *("train.py", "--model_name_or_path", "{in}/llama", "--data_path"),
            *("{in}/alpaca/data.json", *_TRAINER_ARGS, "--gradient_checkpointing", "true"),
        ),
        _ALPACA,
        ("train.py", "utils.py"),
        packages="older",
    ),
    Row(
        "run_clm, experts",
        (
            *("run_clm.py", "--model_type", "mixtral", "--tokenizer_name", "{in}/llama"),
            *("--config_overrides", _EXPERTS, "--train_file", "{in}/text.txt", "--do_train"),
            *("--block_size", "32", *_TRAINER_ARGS, "--gradient_checkpointing", "true"),
        ),
        _TRANSFORMERS,
        (_LM,),
        _LM,
    ),
    Row(
        "TRL GRPO",
        (
            *("-m", "trl.scripts.grpo", "--dataset_name", "{in}/preferences", "--reward_funcs"),
            *("rewards.length", *_TRL_ARGS, "--num_generations", "2", "--max_completion_length"),
            "8",
        ),
        data=_reward,
    ),
    *(
        Row(
            f"diffusers text to image{name}",
            (*_PICTURE_ARGS, *more),
            _DIFFUSERS,
            ("examples/text_to_image",),
            "examples/text_to_image",
        )
        for name, more in (("", ()), (", checkpoints", ("--gradient_checkpointing",)))
    ),
)
