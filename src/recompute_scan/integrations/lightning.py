"""A callback for Lightning's Trainer, by either of the package's names."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from recompute_scan.integrations.follower import Follower


def _base() -> Any:
    """The ``Callback`` of the package that the script uses; both may be installed."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    try:
        return importlib.import_module(names[0]).Callback
    except ModuleNotFoundError as error:
        if error.name != names[0].partition(".")[0]:
            raise
    return importlib.import_module(names[1]).Callback


_Callback: Any = _base()


class RecomputeScanLightningCallback(Follower, _Callback):
    """Records the first steps of each ``fit()``: ``Trainer(callbacks=[callback])``.

    A step is an optimizer step, whatever ``accumulate_grad_batches`` is; of several optimizers in
    one batch, their steps together.
    Arguments as of :class:`Follower`.
    """

    _global_step = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The strategy has not wrapped the model yet."""
        if stage == "fit":
            self._begin()
            self._global_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """A batch is over; was it the last one of a step?"""
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._step()

    def on_train_end(self, *_: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(exception)
