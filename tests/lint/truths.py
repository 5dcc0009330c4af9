"""How often pairs of switches recompute a layer, counted by running them.

A tiny Llama runs one step under each pair; patched forwards of a layer's first and last part
count their own runs. Nothing here uses this tool. Print the table:

    python -m tests.lint.truths
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import set_checkpoint_early_stop
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class Recomputes(NamedTuple):
    """Runs per layer beyond the forward pass's own, of the layer's first and last part."""

    first: float
    last: float


LAYERS = 2


def _count(module: Any, runs: list[int]) -> None:
    forward = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        return forward(*args, **kwargs)

    module.forward = counted


def recomputes(*switches: Callable[[Any], None]) -> Recomputes:
    """Recomputes per layer of one step, of the input norm and of the MLP's last projection."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    first, last = [0], [0]
    for layer in model.model.layers:
        _count(layer.input_layernorm, first)
        _count(layer.mlp.down_proj, last)
    for switch in switches:
        switch(model)
    ids = torch.randint(0, 32, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    return Recomputes(first[0] / LAYERS - 1, last[0] / LAYERS - 1)


def model_switch(model: Any, **kwargs: Any) -> None:
    """Hugging Face's own switch; no arguments mean the library's default."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs or None)


def wrapper(model: Any, reentrant: bool = False) -> None:
    """What accelerate's FSDP 1 does for ``fsdp_activation_checkpointing``, without the sharding."""
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=impl),
        check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
    )


def early_stop_off(model: Any) -> None:
    """Run the model as under ``set_checkpoint_early_stop(False)``."""
    forward = model.forward

    def whole(*args: Any, **kwargs: Any) -> Any:
        with set_checkpoint_early_stop(False):
            return forward(*args, **kwargs)

    model.forward = whole


REENTRANT = partial(model_switch, use_reentrant=True)
NON_REENTRANT = partial(model_switch, use_reentrant=False)
WRAPPER_REENTRANT = partial(wrapper, reentrant=True)

PAIRS: dict[str, tuple[Callable[[Any], None], ...]] = {
    "none": (),
    "model, default": (model_switch,),
    "model, reentrant": (REENTRANT,),
    "model, non-reentrant": (NON_REENTRANT,),
    "wrapper": (wrapper,),
    "wrapper, reentrant": (WRAPPER_REENTRANT,),
    "wrapper around model, default": (model_switch, wrapper),
    "model, default, after the wrapper": (wrapper, model_switch),
    "wrapper around model, reentrant": (REENTRANT, wrapper),
    "wrapper around model, non-reentrant": (NON_REENTRANT, wrapper),
    "wrapper, reentrant, around model, default": (model_switch, WRAPPER_REENTRANT),
    "wrapper, reentrant, around model, reentrant": (REENTRANT, WRAPPER_REENTRANT),
    "model switched on twice": (model_switch, model_switch),
    "switched on, then off": (model_switch, lambda model: model.gradient_checkpointing_disable()),
    "wrapper twice": (wrapper, wrapper),
    "wrapper around model, default; early stop off": (model_switch, wrapper, early_stop_off),
}


def main() -> None:
    """Print how often each pair recomputes a layer's first and last part."""
    for name, switches in PAIRS.items():
        print(f"{name:48}", *recomputes(*switches))


if __name__ == "__main__":
    main()
