"""What the scripts on pictures are given: a CLIP for open_clip, a stable diffusion for diffusers.

    python benchmarks/real_pictures.py FOLDER

FOLDER is that of ``real_inputs.py``. The weights are random; names and keys are those of the two
libraries.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

_SIDE = 32
_WIDTH = 32
_WORDS = 1000


def clip(folder: Path) -> None:
    """The description of a model, as open_clip keeps it."""
    folder.mkdir()
    seeing = {"image_size": _SIDE, "layers": 3, "width": 64, "head_width": 32, "patch_size": 8}
    reading = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 3}
    described = {"embed_dim": 32, "vision_cfg": seeing, "text_cfg": reading}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": described}))


def stable(folder: Path) -> None:
    """A text-to-image pipeline with all its parts."""
    folder.mkdir()
    letters = [chr(number) for number in range(33, 127)]
    known = [*letters, *(f"{one}</w>" for one in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({one: n for n, one in enumerate(known)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77
    )
    reading = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=_WORDS,
            hidden_size=_WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=known.index("<|startoftext|>"),
            eos_token_id=known.index("<|endoftext|>"),
        )
    )
    unet = UNet2DConditionModel(
        sample_size=_SIDE // 2,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=_WIDTH,
        attention_head_dim=8,
    )
    coder = AutoencoderKL(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        sample_size=_SIDE,
    )
    StableDiffusionPipeline(
        vae=coder,
        text_encoder=reading,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDPMScheduler(num_train_timesteps=100),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "whole")
    for part in (folder / "whole").iterdir():
        part.rename(folder / part.name)
    (folder / "whole").rmdir()


def captioned(pictures: Path, lines: list[str], folder: Path) -> None:
    """Pictures with a line of text each."""
    folder.mkdir()
    told: list[dict[str, str]] = []
    for picture, line in zip(sorted(pictures.rglob("*.png")), lines, strict=False):
        name = f"{len(told)}.png"
        shutil.copy(picture, folder / name)
        told.append({"file_name": name, "text": line[:40]})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))


def make(inputs: Path) -> None:
    """All three, from the pictures and the texts that are there."""
    clip(inputs / "clip")
    stable(inputs / "stable")
    lines = (inputs / "text.txt").read_text().splitlines()
    captioned(inputs / "pictures" / "train", lines, inputs / "captioned")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
