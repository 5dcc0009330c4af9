"""The callback under the real Trainer of Lightning, on the CPU."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recompute_scan.integrations import RecomputeScanLightningCallback
from tests.callbacks.counted import Counter
from tests.present import present
from tests.record.residue import left_behind

# What the frameworks warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

PLAN: dict[str, Any] = {"steps": 1, "warmup": 2, "timing_steps": 0}


class Model(pl.LightningModule):
    def __init__(self, checkpoints: int, fails_at: int = -1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.checkpoints, self.fails_at = checkpoints, fails_at

    def run(self, layer: nn.Module, x: Any, checkpoints: int) -> Any:
        if not checkpoints:
            return layer(x)
        return checkpoint(self.run, layer, x, checkpoints - 1, use_reentrant=True)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if number == self.fails_at:
            raise ZeroDivisionError("theirs")
        x = batch.requires_grad_()
        for layer in self.layers:
            x = self.run(layer, x, self.checkpoints)
        loss: torch.Tensor = x.square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def loader() -> Any:
    rows: Any = torch.ones(32, 8)
    return torch.utils.data.DataLoader(rows, batch_size=2)


def fit(
    folder: Path, model: Model, callback: RecomputeScanLightningCallback, **options: Any
) -> None:
    trainer = pl.Trainer(
        max_epochs=1, callbacks=[callback], default_root_dir=folder, **QUIET, **options
    )
    trainer.fit(model, loader())


@pytest.mark.parametrize(
    ("checkpoints", "verdict"), [(2, "doubled"), pytest.param(1, "full", marks=pytest.mark.slow)]
)
def test_a_fit_is_recorded(tmp_path: Path, checkpoints: int, verdict: str) -> None:
    callback, model = (
        RecomputeScanLightningCallback(**PLAN, folder=tmp_path / "scan"),
        Model(checkpoints),
    )
    counters = [Counter(layer) for layer in model.layers]
    fit(tmp_path, model, callback)
    assert {counter.recomputes for counter in counters} == {checkpoints}
    scan = callback.scan
    assert (scan.verdict, scan.recompute_per_backward) == (verdict, float(checkpoints))
    for region in scan.result.regions:
        for one in region.checkpoints:
            assert present(one.call_site).startswith("tests/callbacks/test_lightning.py:")
    assert (tmp_path / "scan" / "report.html").exists()
    assert left_behind() == set()


def test_steps_are_optimizer_steps(tmp_path: Path) -> None:
    callback = RecomputeScanLightningCallback(**PLAN)
    fit(tmp_path, Model(1), callback, accumulate_grad_batches=4)
    assert [step.micro_batches for step in callback.scan.result.steps if step.complete] == [4]


def test_a_fit_that_fails_leaves_nothing(tmp_path: Path) -> None:
    callback = RecomputeScanLightningCallback(**PLAN)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, Model(2, fails_at=3), callback)
    assert left_behind() == set()
    assert callback.scan.result.crash is not None
    verdicts = [callback.scan.verdict]
    fit(tmp_path, Model(1), callback)
    verdicts.append(callback.scan.verdict)
    assert verdicts == ["doubled", "full"]
