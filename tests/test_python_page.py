"""The examples on the page of the Python interface run as they stand there, one after the other."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks import test_huggingface as huggingface
from tests.callbacks import test_lightning as lightning
from tests.record.residue import left_behind

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

# What the frameworks warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_examples_run(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    analysing, looping, trainer, lightning_trainer, accelerate = BLOCKS
    (inside / "traces").symlink_to(ROOT / "traces")
    names: dict[str, Any] = {}

    def printed(block: str) -> list[str]:
        exec(block, names)
        return capsys.readouterr().out.splitlines()

    lines = printed(analysing)
    assert lines[0] == "doubled 2.0"
    assert any(line.startswith("RS001 ") for line in lines)
    assert any(line.startswith("aten::") for line in lines)
    assert printed(looping)[-1] == "doubled"
    names |= {"model": huggingface.model(), "data": huggingface.data()}
    names["arguments"] = huggingface.arguments(inside)
    assert printed(trainer)[-1] == "none"
    names |= {"module": lightning.Model(2), "loader": lightning.loader()}
    assert printed(lightning_trainer)[-1] == "doubled"
    assert (inside / "out" / "lightning" / "report.html").exists()
    assert printed(accelerate)[-1] == "none"
    assert left_behind() == set()
    assert not torch._C._autograd._profiler_enabled()
