"""Record a few small cases under the torch that is installed here, each with its truth.

    python -m tests.versions.fixtures traces/versions

writes ``VERSION/CASE.json.gz`` by plain ``torch.profiler``, without shapes, and
``VERSION/truth.json``: by case, what the model counted while it trained, and the version of
torch. Two layers and two steps, so that many fit into a repository.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from tests.cases import model
from tests.cases.case import record

STEPS, LAYERS = 2, 2
NAMES = (
    "no_checkpoint",
    "n_outside",
    "r_in_n",
    "n_in_n",
    "r_in_wrapper",
    "n_layers_in_n_stack",
    "selective_matmuls",
    "fsdp1_r_in_wrapper_n",
)


def main() -> None:
    torch.set_num_threads(1)
    model.LAYERS = LAYERS
    from tests.cases.distributed import DISTRIBUTED  # noqa: PLC0415 - after the number of layers
    from tests.cases.nesting import CASES  # noqa: PLC0415

    version = torch.__version__.partition("+")[0]
    folder = Path(sys.argv[1]) / version
    folder.mkdir(parents=True, exist_ok=True)
    by_name = {case.name: case for case in (*CASES, *DISTRIBUTED)}
    truths = {
        name: asdict(record(by_name[name], folder / f"{name}.json.gz", steps=STEPS, shapes=False))
        for name in NAMES
        if name in by_name
    }
    about = {"torch": version, "truths": truths}
    (folder / "truth.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
