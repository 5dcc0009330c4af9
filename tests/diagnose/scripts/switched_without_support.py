"""A model of transformers that has no checkpointing."""

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class Small(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(8, 8)


Small(PretrainedConfig()).gradient_checkpointing_enable()
