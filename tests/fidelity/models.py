"""Models of transformers, small, with the checkpoints that they bring, right and wrong."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.fidelity.cases import Case

_SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER: dict[str, Any] = {
    **_SMALL,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


class Wrapped(nn.Module):
    """A model of transformers whose loss depends on what it is given."""

    def __init__(self, model: Any, call: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.model, x)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() * 10).long().clamp(max=60)


def _language(model: Any, x: torch.Tensor) -> Any:
    return model(input_ids=_tokens(x), labels=_tokens(x)).loss


def _hidden(model: Any, x: torch.Tensor) -> Any:
    return model(input_ids=_tokens(x)).last_hidden_state.square().mean()


def _image(model: Any, x: torch.Tensor) -> Any:
    return model(pixel_values=x).last_hidden_state.square().mean()


def builder(
    make: Callable[[], Any], call: Callable[[Any, torch.Tensor], Any], **options: Any
) -> Callable[[bool], nn.Module]:
    """Builds the model, with its own checkpoints switched on or not."""

    def build(on: bool) -> nn.Module:
        model = make().train()
        if on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            if options.get("use_reentrant") and hasattr(model, "enable_input_require_grads"):
                model.enable_input_require_grads()
        return Wrapped(model, call)

    return build


def _bert() -> Any:
    return transformers.BertModel(
        transformers.BertConfig(**_SMALL, intermediate_size=64, vocab_size=64)
    )


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def _gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)
    )


def _mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2)
    )


def _t5() -> Any:
    config: Any = transformers.T5Config
    return transformers.T5ForConditionalGeneration(
        config(
            d_model=32,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            d_kv=8,
            vocab_size=64,
            decoder_start_token_id=0,
        )
    )


def _vit() -> Any:
    return transformers.ViTModel(
        transformers.ViTConfig(
            **_SMALL, intermediate_size=64, image_size=16, patch_size=8, hidden_dropout_prob=0.1
        )
    )


_TEXT, _PICTURE = (2, 8), (2, 3, 16, 16)
MODELS: list[Case] = []
for reentrant in (False, True):
    how = "reentrant" if reentrant else "non-reentrant"
    for name, make, call, shape in (
        ("BERT with dropout", _bert, _hidden, _TEXT),
        ("Llama", _llama, _language, _TEXT),
        ("GPT-2 with dropout", _gpt2, _language, _TEXT),
        ("Mixtral", _mixtral, _language, _TEXT),
        ("T5 with dropout", _t5, _language, _TEXT),
        ("ViT with dropout", _vit, _image, _PICTURE),
    ):
        MODELS.append(
            Case(f"{name}, {how}", False, builder(make, call, use_reentrant=reentrant), shape=shape)
        )
for name, make, call in (
    ("BERT", _bert, _hidden),
    ("GPT-2", _gpt2, _language),
    ("T5", _t5, _language),
):
    options = {"use_reentrant": False, "preserve_rng_state": False}
    MODELS.append(
        Case(
            f"{name} with dropout, state dropped",
            True,
            builder(make, call, **options),
            "aten.bernoulli_",
            "",
            shape=_TEXT,
        )
    )
MODELS.append(
    Case(
        "Llama, state dropped",
        False,
        builder(_llama, _language, use_reentrant=False, preserve_rng_state=False),
        shape=_TEXT,
    )
)
