"""What the names and expressions of a script stand for, as far as the script itself tells."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

from recompute_scan.frameworks.configuration import Variant

_LAYERS = ("DecoderLayer", "Block", "Layer")


class ScriptNames:
    """The names of one script.

    Attributes:
        origins: Of what is imported, the dotted name.
        functions: The script's own, by name.
        classes: The script's own, by name.
    """

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
        """What a name stands for, where it is given a value once; anything else as it is."""
        return self._values.get(node.id, node) if isinstance(node, ast.Name) else node

    def is_layer(self, check: ast.expr | None) -> bool:
        """``lambda m: isinstance(m, LlamaDecoderLayer)``, the class being one of transformers."""
        kind = self._checked(check)
        return kind is not None and self.is_layer_class(kind)

    def is_layer_class(self, kind: ast.expr) -> bool:
        """A decoder layer's class of transformers."""
        name = self.origin(kind)
        return name.startswith("transformers.models.") and name.endswith(_LAYERS)

    def checked_class(self, check: ast.expr | None) -> str:
        """The class that such a function asks for, by the name that it has here."""
        kind = self._checked(check)
        return kind.id if isinstance(kind, ast.Name) else ""

    def _checked(self, check: ast.expr | None) -> ast.expr | None:
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
