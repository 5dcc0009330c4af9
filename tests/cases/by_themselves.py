"""Models whose own switch for checkpointing puts two checkpoints around one layer.

Each is made from a config, small, switched on by one call and trained for a few steps. Hooks count
how often each of its layers runs in a step: once without checkpoints, twice with one, three times
with two.
"""

import importlib
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from recompute_scan.analysis.pipeline import analyse

STEPS = 3
# What makes the model, with the part of the class's name that its layers have.
Made = tuple[nn.Module, str, Callable[[Any], torch.Tensor]]


def tried(make: Callable[[], Made]) -> tuple[Counter[float], str, float]:
    """How many layers run how often in a step; the verdict, and recomputes per backward pass."""
    torch.manual_seed(0)
    model, kind, loss = make()
    runs: Counter[str] = Counter()
    for name, layer in model.named_modules():
        if kind in type(layer).__name__:
            layer.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    sgd = torch.optim.SGD(model.train().parameters(), lr=1e-4)
    plan = schedule(wait=0, warmup=1, active=STEPS - 1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan) as profiler:
        for _ in range(STEPS):
            torch.autograd.backward(loss(model))
            sgd.step()
            sgd.zero_grad()
            profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        result = analyse([trace])
    often = Counter(number / STEPS for number in runs.values())
    return often, result.verdict, result.recompute_per_backward or 0.0


def swin() -> Made:
    transformers: Any = importlib.import_module("transformers")

    model = transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[2, 2, 6], num_heads=[2, 2, 2],
            window_size=4, num_labels=5,
        )
    )  # fmt: skip
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pixels, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    return model, "SwinAttention", lambda m: m(pixel_values=pixels, labels=labels).loss


def autoencoder(name: str, shape: tuple[int, ...], **config: Any) -> Callable[[], Made]:
    """One of diffusers' for videos of this shape."""

    def make() -> Made:
        model: Any = getattr(importlib.import_module("diffusers"), name)(**config)
        model.enable_gradient_checkpointing()
        video = torch.randn(shape)
        return model, "Resnet", lambda m: m(video).sample.square().mean()

    return make


_FOUR = (8, 8, 8, 8)
_FIVE_ONES = (1, 1, 1, 1, 1)
MODELS: dict[str, tuple[str, Callable[[], Made]]] = {
    "SwinForImageClassification": ("transformers", swin),
    "AutoencoderKLCogVideoX": (
        "diffusers",
        autoencoder(
            "AutoencoderKLCogVideoX", (1, 3, 5, 16, 16), latent_channels=4, layers_per_block=1,
            block_out_channels=_FOUR, norm_num_groups=2,
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
        ),
    ),
    "AutoencoderKLHunyuanVideo": (
        "diffusers",
        autoencoder(
            "AutoencoderKLHunyuanVideo", (1, 3, 5, 16, 16), latent_channels=4, layers_per_block=1,
            block_out_channels=_FOUR, norm_num_groups=4,
        ),
    ),
    "AutoencoderKLLTXVideo": (
        "diffusers",
        autoencoder(
            "AutoencoderKLLTXVideo", (1, 3, 9, 16, 16), latent_channels=8, patch_size=1,
            block_out_channels=_FOUR, decoder_block_out_channels=_FOUR,
            layers_per_block=_FIVE_ONES, decoder_layers_per_block=_FIVE_ONES,
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
        ),
    ),
    "AutoencoderKLMochi": (
        "diffusers",
        autoencoder(
            "AutoencoderKLMochi", (1, 3, 7, 16, 16), in_channels=15, latent_channels=4,
            encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4,
            layers_per_block=_FIVE_ONES,
        ),
    ),
}  # fmt: skip
