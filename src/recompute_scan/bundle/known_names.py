"""Names that are nobody's secret: torch's own operators, nodes and ranges, by torch's own list, and
runtime calls that are certainly CUDA's, HIP's or NCCL's.

A library can name a call of its own ``cudaSomethingOfOurs``. A name is the vendor's where every
word of it is in the headers of `CUDA's runtime and driver
<https://docs.nvidia.com/cuda/cuda-runtime-api/>`_, of HIP, or of NCCL.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

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

# What else there is of an operator: in place, its backward, the copy where it gives a view.
ENDINGS = {"~": "_", "^": "_backward", "=": "_copy"}


@cache
def _torchs_own() -> tuple[frozenset[str], frozenset[str]]:
    """Operators that torch defines, and the nodes named after them."""
    path = Path(__file__).with_name("operators.txt")
    listed = path.read_text(encoding="utf-8").splitlines()
    lines = (line.split() for line in listed if not line.startswith("#"))
    operators = frozenset(
        library + name for library, *words in lines for word in words for name in names_of(word)
    )
    nodes = {_camel(name.partition("::")[2]) + "Backward" for name in operators}
    return operators, frozenset(nodes) | frozenset(_NODES.split())


def names_of(word: str) -> tuple[str, ...]:
    """The names that a word of the list stands for: ``abs~`` for ``abs`` and ``abs_``."""
    stem = word.rstrip("".join(ENDINGS))
    return (stem, *(stem + ENDINGS[mark] for mark in word[len(stem) :]))


def _camel(name: str) -> str:
    # As torch's code generator does, so that `pool2d` gives `Pool2D`.
    return "".join(part.title() for part in name.split("_"))


_PREFIX = re.compile(r"(cuda|cu|hip|hsa|nccl|rccl)_?(?=[A-Z])")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|[a-z]+|\d+|_")
_KNOWN = frozenset(
    "_ A Abort Access Active Add Address Advise All Alloc Allocate Any Arch Array Async At "
    "Attach Attribute Attributes Available Batch Begin Bind Block Blocks Broadcast Buffer Bus "
    "By C Cache Callback Can Cancel Capture Capturing Child Choose Clear Clone Cluster Clusters "
    "Code Comm Complete Config Contents Cooperative Copy Count Create Ctx Current D Data "
    "Default Deregister Destroy Device Disable Done Driver Dto Edge Elapsed Enable Encode "
    "Encoded End Engine Entry Error Event Ex Exchange Exec Export Ext External Finalize Find "
    "Flags Flush For Force Free From Func Function Gather Get Global Granularity Graph Graphs "
    "Group Handle Handles Hint Host Hto Id Im Import In Info Init Initialize Instantiate Ipc Is "
    "Kernel Kernels Last Launch Legacy Library Limit List Load Loading Lock Malloc Managed Map "
    "Mapped Max Mem Memcpy Memory Memset Mode Module Multicast Multiple Multiprocessor Name "
    "Node Nodes Occupancy Of On Open Options Page Param Params Pci Peek Peer Per Pitch Pitched "
    "Plane Point Pointer Pool Pop Post Potential Pre Prefetch Primary Priority Process "
    "Properties Property Ptds ptds Ptr Ptsz ptsz Push Query R Range Rank Reader Record Recv "
    "Reduce Refresh Register Relative Release Remove Reserve Reset Resource Retain Runtime "
    "Scatter Semaphores Send Set Shared Signal Size Sparse Spec Split Start State Status Stop "
    "Stream String Surface Symbol Symbolic Sync Synchronize Table Tensor Texture Thread Tiled "
    "Time To Trim Unique Unload Unmap Unregister Update Upload Usage User v Value Version Wait "
    "With Write X Y Z".split()
)


def is_vendors_own(name: str) -> bool:
    """Does the name consist of nothing but the vendors' words, and numbers?"""
    prefix = _PREFIX.match(name)
    if prefix is None or not re.fullmatch(r"\w{1,80}", name, re.ASCII):
        return False
    words = _WORD.findall(name, prefix.end())
    return all(word in _KNOWN or word.isdigit() for word in words)
