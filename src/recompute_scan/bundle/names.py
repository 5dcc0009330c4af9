"""Names and paths that are harmless to share; aliases for the others.

A name stays only where it has the form of something that frameworks name: an operator, a node, a
kernel, a runtime call, one of the profiler's own ranges. Ranges that a script named itself are free
text and never stay. An alias says what the name stood for (``private_range_3``), is the same for
each use of the name, and keeps words for the kind of work (``private_kernel_7_flash_fwd``), because
the analysis goes by them.

Torch's operators, nodes and ranges are public, by torch's own list, and so are runtime calls of
CUDA, HIP and NCCL. A library can name its call ``cudaSomethingOfOurs``, so every word of such a
name must be in the headers of `CUDA's runtime and driver
<https://docs.nvidia.com/cuda/cuda-runtime-api/>`_, of HIP, or of NCCL.

Call sites become package-relative paths: ``transformers/modeling_utils.py:31``, ``train.py:7``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from recompute_scan.annotations import (
    ANNOTATING,
    OPTIONS,
    REGION,
    RegionAnnotation,
    parse_recompute,
    parse_region,
    recompute_name,
    region_name,
)
from recompute_scan.frameworks.registry import MECHANISMS, import_names
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.attention_kernels import NAMED_STEP, attention_role
from recompute_scan.recompute.regions import family_of_node
from recompute_scan.trace import Kind


def is_torchs_own(name: str) -> bool:
    """Whether torch itself gives this name to an operator, a node or a range."""
    operators, nodes = _torchs_own()
    if "::" not in name or name.startswith("torch::autograd::"):
        stem = re.sub(r"\d{1,3}$", "", name.removeprefix("torch::autograd::"))
        return (
            stem in nodes
            or name in vocabulary.CHECKPOINT_FUNCTIONS
            or name in vocabulary.CHECKPOINT_NODES
            or name in RANGES
            or bool(vocabulary.COMPILED_REGION.fullmatch(name))
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

# Other forms of an operator: in place, its backward, the copy where it gives a view.
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
    # As torch's code generator does, so that `pool2d` gives `Pool2D`.
    words = (name.partition("::")[2].split("_") for name in operators)
    nodes = {"".join(map(str.title, parts)) + "Backward" for parts in words}
    return operators, frozenset(nodes) | frozenset(_NODES.split())


def names_of(word: str) -> tuple[str, ...]:
    """The names that a word of the list stands for: ``abs~`` for ``abs`` and ``abs_``."""
    stem = word.rstrip("".join(ENDINGS))
    return (stem, *(stem + ENDINGS[mark] for mark in word[len(stem) :]))


_PREFIX = re.compile(r"(cuda|cu|hip|hsa|nccl|rccl)_?(?=[A-Z])")
_KNOWN_NAMES_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|[a-z]+|\d+|_")


@cache
def _vendors_words() -> frozenset[str]:
    return frozenset(Path(__file__).with_name("vendor_words.txt").read_text("ascii").split())


def is_vendors_own(name: str) -> bool:
    """Does the name consist of nothing but the vendors' words, and numbers?"""
    prefix = _PREFIX.match(name)
    if prefix is None or not re.fullmatch(r"\w{1,80}", name, re.ASCII):
        return False
    words = _KNOWN_NAMES_WORD.findall(name, prefix.end())
    return all(word in _vendors_words() or word.isdigit() for word in words)


# The names of these packages stay under --strict too. Their files' names do not: a fork may have
# other files.
PUBLIC_PACKAGES = frozenset({"torch"}) | import_names()
_SITE = re.compile(r"(.{1,4000}):(\d{1,7})", re.DOTALL)
_PATHS_ALIAS = re.compile(r"(?:(\w{1,99})/)?private_file_\d{1,9}\.py:\d{1,7}")
_PART = re.compile(r"[A-Za-z0-9_][\w.\-]{0,99}")
_INSTALLED = ("site-packages", "dist-packages")
# Folders of the root below which people's files are: of a run that is started in the root, as in a
# container, call sites are relative to it.
_BELOW_ROOT = frozenset(
    "home users root mnt media tmp var private volumes opt srv usr etc scratch lustre gpfs nfs net "
    "export fsx efs dbfs kaggle proc".split()
)


class Places:
    """One alias a file, the same wherever it is named.

    Args:
        strict: Whether files of the script's own get aliases.

    Attributes:
        kept: Paths that stay.
        given: Aliases by path; never written into the archive.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.kept: set[str] = set()
        self.given: dict[str, str] = {}
        self._number = 0

    def reserve(self, number: int) -> None:
        """Keep clear of the aliases up to this one: they are from an earlier bundle."""
        self._number = max(self._number, number)

    def site(self, site: str) -> str:
        """``file:line`` without what stands above the package; empty where it is no site."""
        alias = _PATHS_ALIAS.fullmatch(site)
        if alias and (alias[1] is None or alias[1] in PUBLIC_PACKAGES):
            return site
        found = _SITE.fullmatch(site)
        return f"{self._file(found[1])}:{found[2]}" if found else ""

    def _file(self, path: str) -> str:
        parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
        for marker in _INSTALLED:
            if marker in parts:
                parts = parts[len(parts) - parts[::-1].index(marker) :]
                break
        else:
            # Folders outside the project can show a person's name or employer.
            absolute = path.startswith(("/", "\\", "~")) or path[1:2] == ":"
            if absolute or ".." in parts or (parts[0:1] and parts[0].lower() in _BELOW_ROOT):
                parts = parts[-1:]
        if self.strict or not parts or not all(_PART.fullmatch(part) for part in parts):
            if path not in self.given:
                self._number += 1
                package = f"{parts[0]}/" if parts and parts[0] in PUBLIC_PACKAGES else ""
                self.given[path] = f"{package}private_file_{self._number}.py"
            return self.given[path]
        short = "/".join(parts)
        self.kept.add(short)
        return short


_NUMBERED = re.compile(r"[Pp]rivate_([a-z]+)_(\d{1,9})")
_LONGEST = 2000

_WORD = r"[A-Za-z_]\w{0,99}"
_OPERATOR = re.compile(
    rf"{_WORD}(::({_WORD}|\(anonymous namespace\)))*(<{_WORD}>)?(\.\w{{1,40}})?"
    r"|torch\.distributed\.[a-z_.:]{1,60}"
    r"|Torch-Compiled Region: \d{1,6}/\d{1,6}"
)
# Compiled names of C++: templates, casts, lambdas. No slash, so no path; words stand apart
# only where the language puts them.
_KERNEL = re.compile(
    r"(?!.*--)[A-Za-z_(](?:[\w:<>,()*&~\[\]{}.#+\-!]|(?<=[,>*&)}]) | (?=[>*&({]|const\b)"
    r"|(?<=\bvoid) |(?<=\bunsigned) |(?<=\bsigned) |(?<=\blong) |(?<=\bshort) |(?<=\bconst) "
    r"|(?<=\bint) |(?<=\bchar) |(?<=\bbool) |(?<=\btype) |(?<=\(anonymous) (?=namespace\))"
    r"){0,2000}"
)
_RUNTIME = re.compile(r"(cuda|cu|hip|hsa|nccl|rccl)_?[A-Z]\w{1,60}")
_PLACE = (
    r"(Device|Host|Pageable|Pinned|Managed|Unified|Array|Unknown|DEVICE|HOST|MEMORY\(Unknown\))"
)
_COPY = re.compile(
    rf"Memcpy [A-Z](to|2)[A-Z]( \({_PLACE} -> {_PLACE}\))?|Memset \({_PLACE}\)|Memcpy|Memset"
    r"|Copy(Host|Device)To(Host|Device)"
)
_STEP = re.compile(r"ProfilerStep#\d{1,9}")
_OPTIMIZER = re.compile(rf"Optimizer\.(step|zero_grad)#({_WORD})\.(step|zero_grad)")
# The words of ranges in torch's own code, torch 1.8 to 2.14: another word could be private.
_RANGE_WORDS = (
    r"(?:_?(?:accumulate|active|all|any|barrier|base|broadcast|callback|cast|chunk|coalesced"
    r"|complete|copy|device|force|forward|backward|foreach|from|gather|hook|in|input|inputs|into"
    r"|kwargs|limiter|only|optim|out|outputs|post|pre|prefetch|rate|recv|reduce|reshard|root|rs"
    r"|scatter|send|sparse|tensor|to|unshard|wait)(?=_|\b)){1,8}_?"
)
# Ranges of torch's own code, with a module's name in brackets.
_RANGE = re.compile(
    rf"((?:FSDP|FSDP2)::{_RANGE_WORDS}|FullyShardedDataParallel\.{_RANGE_WORDS}"
    rf"|DistributedDataParallel\.{_RANGE_WORDS}"
    rf"|(?:nccl|gloo|mpi|ucc):(?:{_RANGE_WORDS}|recvAnySource)"
    r"|PyTorch Profiler \(\d\))(?: \(([\w.]{1,300})\))?"
)
# The number of a layer or an expert; a longer one could be somebody's.
_LAYER = re.compile(r"0|[1-9][0-9]{0,2}")
_OPTIMIZERS = frozenset(
    "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD LBFGS Muon NAdam RAdam RMSprop Rprop SGD "
    "SparseAdam".split()
)
# Words for kinds of operators and kernels. The longer of two comes first.
_TELLING = re.compile(
    r"scaled_dot_product_flash|scaled_dot_product|flash_attention|flash_attn|flashattn|flash"
    r"|efficient_attention|cudnn_attention|flex_attention|attention|attn|fmha|xformers"
    r"|forward|fwd|backward|bwd|wgrad|dgrad|gemm|conv|norm|softmax|dropout|nccl|rccl"
    r"|allgather|allreduce|reducescatter|triton|cutlass|cublas|cudnn|nvjet|cijk",
    re.IGNORECASE,
)
# Endings that name families of operators; the second keeps a name out of a family.
_ENDINGS = ("", "_x", "_norm", "_loss", "_softmax", "_dropout", "_convolution", "_pool")
_NODE = re.compile(r"(.*?)(Backward\d{0,3})")
# An alias from an earlier bundle: its own words and no others.
_ALIAS = re.compile(
    r"[Pp]rivate_(?:op|kernel|range|call|module|class|overload)_\d{1,9}"
    rf"(?:_(?:{_TELLING.pattern})){{0,40}}(?:{'|'.join(_ENDINGS)})(?:Backward\d{{0,3}})?"
)

# Names of attention's kernels, forward and backward, that are known as the family's own.
ATTENTION = {
    "flash_attention_1": ("fmha_fwd_loop_kernel<{}>", "fmha_bwd_dq_dk_dv_loop_kernel<{}>"),
    "flash_attention_2": ("flash_fwd_kernel<{}>", "flash_bwd_dq_dk_dv_loop_kernel<{}>"),
    "flash_attention_3": ("FlashAttnFwd<{}>", "FlashAttnBwd<{}>"),
    "flash_attention_4": ("FlashAttentionForwardSm90_{}", "FlashAttentionBackwardSm90_{}"),
    "cudnn_attention": ("cudnn_generated_sdpa_fprop_{}", "cudnn_generated_sdpa_bprop_{}"),
    "efficient_attention": ("fmha_cutlassF_{}", "fmha_cutlassB_{}"),
    "fused_softmax_attention": (
        "scaled_masked_softmax_warp_forward<{}>",
        "scaled_masked_softmax_warp_backward<{}>",
    ),
    "flex_attention": (
        "triton_tem_fused_flex_attention_{}",
        "triton_tem_fused_flex_attention_backward_{}",
    ),
    "triton_attention": ("_attn_fwd_0_{}", "_attn_bwd_0_{}"),
    "composable_kernel_attention": ("FmhaFwdKernel<{}>", "FmhaBwdDQDKDVKernel<{}>"),
    "aiter_attention": ("fmha_fwd_hd128_bf16_{}", "fmha_bwd_hd128_bf16_{}"),
}


class Names:
    """The same alias for the same name, over all traces and run records of one archive.

    Args:
        strict: Whether names of modules, classes, kernels, files, and of operators that are
            not torch's own get aliases too.

    Attributes:
        places: The call sites' own mapping.
        kept: Names that stay and are not torch's own, for the person to look through.
        given: Aliases by what they stand for; never written into the archive.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.places = Places(strict)
        self.kept: set[str] = set()
        self.given: dict[tuple[str, str], str] = {}
        self._numbers: dict[str, int] = {}
        self._calls: dict[int, int] = {}

    def reserve(self, names: Iterable[str]) -> None:
        """Keep clear of aliases that these names contain: they are from an earlier bundle."""
        for name in names:
            for kind, number in _NUMBERED.findall(name):
                self._numbers[kind] = max(self._numbers.get(kind, 0), int(number))
        self.places.reserve(self._numbers.get("file", 0))

    def event(self, name: str, kind: int) -> str:
        """The name of an event, for the archive."""
        if name.startswith(REGION) and (annotation := parse_region(name)):
            return region_name(self._mark(annotation))
        if (call := parse_recompute(name)) is not None:
            return recompute_name(self._call(call))
        if _ALIAS.fullmatch(name):
            return name
        if kind == Kind.OP:
            return self._operator(name)
        if kind == Kind.ANNOTATION:
            return self._range(name)
        if kind == Kind.KERNEL:
            return self._kernel(name)
        if _COPY.fullmatch(name) or is_vendors_own(name):
            return name
        called = kind == Kind.RUNTIME and not self.strict and _RUNTIME.fullmatch(name)
        return self._keep(name) if called else self._alias("call", name)

    def module(self, path: str) -> str:
        """A module's name, part by part; numbers of layers stay."""
        if not self.strict and re.fullmatch(r"[\w.\-]{0,400}", path):
            return self._keep(path)
        return ".".join(
            part if _LAYER.fullmatch(part) else self._alias("module", part)
            for part in path.split(".")
            if part
        )

    def module_class(self, name: str) -> str:
        """The name of a module's class."""
        if not name or (not self.strict and re.fullmatch(_WORD, name)):
            return self._keep(name)
        return self._alias("Class", name)

    def _mark(self, mark: RegionAnnotation) -> RegionAnnotation:
        known = mark.mechanism in {m.name for m in MECHANISMS}
        plain = "." not in mark.function
        return replace(
            mark,
            call=self._call(mark.call),
            depth=min(mark.depth, 99),
            variant=mark.variant if mark.variant in ("reentrant", "non-reentrant") else "",
            module=self.module(mark.module),
            module_class=self.module_class(mark.module_class),
            mechanism=mark.mechanism if known else "",
            site=self.places.site(mark.site),
            options=",".join(o for o in mark.options.split(",") if o in OPTIONS),
            function=self.module_class(mark.function) if plain else "",
        )

    def _call(self, number: int) -> int:
        return self._calls.setdefault(number, len(self._calls) + 1)

    def _operator(self, name: str) -> str:
        if name.startswith(vocabulary.ENGINE):
            return vocabulary.ENGINE + self.event(name[len(vocabulary.ENGINE) :], Kind.OP)
        if _RANGE.fullmatch(name) or _OPTIMIZER.fullmatch(name):
            return self._range(name)  # torch before 1.11 writes ranges as operators
        form = len(name) <= _LONGEST and bool(name in RANGES or _OPERATOR.fullmatch(name))
        own = form and is_torchs_own(name)
        if form and not self.strict:
            return name if own else self._keep(name)
        if own:
            plain, dot, overload = name.partition(".")
            return f"{plain}.{self._alias('overload', overload)}" if dot else name
        return self._plumbing(name) or self._alias("op", name)

    def _range(self, name: str) -> str:
        if _STEP.fullmatch(name) or name in RANGES or name == ANNOTATING:
            return name
        if NAMED_STEP.fullmatch(name) and len(name) < 40:
            return name
        if found := _OPTIMIZER.fullmatch(name):
            if not self.strict or found[2] in _OPTIMIZERS:
                return self._keep(name) if found[2] not in _OPTIMIZERS else name
            return f"Optimizer.{found[1]}#{self._alias('Class', found[2])}.{found[3]}"
        if found := _RANGE.fullmatch(name):
            return f"{found[1]} ({self.module(found[2])})" if found[2] else name
        if found := vocabulary.OPTIMIZER.match(name):
            return found[0] + self._alias("range", name)
        return self._plumbing(name) or self._alias("range", name)

    def _plumbing(self, name: str) -> str:
        """An alias that still counts as communication, where the name did; else empty."""
        found = vocabulary.PLUMBING.match(name)
        return found[0] + self._alias("range", name) if found else ""

    def _kernel(self, name: str) -> str:
        if not self.strict and _KERNEL.fullmatch(name):
            return self._keep(name)
        alias = self._alias("kernel", name)
        if role := attention_role(name):
            # Attention's kernels are proof, so their names stay readable.
            family, direction = role
            return ATTENTION[family][direction == "backward"].format(f"private_{alias[8:]}")
        return alias

    def _keep(self, name: str) -> str:
        if name:
            self.kept.add(name)
        return name

    def _alias(self, kind: str, name: str) -> str:
        if _ALIAS.fullmatch(name):
            return name
        known = self.given.get((kind, name))
        if known is None:
            slot = kind.lower()
            number = self._numbers[slot] = self._numbers.get(slot, 0) + 1
            known = self.given[kind, name] = _spell(kind, number, name)
        return known


def _spell(kind: str, number: int, name: str) -> str:
    if kind in ("module", "range", "call", "Class", "overload"):
        return f"private_{kind.lower()}_{number}"
    stem, node = name, ""
    if kind == "op" and (found := _NODE.fullmatch(name)):
        stem, node = found[1], found[2][:12]
    telling = dict.fromkeys(word.lower() for word in _TELLING.findall(stem))
    # A node without the engine's range around it is known by its capital letter.
    first = "P" if name[:1].isupper() else "p"
    plain = "_".join([f"{first}rivate_{kind}_{number}", *telling])
    spellings = [plain + ending + node for ending in _ENDINGS]
    wanted = _families(name)
    return next((text for text in spellings if _families(text) == wanted), spellings[0])


def _families(name: str) -> tuple[object, object]:
    return vocabulary.family_of(name), family_of_node(vocabulary.ENGINE + name)
