"""Switches in a Python script, from its syntax tree. The script is never imported."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.lint.facts import Switch, Unreadable, Variant
from recompute_scan.lint.names import Names, is_constant, literal, variant_of

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
# No person writes so many; what is compared with each other grows with their square.
_MOST_SWITCHES = 200


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
        self.names = Names(tree)
        self.scope: tuple[str, ...] = ()
        self.branch: tuple[tuple[int, str], ...] = ()
        self.switches: list[Switch] = []
        self.disabled: set[str] = set()
        self.rebound: list[tuple[str, int, bool]] = []
        self.leaves: list[int] = []
        self.no_rng: list[int] = []
        self.arguments: list[tuple[int, dict[str, Any]]] = []
        self.early_stop_off = False
        self.calls: list[tuple[ast.Call, tuple[str, ...], tuple[tuple[int, str], ...]]] = []

    def script(self, text: str) -> Script:
        names = set(self.names.origins.values())
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
        name = self.names.origin(node.func)
        last = name.rpartition(".")[2]
        keywords = {k.arg: self.names.resolved(k.value) for k in node.keywords if k.arg}
        if isinstance(node.func, ast.Attribute) and node.func.attr in _ENABLE:
            kwargs = keywords.get("gradient_checkpointing_kwargs")
            kwargs = kwargs or (self.names.resolved(node.args[0]) if node.args else None)
            splat = any(k.arg is None for k in node.keywords)
            variant: Variant = "unknown" if splat else variant_of(kwargs)
            hugging_face = any(o.startswith("transformers") for o in self.names.origins.values())
            self._switch("model", variant, node, node.func.value, certain=hugging_face)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _DISABLE:
            self.disabled.add(ast.unparse(node.func.value))
        elif last in _WRAPPERS and name.startswith("torch.") and node.args:
            self._wrapper(node, keywords)
        elif last in _HELPERS and "." in name and node.args:
            self._switch("wrapper", "unknown", node, node.args[0], certain=False)
        elif last in _CHECKPOINTS and name.startswith(_TORCH):
            if is_constant(keywords.get("preserve_rng_state"), False):
                self.no_rng.append(node.lineno)
        elif last == "set_checkpoint_early_stop" and node.args and is_constant(node.args[0], False):
            self.early_stop_off = True
        elif name.startswith(("transformers.", "trl.")) and last.endswith(("Arguments", "Config")):
            self.arguments.append((node.lineno, {k: literal(v) for k, v in keywords.items()}))
        if isinstance(node.func, ast.Name) and node.func.id in self.names.functions:
            self.calls.append((node, self.scope, self.branch))
        super().generic_visit(node)

    def _all_switches(self) -> tuple[Switch, ...]:
        """The script's switches; one in a helper stands where the helper is called."""
        inside = self._in_helpers()
        moved: set[Switch] = set()
        derived: list[Switch] = []
        for call, scope, branch in self.calls:
            helper = self.names.functions[ast.unparse(call.func)]
            names = [argument.arg for argument in helper.args.args]
            given = dict(zip(names, map(ast.unparse, call.args), strict=False))
            for switch, certain in inside.get(helper.name, ()):
                subject = given.get(switch.subject or "")
                if subject is None:
                    continue
                moved.add(switch)
                derived.append(
                    replace(
                        switch,
                        line=call.lineno,
                        subject=subject,
                        scope=scope,
                        branch=branch,
                        certain=certain,
                    )
                )
            if len(derived) > _MOST_SWITCHES:
                break
        found = (*(switch for switch in self.switches if switch not in moved), *derived)
        if len(found) > _MOST_SWITCHES:
            raise Unreadable(f"it switches checkpointing on more than {_MOST_SWITCHES} times")
        return found

    def _in_helpers(self) -> dict[str, list[tuple[Switch, bool]]]:
        """By function, the switches on what it is given; is it certain that a call reaches each?"""
        found: dict[str, list[tuple[Switch, bool]]] = {}
        scopes: dict[tuple[str, ...], ast.FunctionDef] = {
            (f"{name}:{helper.lineno}",): helper for name, helper in self.names.functions.items()
        }
        for switch in self.switches[: _MOST_SWITCHES + 1]:
            helper = scopes.get(switch.scope)
            if helper is None or any(
                name == switch.subject and helper.lineno < line < switch.line
                for name, line, _ in self.rebound
            ):
                continue
            left = any(helper.lineno < line < switch.line for line in self.leaves)
            certain = switch.certain and not switch.branch and not left
            found.setdefault(helper.name, []).append((switch, certain))
        return found

    def _wrapper(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        made = keywords.get("checkpoint_wrapper_fn") or (
            node.args[1] if len(node.args) > 1 else None
        )
        check = keywords.get("check_fn") or (node.args[2] if len(node.args) > 2 else None)
        variant, whole = self._made(made)
        self._switch(
            "wrapper", variant, node, node.args[0], certain=whole and self.names.is_layer(check)
        )

    def _made(self, made: ast.expr | None) -> tuple[Variant, bool]:
        """Which variant a wrapper is of, and whether it is known to be an ordinary one."""
        made = self.names.resolved(made) if made is not None else None
        if made is None or self.names.origin(made).endswith(
            "checkpoint_wrapper.checkpoint_wrapper"
        ):
            return "non-reentrant", True
        if not (isinstance(made, ast.Call) and made.args):
            return "unknown", False
        if self.names.origin(made.func) != "functools.partial" or not self.names.origin(
            made.args[0]
        ).endswith("checkpoint_wrapper.checkpoint_wrapper"):
            return "unknown", False
        keywords = {k.arg: k.value for k in made.keywords}
        if is_constant(keywords.get("preserve_rng_state"), False):
            self.no_rng.append(made.lineno)
        ordinary = set(keywords) <= {"checkpoint_impl", "preserve_rng_state", "offload_to_cpu"}
        chosen = keywords.get("checkpoint_impl")
        if chosen is None:
            return "non-reentrant", ordinary
        last = self.names.origin(chosen).rpartition(".")[2]
        variants: dict[str, Variant] = {"REENTRANT": "reentrant", "NO_REENTRANT": "non-reentrant"}
        return variants.get(last, "unknown"), ordinary

    def _switch(
        self, kind: Any, variant: Variant, node: ast.Call, subject: ast.expr, *, certain: bool
    ) -> None:
        self.switches.append(
            Switch(
                kind, variant, node.lineno, ast.unparse(subject), self.scope, self.branch, certain
            )
        )


def _is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ ==")
