"""A model whose own method is older than the library that calls it."""

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class Old(PreTrainedModel):
    config_class = PretrainedConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(8, 8)

    def _set_gradient_checkpointing(self, module: nn.Module) -> None:  # type: ignore[override]
        pass


Old(PretrainedConfig()).gradient_checkpointing_enable()
