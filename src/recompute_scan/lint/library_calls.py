"""Calls of known libraries that switch checkpointing on, as read in each library's code.

Also the version of transformers that is pinned in a file's folder, or installed.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from recompute_scan.files import opened
from recompute_scan.frameworks import trainers
from recompute_scan.frameworks.base import Setting, Variant
from recompute_scan.lint.rules import CalledHelper, CheckpointSwitch, Pinned

_LAYERS = ("DecoderLayer", "Block", "Layer")


class ScriptNames:
    """The names of one script: what each import stands for, its functions and its classes."""

    def __init__(self, tree: ast.Module) -> None:
        self.origins: dict[str, str] = {}
        self.functions = {top.name: top for top in tree.body if isinstance(top, ast.FunctionDef)}
        self.classes = {top.name: top for top in tree.body if isinstance(top, ast.ClassDef)}
        self._values: dict[str, ast.expr] = {}
        written: Counter[str] = Counter()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.origins[alias.asname or alias.name] = (
                        f"{'.' * node.level}{node.module or ''}.{alias.name}"
                    )
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    self.origins[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                written[node.id] += 1
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    self._values[target.id] = node.value
        # Known only where it has one value.
        self._values = {name: at for name, at in self._values.items() if written[name] == 1}

    def origin(self, node: ast.AST) -> str:
        """The dotted name under which it was imported, or as written; empty for anything else."""
        if isinstance(node, ast.Name):
            return self.origins.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.origin(node.value)}.{node.attr}"
        return ""

    def resolved(self, node: ast.expr) -> ast.expr:
        """The value of a name that is given one once; anything else as it is."""
        return self._values.get(node.id, node) if isinstance(node, ast.Name) else node

    def is_layer_class(self, kind: ast.expr) -> bool:
        """A decoder layer's class of transformers."""
        name = self.origin(kind)
        return name.startswith("transformers.models.") and name.endswith(_LAYERS)

    def checked_class(self, check: ast.expr | None) -> ast.expr | None:
        """The class that ``lambda m: isinstance(m, LlamaDecoderLayer)`` or a function asks for."""
        check = self.resolved(check) if check is not None else None
        call: ast.AST | None = None
        if isinstance(check, ast.Lambda):
            call = check.body
        elif isinstance(check, ast.Name) and check.id in self.functions:
            said = self.functions[check.id].body
            call = said[0].value if len(said) == 1 and isinstance(said[0], ast.Return) else None
        if not isinstance(call, ast.Call):
            return None
        if self.origin(call.func) != "isinstance" or len(call.args) != 2:
            return None
        return call.args[1]


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Is it written as this constant?"""
    return isinstance(node, ast.Constant) and node.value is value


def literal(node: ast.expr) -> Any:
    """Its value where it is written out, else ``None``."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, SyntaxError):
        return None


def variant_of(kwargs: ast.expr | None) -> Variant:
    """The variant that ``gradient_checkpointing_kwargs`` chooses."""
    if kwargs is None or is_constant(kwargs, None):
        return "default"
    value = literal(kwargs)
    if not isinstance(value, dict):
        return "unknown"
    chosen = value.get("use_reentrant", "default")
    if isinstance(chosen, bool):
        return "reentrant" if chosen else "non-reentrant"
    return "default" if chosen == "default" else "unknown"


_ENABLE = {"gradient_checkpointing_enable", "activation_checkpointing_enable"}
_DISABLE = {
    "gradient_checkpointing_disable",
    "activation_checkpointing_disable",
    "disable_gradient_checkpointing",
}
_KWARGS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
_CHECKPOINTS = {"checkpoint", "checkpoint_sequential", "checkpoint_wrapper"}
_TORCH = ("torch.utils.checkpoint", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
_WRAPPER = "checkpoint_wrapper.checkpoint_wrapper"
# llama-cookbook and its forks call their own helper so; the effect of an import is not known.
HELPERS = {"apply_fsdp_checkpointing"}

Scope = tuple[str, ...]
Branch = tuple[tuple[int, str], ...]
# In a helper: the place of a parameter, the switch on it, whether a call is certain to reach it.
Inside = tuple[int, CheckpointSwitch, bool]


class Script(Struct):
    """The facts of a script.

    Attributes:
        switches: The checkpoints that it switches on.
        disabled: Expressions that a statement switches checkpointing off for.
        rebound: Names that it gives another value to, with the line and whether it always does;
            wrapping does not count.
        leaves: Lines at which a function may be left early.
        tests: The conditions of its ``if``, as written, by the first half of a ``branch``.
        refused: Lines at which conditions that are true together end a function: the scope, and
            the conditions.
        no_rng: Lines where a checkpoint does not restore random numbers.
        arguments: Keywords of Trainer arguments that it makes, with the call's line.
        early_stop_off: It switches torch's early stop off.
        parses: It reads Trainer arguments from its command line.
        trl: It uses TRL, which switches checkpointing on by default.
        calls: Words that show calls of frameworks' functions.
        prepared: The arguments of ``accelerator.prepare``, as wrappers that a plugin would put
            there.
        two_policies: Lines of Lightning's strategies that are given both of their arguments.
        modules: Its classes that are Lightning's modules.
        helpers: Its functions that switch on their argument.
        imported: Calls of imported functions that may be such helpers.
        checkpoints: How often it names a function that checkpoints, up to two.
        checkpointing: Its functions and classes that do.
        imports: Its imports, by dotted names.
        direct: Calls of torch's checkpoint functions.
        sections: DeepSpeed's configurations in its dictionaries.
    """

    switches: list[CheckpointSwitch] = []
    disabled: set[str] = set()
    rebound: list[tuple[str, int, bool]] = []
    leaves: list[int] = []
    tests: dict[int, str] = {}
    refused: list[tuple[int, Scope, frozenset[str]]] = []
    no_rng: list[int] = []
    arguments: list[tuple[int, dict[str, Any]]] = []
    early_stop_off: bool = False
    parses: bool = False
    trl: bool = False
    calls: frozenset[str] = frozenset()
    prepared: list[CheckpointSwitch] = []
    two_policies: list[int] = []
    modules: frozenset[str] = frozenset()
    helpers: dict[str, list[Inside]] = {}
    imported: list[CalledHelper] = []
    checkpoints: int = 0
    checkpointing: frozenset[str] = frozenset()
    imports: frozenset[str] = frozenset()
    direct: list[CheckpointSwitch] = []
    sections: list[tuple[Setting, ...]] = []


class LibraryCalls:
    """Notes the checkpoints that the calls of one script switch on, in their order."""

    def __init__(self, names: ScriptNames, found: Script) -> None:
        self.names = names
        self.found = found
        self._plugins: list[bool] = []
        roots = {origin.partition(".")[0] for origin in names.origins.values()}
        self._hugging_face, self._accelerate = "transformers" in roots, "accelerate" in roots
        self._diffusers = "diffusers" in roots

    def read(self, node: ast.Call, scope: Scope, branch: Branch) -> None:
        """Take in one call, with the functions and conditions around it."""
        self.scope, self.branch = scope, branch
        name = self.names.origin(node.func)
        last = name.rpartition(".")[2]
        keywords = {k.arg: self.names.resolved(k.value) for k in node.keywords if k.arg}
        if isinstance(node.func, ast.Attribute):
            self._method(node, node.func, keywords)
        if last == "apply_activation_checkpointing" and name.startswith("torch.") and node.args:
            self._wrapper(node, keywords)
        elif last in HELPERS and "." in name and node.args:
            self._switch("wrapper", "unknown", node, node.args[0], certain=False)
        elif last in _CHECKPOINTS and name.startswith(_TORCH):
            if is_constant(keywords.get("preserve_rng_state"), False):
                self.found.no_rng.append(node.lineno)
            if last != "checkpoint_wrapper" and node.args:
                self._direct(node, keywords)
        elif last == "set_checkpoint_early_stop" and node.args and is_constant(node.args[0], False):
            self.found.early_stop_off = True
        elif name == "peft.prepare_model_for_kbit_training" and node.args:
            self._peft(node, keywords)
        elif last == "FullyShardedDataParallelPlugin" and name.startswith("accelerate"):
            self._plugin(keywords)
        elif last == "FSDPStrategy":
            if keywords.keys() >= trainers.POLICIES:
                self.found.two_policies.append(node.lineno)
        elif last in ("Trainer", "Fabric") and isinstance(keywords.get("strategy"), ast.Call):
            self._strategy(node, keywords["strategy"])
        elif name.startswith(("transformers.", "trl.")) and last.endswith(("Arguments", "Config")):
            self.found.arguments.append((node.lineno, {k: literal(v) for k, v in keywords.items()}))

    @property
    def plugged(self) -> tuple[CheckpointSwitch, ...]:
        """The wrappers of a plugin that the script itself makes, where there is one only."""
        if len(self._plugins) != 1:
            return ()
        whole = self._plugins[0]
        return tuple(
            replace(
                at,
                certain=whole and at.certain,
                where=f"accelerate's plugin wraps on line {at.line}",
            )
            for at in self.found.prepared
        )

    def _method(self, node: ast.Call, func: ast.Attribute, keywords: dict[str, ast.expr]) -> None:
        if func.attr in _ENABLE:
            kwargs = next((keywords[key] for key in _KWARGS if key in keywords), None)
            kwargs = kwargs or (self.names.resolved(node.args[0]) if node.args else None)
            splat = any(k.arg is None for k in node.keywords)
            variant: Variant = "unknown" if splat else variant_of(kwargs)
            partly = "every_n_layers" in keywords
            self._switch(
                "model", variant, node, func.value, certain=self._hugging_face and not partly
            )
        elif func.attr == "enable_gradient_checkpointing" and self._diffusers:
            plain = not node.args and not node.keywords
            variant = "non-reentrant" if plain else "unknown"
            self._switch("model", variant, node, func.value, certain=plain)
        elif func.attr in _DISABLE:
            self.found.disabled.add(ast.unparse(func.value))
        elif func.attr == "prepare" and self._accelerate:
            for given in node.args:
                if isinstance(given, ast.Name | ast.Attribute):
                    made = self._made_by("wrapper", "non-reentrant", node, ast.unparse(given))
                    self.found.prepared.append(replace(made, certain=True))

    def _peft(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        """It switches on what the model's own switch does, where the model is quantized."""
        names = ("model", "use_gradient_checkpointing", "gradient_checkpointing_kwargs")
        given = {**dict(zip(names, node.args, strict=False)), **keywords}
        on = given.get("use_gradient_checkpointing")
        if on is None or is_constant(on, True):
            variant = variant_of(given.get("gradient_checkpointing_kwargs"))
            self._switch("model", variant, node, node.args[0], certain=False)

    def _plugin(self, keywords: dict[str, ast.expr]) -> None:
        if not is_constant(keywords.get("activation_checkpointing"), True):
            return
        policy = literal(keywords.get("auto_wrap_policy", ast.Constant(None)))
        kinds = literal(keywords.get("transformer_cls_names_to_wrap", ast.Constant(None)))
        whole = policy == "transformer_based_wrap" and (
            isinstance(kinds, list)
            and bool(kinds)
            and all(isinstance(kind, str) and kind.endswith(_LAYERS) for kind in kinds)
        )
        self._plugins.append(whole and not self.branch)

    def _strategy(self, node: ast.Call, strategy: ast.expr) -> None:
        """Lightning's wrapper, around whatever the module holds."""
        name = self.names.origin(strategy.func) if isinstance(strategy, ast.Call) else ""
        if not (name.startswith("lightning") and name.endswith("FSDPStrategy")):
            return
        given = {k.arg: k.value for k in strategy.keywords}  # type: ignore[attr-defined]
        policy = given.get("activation_checkpointing_policy")
        if policy is None:
            return
        kinds = policy.elts if isinstance(policy, ast.Set) else []
        made = self._made_by("wrapper", "non-reentrant", node, "*")
        whole = bool(kinds) and all(self.names.is_layer_class(kind) for kind in kinds)
        where = f"Lightning's strategy on line {node.lineno} wraps its layers"
        self.found.switches.append(replace(made, certain=whole, where=where))

    def _direct(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        """``checkpoint(block, …)``: what is inside what is for :mod:`nested` to say."""
        chosen = keywords.get("use_reentrant")
        # torch's default, as of 2.14.
        variant: Variant = "reentrant" if chosen is None else "unknown"
        if isinstance(chosen, ast.Constant) and isinstance(chosen.value, bool):
            variant = "reentrant" if chosen.value else "non-reentrant"
        self.found.direct.append(self._made_by("call", variant, node, ast.unparse(node.args[0])))

    def _wrapper(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        made = keywords.get("checkpoint_wrapper_fn") or (
            node.args[1] if len(node.args) > 1 else None
        )
        check = keywords.get("check_fn") or (node.args[2] if len(node.args) > 2 else None)
        variant, whole = self._made(made)
        kind = self.names.checked_class(check)
        name = kind.id if isinstance(kind, ast.Name) else ""
        layers = name in self.names.classes or (
            kind is not None and self.names.is_layer_class(kind)
        )
        self._switch("wrapper", variant, node, node.args[0], certain=whole and layers, around=name)

    def _made(self, made: ast.expr | None) -> tuple[Variant, bool]:
        """Which variant a wrapper is of, and whether it is known to be an ordinary one."""
        made = self.names.resolved(made) if made is not None else None
        if made is None or self.names.origin(made).endswith(_WRAPPER):
            return "non-reentrant", True
        if not (
            isinstance(made, ast.Call)
            and made.args
            and self.names.origin(made.func) == "functools.partial"
            and self.names.origin(made.args[0]).endswith(_WRAPPER)
        ):
            return "unknown", False
        keywords = {k.arg: k.value for k in made.keywords}
        if is_constant(keywords.get("preserve_rng_state"), False):
            self.found.no_rng.append(made.lineno)
        ordinary = set(keywords) <= {"checkpoint_impl", "preserve_rng_state", "offload_to_cpu"}
        chosen = keywords.get("checkpoint_impl")
        if chosen is None:
            return "non-reentrant", ordinary
        last = self.names.origin(chosen).rpartition(".")[2]
        variants: dict[str, Variant] = {"REENTRANT": "reentrant", "NO_REENTRANT": "non-reentrant"}
        return variants.get(last, "unknown"), ordinary

    def _switch(
        self,
        kind: Any,
        variant: Variant,
        node: ast.Call,
        subject: ast.expr,
        *,
        certain: bool,
        around: str = "",
    ) -> None:
        made = self._made_by(kind, variant, node, ast.unparse(subject))
        self.found.switches.append(replace(made, certain=certain, around=around))

    def _made_by(self, kind: Any, variant: Variant, node: ast.Call, what: str) -> CheckpointSwitch:
        return CheckpointSwitch(kind, variant, node.lineno, what, self.scope, self.branch)


# A requirement of transformers, up to its end, a marker, a comment or an option of pip's.
_PINNED = re.compile(
    r"^[^\S\n]*[\"']{0,3}transformers[^\S\n]*(?:\[[^\]\n]{0,200}\][^\S\n]*)?"
    r"([=~<>!][^\"'#;\n\\]{0,200})",
    re.MULTILINE,
)
_LARGE = 256_000
_NON_REENTRANT = "5.0"
_REFUSES = "4.33"
# On either side of those two.
_TRIED = ("4.0", "4.32.99", _REFUSES, "4.99.99", _NON_REENTRANT, "99.0")


def installed_version() -> str | None:
    """The version of transformers in this environment; nothing is imported."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def pinned_beside(folder: Path, installed: str | None = None) -> Pinned:
    """The pin in ``requirements*.txt`` and ``pyproject.toml`` of the folder; where they name no
    version of transformers, the installed one, and the last known where there is none.

    Files that contradict each other pin nothing.
    """
    pins = [found[1].split(" --")[0] for text in _texts(folder) for found in _PINNED.finditer(text)]
    source = "as pinned in its folder"
    if not pins and installed is not None:
        pins, source = [f"=={installed}"], f"transformers {installed} being installed"
    defaults: set[Variant] = set()
    refusing: set[bool] = set()
    for pin in pins:
        allowed = list(_allowed(pin))
        older, refuses = (
            {Version(each) < Version(since) for each in allowed}
            for since in (_NON_REENTRANT, _REFUSES)
        )
        if len(older) == 1:
            defaults.add("reentrant" if older.pop() else "non-reentrant")
        if len(refuses) == 1:
            refusing.add(not refuses.pop())
    known = len(defaults) == 1
    return Pinned(
        default=defaults.pop() if known else "default",
        refuses=False not in refusing,
        source=source if known else "",
    )


def _texts(folder: Path) -> Iterator[str]:
    for file in (*sorted(folder.glob("requirements*.txt")), folder / "pyproject.toml"):
        with suppress(OSError), opened(file) as stream:
            yield stream.read(_LARGE).decode(errors="replace")


def _allowed(pin: str) -> Iterator[str]:
    """Of the versions tried, and those that the pin names, the ones that it allows."""
    try:
        specifiers = SpecifierSet(pin)
        named = [one.version.removesuffix(".*") for one in specifiers]
        for each in (*_TRIED, *named, *(f"{Version(one).base_version}.1" for one in named)):
            if specifiers.contains(each, prereleases=True):
                yield Version(each).base_version
    except ValueError:  # no requirement after all
        return
