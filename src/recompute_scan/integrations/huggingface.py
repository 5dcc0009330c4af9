"""A callback for the Trainer of transformers, and of trl, axolotl and others that build on it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from recompute_scan.integrations.follower import Follower


class RecomputeScanCallback(Follower, TrainerCallback):
    """Records the first steps of each ``train()``: ``Trainer(…, callbacks=[callback])``.

    A step is an optimizer step, whatever ``gradient_accumulation_steps`` is. Given to the Trainer
    when that is made, it sees which line switches checkpointing on.
    Arguments as of :class:`Follower`.
    """

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """The Trainer is there, and checkpointing not yet on."""
        self._begin()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """For callbacks that were added later, and for a second ``train()``."""
        self._begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end()
