"""Counts how often modules run, with hooks of torch's, and knows nothing of the tool."""

from typing import Any

import torch
from torch import nn


class Counter:
    """Runs of one module, outside and inside backward passes."""

    def __init__(self, module: nn.Module) -> None:
        self.runs = [0, 0]
        module.register_forward_pre_hook(self._ran)

    def _ran(self, *_: Any) -> None:
        self.runs[torch._C._current_graph_task_id() != -1] += 1

    @property
    def recomputes(self) -> float:
        """Runs in the backward pass for each one in the forward pass."""
        return self.runs[1] / self.runs[0]
