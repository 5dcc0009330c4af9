"""For the Trainer of transformers, and those of trl, axolotl and others that build on it."""

from __future__ import annotations

import os
from typing import Any, Literal

from transformers import TrainerCallback

from recompute_scan.api import Scan
from recompute_scan.callbacks.follower import Follower


class RecomputeScanCallback(TrainerCallback):
    """Records the first steps of each ``train()``: ``Trainer(…, callbacks=[callback])``.

    A step is an optimizer step, whatever ``gradient_accumulation_steps`` is. Given to the Trainer
    when that is made, it sees which line switches checkpointing on.

    Args:
        steps: As those of :func:`recompute_scan.record`, like what follows.
        warmup: Steps before anything is recorded.
        timing_steps: Steps to time without the profiler.
        folder: Where traces, result and page go; ``None`` for a temporary one.
        device: What to record.
        trackers: Whether trackers in use (W&B, MLflow, TensorBoard) are told the answer.
    """

    def __init__(
        self,
        *,
        steps: int = 5,
        warmup: int = 3,
        timing_steps: int = 10,
        folder: str | os.PathLike[str] | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        trackers: bool = True,
    ) -> None:
        self._follower = Follower(
            steps=steps,
            warmup=warmup,
            timing_steps=timing_steps,
            folder=folder,
            device=device,
            trackers=trackers,
        )

    @property
    def scan(self) -> Scan:
        """What the recorded steps show, when the training is over."""
        return self._follower.scan

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """The Trainer is there, and checkpointing not yet on."""
        self._follower.begin()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """For callbacks that were added later, and for a second ``train()``."""
        self._follower.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimizer has made its step."""
        self._follower.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The last step is made, or the training was stopped."""
        self._follower.end()
