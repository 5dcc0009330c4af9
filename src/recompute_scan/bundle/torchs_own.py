"""Names of operators, nodes and ranges that are torch's own, by torch's own list."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from recompute_scan.recompute import vocabulary as words


def is_torchs_own(name: str) -> bool:
    """Whether torch itself gives this name to an operator, a node or a range."""
    operators, nodes = _torchs_own()
    if "::" not in name or name.startswith("torch::autograd::"):
        stem = re.sub(r"\d{1,3}$", "", name.removeprefix("torch::autograd::"))
        return (
            stem in nodes
            or name in words.CHECKPOINT_FUNCTIONS
            or name in words.CHECKPOINT_NODES
            or name in RANGES
            or bool(words.COMPILED_REGION.fullmatch(name))
        )
    return name.partition(".")[0] in operators


# Ranges and nodes that are named unlike operators.
RANGES = frozenset(
    "Torch-Compiled Region|TorchDynamo Cache Lookup|Pregraph bytecode|<forward op>|<backward op>"
    "|AOTDispatcher Runtime Wrapper Prologue|AOTDispatcher Runtime Wrapper Epilogue"
    "|enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    "|enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    "|record_param_comms|PythonDispatchMode|_NoopSaveInputs|GraphRoot|detach|detach_"
    "|CompiledFunction|NoopSaveInputs".split("|")
)
_NODES = (
    "AccumulateGrad CopySlices CopyBackwards Error Identity DelayedError UndefinedGrad Scatter "
    "Gather CompiledFunctionBackward CheckpointHookBackward _NoopSaveInputsBackward "
    "NoopSaveInputsBackward"
)


@cache
def _torchs_own() -> tuple[frozenset[str], frozenset[str]]:
    """Operators that torch defines, and the nodes named after them."""
    text = files("recompute_scan.bundle").joinpath("operators.txt").read_text(encoding="ascii")
    operators = frozenset(line for line in text.splitlines() if not line.startswith("#"))
    nodes = {_camel(name.partition("::")[2]) + "Backward" for name in operators}
    return operators, frozenset(nodes) | frozenset(_NODES.split())


def _camel(name: str) -> str:
    # As torch's code generator does, so that `pool2d` gives `Pool2D`.
    return "".join(part.title() for part in name.split("_"))
