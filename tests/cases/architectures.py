"""Models that are no plain decoder: encoder and decoder, adapters, convolutions, dropout.

Where a model has no attention or no MLP, ``attention`` and ``mlp`` stand for the first and the
second half of a block.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from .case import Build, TrainingStep, doubled, full, none
from .loops import updated
from .model import NON_REENTRANT, REENTRANT, Oracle, Variant, run
from .watch import watch

N, R = NON_REENTRANT, REENTRANT
VOCABULARY, WIDTH, LENGTH, BATCH = 128, 32, 16, 2
Own = Literal["reentrant", "non-reentrant"] | None


def use(model: Any, own: Own, wrapper: Own, layer: str) -> None:
    """Hugging Face's own switch, and a checkpoint wrapper around each layer of that class."""
    if own is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable")
            model.gradient_checkpointing_enable({"use_reentrant": own == R})
        # A reentrant checkpoint needs an input that asks for gradients.
        model.enable_input_require_grads()
    if wrapper is not None:
        kind = CheckpointImpl.REENTRANT if wrapper == R else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=kind),
            check_fn=lambda module: type(module).__name__ == layer,
        )


def trained(model: nn.Module, inputs: Callable[[], dict[str, Tensor]]) -> TrainingStep:
    """A step on a batch of these inputs, which have labels among them."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            loss = model(**inputs()).loss
        loss.backward()

    return updated(wanted, gradients)


def lora(own: Own = None, wrapper: Own = None, dropout: float = 0.0) -> Build:
    """Llama with adapters from peft around its projections; everything else is frozen."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        import peft  # noqa: PLC0415 - seconds, and only these cases need it
        import transformers  # noqa: PLC0415

        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
            attention_dropout=dropout,
        )
        model: Any = transformers.LlamaForCausalLM(config)
        adapters = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_dropout=dropout,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            model = peft.get_peft_model(model, adapters).to(device).train()
        layers = (m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer")
        for number, layer in enumerate(layers):
            watch(oracle, layer.self_attn, f"layers.{number}", "attention")
            watch(oracle, layer.mlp, f"layers.{number}", "mlp")
        use(model, own, wrapper, "LlamaDecoderLayer")
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)
        return trained(model, lambda: {"input_ids": tokens, "labels": tokens})

    return build


def t5(own: Own = None, wrapper: Own = None) -> Build:
    """Encoder and decoder; every block has dropout, the decoder's attends to the encoder."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        import transformers  # noqa: PLC0415 - seconds, and only these cases need it

        config: Any = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=8,
            d_ff=2 * WIDTH,
            num_layers=2,
            num_heads=4,
            use_cache=False,
        )
        config.decoder_start_token_id = 0
        model: Any = transformers.T5ForConditionalGeneration(config)
        model.to(device).train()
        for side in ("encoder", "decoder"):
            for number, block in enumerate(getattr(model, side).block):
                watch(oracle, block.layer[0], f"{side}.{number}", "attention")
                watch(oracle, block.layer[-1], f"{side}.{number}", "mlp")
        use(model, own, wrapper, "T5Block")
        tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), device=device)
        wanted = tokens[:, : LENGTH // 2].contiguous()
        return trained(model, lambda: {"input_ids": tokens, "labels": wanted})

    return build


class Half(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Stage(nn.Module):
    """Two halves with a way around them; ``inner`` checkpoints what the stage computes."""

    def __init__(self, before: int, after: int, stride: int, inner: Own) -> None:
        super().__init__()
        self.inner = inner
        self.first = Half(before, after, stride)
        self.second = Half(after, after, 1)
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return run(self.inner, self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x)) + self.skip(x)
        return result


class ConvNet(nn.Module):
    """Stem, four stages of three sizes, and a classifier."""

    def __init__(self, outer: Own, inner: Own) -> None:
        super().__init__()
        self.outer = outer
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        sizes = ((8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2))
        self.stages = nn.ModuleList(Stage(*size, inner) for size in sizes)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = run(self.outer, stage, x)
        result: Tensor = self.head(x.mean((2, 3)))
        return result


def convolutions(outer: Own = None, inner: Own = None) -> Build:
    """A small residual network on random images."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = ConvNet(outer, inner).to(device).train()
        for number, stage in enumerate(model.stages):
            assert isinstance(stage, Stage)
            watch(oracle, stage.first, f"stages.{number}", "attention")
            watch(oracle, stage.second, f"stages.{number}", "mlp")
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        images = torch.randn(4, 3, 16, 16, device=device)
        labels = torch.randint(10, (4,), device=device)

        def step() -> None:
            F.cross_entropy(model(images), labels).backward()
            sgd.step()
            sgd.zero_grad()

        return step

    return build


class CheckpointedEncoderLayer(nn.TransformerEncoderLayer):
    """torch's own layer, checkpointing itself."""

    inner: Variant | None = None

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = super().forward
        return run(self.inner, lambda x: whole(x, *args, **kwargs), src)


def dropout_everywhere(outer: Own = None, inner: Own = None) -> Build:
    """torch's own encoder layers with dropout: each recompute draws the same masks again."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        layers = [
            CheckpointedEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.2, batch_first=True)
            for _ in range(3)
        ]
        model = nn.ModuleList(layers).to(device).train()
        for number, layer in enumerate(layers):
            layer.inner = inner
            watch(oracle, layer, f"layers.{number}", "attention", "_sa_block")
            watch(oracle, layer, f"layers.{number}", "mlp", "_ff_block")
        inputs = torch.randn(BATCH, LENGTH, WIDTH, device=device, requires_grad=True)

        def gradients() -> None:
            x = F.dropout(inputs, 0.1)
            for layer in layers:
                x = run(outer, layer, x)
            x.square().mean().backward()

        return updated(model.parameters(), gradients)

    return build


ARCHITECTURES = (
    none("lora_none", "LoRA around a frozen base; nothing is checkpointed.", lora()),
    full("lora_own_n", "LoRA; Hugging Face's switch, non-reentrant.", lora(own=N)),
    full("lora_own_r", "The same, reentrant.", lora(own=R)),
    full("lora_own_r_dropout", "The same with dropout.", lora(own=R, dropout=0.1)),
    doubled("lora_r_in_wrapper_n", "LoRA, checkpointed twice.", lora(own=R, wrapper=N)),
    none("t5_none", "T5; nothing is checkpointed.", t5()),
    full("t5_own_n", "T5; Hugging Face's switch, non-reentrant.", t5(own=N)),
    full("t5_own_r", "The same, reentrant.", t5(own=R)),
    doubled("t5_own_r_in_wrapper_n", "T5, checkpointed twice.", t5(own=R, wrapper=N)),
    none("conv_none", "Convolutions and batch norm, none checkpointed.", convolutions()),
    full("conv_n", "Each stage is checkpointed, non-reentrant.", convolutions(outer=N)),
    full("conv_r", "The same, reentrant.", convolutions(outer=R)),
    doubled("conv_r_in_n", "The same, twice.", convolutions(outer=N, inner=R)),
    none("dropout_none", "torch's encoder layers with dropout.", dropout_everywhere()),
    full("dropout_n", "The same, non-reentrant.", dropout_everywhere(outer=N)),
    full("dropout_r", "The same, reentrant.", dropout_everywhere(outer=R)),
    doubled("dropout_n_in_r", "The same, twice.", dropout_everywhere(outer=R, inner=N)),
)
