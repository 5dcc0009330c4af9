"""Switches in a Python script, from its syntax tree. The script is never imported."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.lint.facts import Switch, Unreadable, Variant

_ENABLE = {"gradient_checkpointing_enable", "activation_checkpointing_enable"}
_DISABLE = {"gradient_checkpointing_disable", "activation_checkpointing_disable"}
_CHECKPOINTS = {"checkpoint", "checkpoint_sequential", "checkpoint_wrapper"}
_TORCH = (
    "torch.utils.checkpoint",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
)
_WRAPPERS = {"apply_activation_checkpointing"}
# As llama-cookbook and what was made from it call their own; what an import does is not known.
_HELPERS = {"apply_fsdp_checkpointing"}
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.IfExp, ast.BoolOp, ast.Match)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_LAYERS = ("DecoderLayer", "Block", "Layer")


class Script(Struct, frozen=True):
    """What a script says.

    Attributes:
        switches: What it switches on.
        disabled: Expressions whose checkpointing it switches off somewhere.
        rebound: Names that it gives another value to, with the line and whether it always does;
            wrapping is none.
        leaves: Lines at which a function may be left early.
        no_rng: Lines where a checkpoint does not restore random numbers.
        arguments: Keywords of Trainer arguments that it makes, with the call's line.
        early_stop_off: It switches torch's early stop off.
        parses: It reads Trainer arguments from its command line.
        trl: It uses TRL, whose arguments switch checkpointing on unless told otherwise.
        deepspeed_checkpointing: It uses DeepSpeed's own checkpointing.
    """

    switches: tuple[Switch, ...]
    disabled: frozenset[str]
    rebound: tuple[tuple[str, int, bool], ...]
    leaves: tuple[int, ...]
    no_rng: tuple[int, ...]
    arguments: tuple[tuple[int, dict[str, Any]], ...]
    early_stop_off: bool
    parses: bool
    trl: bool
    deepspeed_checkpointing: bool


def read_script(text: str) -> Script:
    """What the script says.

    Raises:
        Unreadable: It is no Python that this version of Python knows.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = _Reader(ast.parse(text))
        reader.visit(reader.tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"it is no Python ({type(error).__name__})") from None
    return reader.script(text)


class _Reader(ast.NodeVisitor):
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.origins: dict[str, str] = {}
        self.values: dict[str, ast.expr | None] = {}
        self.scope: tuple[str, ...] = ()
        self.branch: tuple[tuple[int, str], ...] = ()
        self.switches: list[Switch] = []
        self.disabled: set[str] = set()
        self.rebound: list[tuple[str, int, bool]] = []
        self.leaves: list[int] = []
        self.no_rng: list[int] = []
        self.arguments: list[tuple[int, dict[str, Any]]] = []
        self.early_stop_off = False
        self.helpers: dict[str, ast.FunctionDef] = {}
        self.calls: list[tuple[ast.Call, tuple[str, ...], tuple[tuple[int, str], ...]]] = []
        for top in tree.body:
            if isinstance(top, ast.FunctionDef):
                self.helpers[top.name] = top
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    self.origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    self.origins[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                # Known only where it has one value.
                self.values[node.id] = None
        written: dict[str, int] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                written[node.id] = written.get(node.id, 0) + 1
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name) and written[target.id] == 1:
                    self.values[target.id] = node.value

    def script(self, text: str) -> Script:
        names = set(self.origins.values())
        return Script(
            switches=self._all_switches(),
            disabled=frozenset(self.disabled),
            rebound=tuple(self.rebound),
            leaves=tuple(self.leaves),
            no_rng=tuple(self.no_rng),
            arguments=tuple(self.arguments),
            early_stop_off=self.early_stop_off,
            parses=bool(names & {"transformers.HfArgumentParser", "trl.TrlParser"}),
            trl=any(name in ("trl.SFTConfig", "trl.TrlParser") for name in names),
            deepspeed_checkpointing="deepspeed.checkpointing" in text
            or "activation_checkpointing.checkpointing" in text,
        )

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, _SCOPES):
            self._into(node, scope=getattr(node, "name", "lambda"))
        elif isinstance(node, _BRANCHES) and not _is_main(node):
            self._arms(node)
        else:
            if isinstance(node, _LEAVES):
                self.leaves.append(node.lineno)
            elif isinstance(node, ast.Assign):
                self._assigned(node)
            super().generic_visit(node)

    def _into(self, node: ast.AST, scope: str) -> None:
        kept = self.scope, self.branch
        self.scope, self.branch = (*self.scope, f"{scope}:{getattr(node, 'lineno', 0)}"), ()
        super().generic_visit(node)
        self.scope, self.branch = kept

    def _arms(self, node: ast.AST) -> None:
        kept = self.branch
        for arm, value in ast.iter_fields(node):
            self.branch = (*kept, (id(node), arm))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)
        self.branch = kept

    def _assigned(self, node: ast.Assign) -> None:
        for target in node.targets:
            name = ast.unparse(target)
            wraps = isinstance(node.value, ast.Call) and any(
                ast.unparse(argument) == name for argument in node.value.args
            )
            if not wraps:
                self.rebound.append((name, node.lineno, not self.branch))

    def visit_Call(self, node: ast.Call) -> None:
        name = self._origin(node.func)
        last = name.rpartition(".")[2]
        keywords = {k.arg: self._resolved(k.value) for k in node.keywords if k.arg}
        if isinstance(node.func, ast.Attribute) and node.func.attr in _ENABLE:
            kwargs = keywords.get("gradient_checkpointing_kwargs")
            kwargs = kwargs or (self._resolved(node.args[0]) if node.args else None)
            splat = any(k.arg is None for k in node.keywords)
            variant: Variant = "unknown" if splat else _of_kwargs(kwargs)
            hugging_face = any(o.startswith("transformers") for o in self.origins.values())
            self._switch("model", variant, node, node.func.value, certain=hugging_face)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _DISABLE:
            self.disabled.add(ast.unparse(node.func.value))
        elif last in _WRAPPERS and name.startswith("torch.") and node.args:
            self._wrapper(node, keywords)
        elif last in _HELPERS and "." in name and node.args:
            self._switch("wrapper", "unknown", node, node.args[0], certain=False)
        elif last in _CHECKPOINTS and name.startswith(_TORCH):
            if _is(keywords.get("preserve_rng_state"), False):
                self.no_rng.append(node.lineno)
        elif last == "set_checkpoint_early_stop" and node.args and _is(node.args[0], False):
            self.early_stop_off = True
        elif name.startswith(("transformers.", "trl.")) and last.endswith(("Arguments", "Config")):
            self.arguments.append((node.lineno, {k: _literal(v) for k, v in keywords.items()}))
        if isinstance(node.func, ast.Name) and node.func.id in self.helpers:
            self.calls.append((node, self.scope, self.branch))
        super().generic_visit(node)

    def _all_switches(self) -> tuple[Switch, ...]:
        """The script's switches; one in a helper stands where the helper is called."""
        derived = list(self._through_helpers())
        moved = {switch for switch, _ in derived}
        direct = (switch for switch in self.switches if switch not in moved)
        return (*direct, *(given for _, given in derived))

    def _helper(self, call: ast.Call) -> ast.FunctionDef:
        return self.helpers[ast.unparse(call.func)]

    def _through_helpers(self) -> Iterator[tuple[Switch, Switch]]:
        """Switches in the script's own functions, with what each call makes of them."""
        for call, scope, branch in self.calls:
            helper = self._helper(call)
            names = [argument.arg for argument in helper.args.args]
            given = dict(zip(names, map(ast.unparse, call.args), strict=False))
            for switch in self.switches:
                if switch.scope != (f"{helper.name}:{helper.lineno}",):
                    continue
                subject = given.get(switch.subject or "")
                left = any(helper.lineno < line < switch.line for line in self.leaves)
                rebound = any(
                    name == switch.subject and helper.lineno < line < switch.line
                    for name, line, _ in self.rebound
                )
                if subject is not None and not rebound:
                    certain = switch.certain and not switch.branch and not left
                    yield (
                        switch,
                        replace(
                            switch,
                            line=call.lineno,
                            subject=subject,
                            scope=scope,
                            branch=branch,
                            certain=certain,
                        ),
                    )

    def _wrapper(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        made = keywords.get("checkpoint_wrapper_fn") or (
            node.args[1] if len(node.args) > 1 else None
        )
        check = keywords.get("check_fn") or (node.args[2] if len(node.args) > 2 else None)
        variant, whole = self._made(made)
        self._switch(
            "wrapper", variant, node, node.args[0], certain=whole and self._is_layer(check)
        )

    def _made(self, made: ast.expr | None) -> tuple[Variant, bool]:
        """Which variant a wrapper is of, and whether it is known to be an ordinary one."""
        made = self._resolved(made) if made is not None else None
        if made is None or self._origin(made).endswith("checkpoint_wrapper.checkpoint_wrapper"):
            return "non-reentrant", True
        if not (isinstance(made, ast.Call) and made.args):
            return "unknown", False
        if self._origin(made.func) != "functools.partial" or not self._origin(
            made.args[0]
        ).endswith("checkpoint_wrapper.checkpoint_wrapper"):
            return "unknown", False
        keywords = {k.arg: k.value for k in made.keywords}
        if _is(keywords.get("preserve_rng_state"), False):
            self.no_rng.append(made.lineno)
        ordinary = set(keywords) <= {"checkpoint_impl", "preserve_rng_state", "offload_to_cpu"}
        chosen = keywords.get("checkpoint_impl")
        if chosen is None:
            return "non-reentrant", ordinary
        last = self._origin(chosen).rpartition(".")[2]
        variants: dict[str, Variant] = {"REENTRANT": "reentrant", "NO_REENTRANT": "non-reentrant"}
        return variants.get(last, "unknown"), ordinary

    def _is_layer(self, check: ast.expr | None) -> bool:
        """``lambda m: isinstance(m, LlamaDecoderLayer)``, the class being one of transformers."""
        check = self._resolved(check) if check is not None else None
        call: ast.AST | None = None
        if isinstance(check, ast.Lambda):
            call = check.body
        elif isinstance(check, ast.Name) and check.id in self.helpers:
            said = self.helpers[check.id].body
            call = said[0].value if len(said) == 1 and isinstance(said[0], ast.Return) else None
        if not isinstance(call, ast.Call):
            return False
        if self._origin(call.func) != "isinstance" or len(call.args) != 2:
            return False
        kind = self._origin(call.args[1])
        return kind.startswith("transformers.models.") and kind.endswith(_LAYERS)

    def _switch(
        self, kind: Any, variant: Variant, node: ast.Call, subject: ast.expr, *, certain: bool
    ) -> None:
        self.switches.append(
            Switch(
                kind, variant, node.lineno, ast.unparse(subject), self.scope, self.branch, certain
            )
        )

    def _origin(self, node: ast.AST) -> str:
        """The dotted name under which it was imported, or as written."""
        if isinstance(node, ast.Name):
            return self.origins.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self._origin(node.value)}.{node.attr}"
        return ""

    def _resolved(self, node: ast.expr) -> ast.expr:
        value = self.values.get(node.id) if isinstance(node, ast.Name) else None
        return value if value is not None else node


def _is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ ==")


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, SyntaxError):
        return None


def _of_kwargs(node: ast.expr | None) -> Variant:
    if node is None or _is(node, None):
        return "default"
    value = _literal(node)
    if not isinstance(value, dict):
        return "unknown"
    chosen = value.get("use_reentrant", "default")
    answers: dict[object, Variant] = {True: "reentrant", False: "non-reentrant"}
    return answers.get(chosen, "default" if chosen == "default" else "unknown")
