"""What really happened while a trace was recorded, as counted by the model itself.

One document per case::

    {"name": "reentrant_in_non_reentrant", "verdict": "doubled", "steps": 3,
     "micro_batches": 1, "backwards_per_forward": 1,
     "layers": [{"name": "layers.0", "attention": {"forward": 1, "recomputes": 2, "evaluation": 0},
                                     "mlp": {"forward": 1, "recomputes": 2, "evaluation": 0}}, …],
     "kept": {}}

All counts are per step, and a case does the same in every recorded step.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["none", "partial", "full", "doubled"]


@dataclass(frozen=True)
class Runs:
    """Entries of one part (attention or MLP) of one layer in one step.

    An entry counts when the part's ``forward`` begins; early stop may cut it short after that.

    Attributes:
        forward: Entries outside any backward pass, in training mode.
        recomputes: Entries inside a backward pass.
        evaluation: Entries outside any backward pass, in evaluation mode.
    """

    forward: int
    recomputes: int
    evaluation: int = 0


@dataclass(frozen=True)
class LayerTruth:
    """Both parts of one layer; ``name`` is its path below the model, such as ``layers.0``."""

    name: str
    attention: Runs
    mlp: Runs


@dataclass(frozen=True)
class Truth:
    """The truth of one recorded case.

    Attributes:
        name: The case, and the stem of its files.
        verdict: What the words of ``docs/design.md`` call this case, declared and not counted;
            ``None`` where they leave it open.
        steps: Training steps in the trace, all complete.
        micro_batches: Forward passes with a backward of their own, per step.
        backwards_per_forward: Backward passes that consume one forward pass; 2 for two losses
            on one trunk.
        layers: In forward order; per-step counts.
        kept: Operators whose results a selective checkpoint kept, with how many results per
            step: the recompute takes them from memory instead of running them.
        by_design: Entries per forward and backward that a function makes for reasons of its own;
            they are among ``recomputes``, and no part of the multiplicity. A pair where attention
            and MLP differ.
    """

    name: str
    verdict: Verdict | None
    steps: int
    micro_batches: int
    backwards_per_forward: int
    layers: tuple[LayerTruth, ...]
    kept: Mapping[str, int] = field(default_factory=dict)
    by_design: int | tuple[int, int] = 0

    def multiplicity(self) -> tuple[tuple[float, float], ...]:
        """Recomputes by checkpoints per forward and backward, as (attention, MLP) for each layer.

        0 for a layer that never ran in training mode.
        """
        both = self.by_design
        attention, mlp = (both, both) if isinstance(both, int) else both
        return tuple(
            (self._per_backward(x.attention, attention), self._per_backward(x.mlp, mlp))
            for x in self.layers
        )

    def _per_backward(self, runs: Runs, by_design: int) -> float:
        if runs.forward == 0:
            return 0.0
        return runs.recomputes / (runs.forward * self.backwards_per_forward) - by_design


def write_truth(path: Path, truth: Truth) -> None:
    """Write the document described above."""
    path.write_text(json.dumps(asdict(truth), indent=1) + "\n", encoding="utf-8")


def read_truth(path: Path) -> Truth:
    """Read it back."""
    return truth_of(json.loads(path.read_text(encoding="utf-8")))


def truth_of(document: Mapping[str, Any]) -> Truth:
    """The truth in such a document."""
    layers = tuple(
        LayerTruth(x["name"], Runs(**x["attention"]), Runs(**x["mlp"])) for x in document["layers"]
    )
    both = document.get("by_design", 0)
    by_design = both if isinstance(both, int) else tuple(both)
    return Truth(**{**document, "layers": layers, "by_design": by_design})


def counted(name: str, verdict: Verdict, steps: int, entries: Mapping[str, Sequence[int]]) -> Truth:
    """The truth of plain steps, from what hooks counted: for each layer's ``self_attn`` and
    ``mlp``, by its path, the entries outside and inside the backward pass.
    """
    parts: dict[str, dict[str, Runs]] = {}
    for path, (forward, recomputes) in entries.items():
        layer, _, part = re.sub(r"^.*(?=layers\.)|_\w+_module\.", "", path).rpartition(".")
        parts.setdefault(layer, {})[part] = Runs(forward, recomputes)
    layers = (LayerTruth(layer, both["self_attn"], both["mlp"]) for layer, both in parts.items())
    return Truth(name, verdict, steps, 1, 1, tuple(layers))
