"""Switches that one script has in another: helpers, followed through their imports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from recompute_scan.lint.python import ImportedCall, Script
from recompute_scan.lint.said import CheckpointSwitch


def wrappers_from_elsewhere(
    scripts: Mapping[Path, Script],
) -> dict[Path, tuple[CheckpointSwitch, ...]]:
    """The switches of each script, those of imported helpers put where they are called.

    A helper is known where exactly one of the scripts that were read defines it in the module, or
    below the package, that the import names; else the call stays one whose effect is not told.
    """
    defined: dict[str, list[Path]] = {}
    for path, script in scripts.items():
        for name in script.helpers:
            defined.setdefault(name, []).append(path)
    found = {}
    for path, script in scripts.items():
        switches = script.switches
        for call in script.imported:
            switches = _put_in(switches, call, scripts, defined)
        found[path] = switches
    return found


def _put_in(
    switches: tuple[CheckpointSwitch, ...],
    call: ImportedCall,
    scripts: Mapping[Path, Script],
    defined: Mapping[str, list[Path]],
) -> tuple[CheckpointSwitch, ...]:
    module, _, name = call.origin.rpartition(".")
    named = [path for path in defined.get(name, ()) if _within(path, module)]
    if len(named) != 1:
        return switches
    kept = [switch for switch in switches if switch.line != call.line or switch.kind != "wrapper"]
    for place, switch, certain in scripts[named[0]].helpers[name]:
        if place < len(call.given):
            kept.append(
                replace(
                    switch,
                    line=call.line,
                    subject=call.given[place],
                    scope=call.scope,
                    branch=call.branch,
                    certain=certain,
                    layers=None,
                )
            )
    return tuple(kept)


def _within(path: Path, module: str) -> bool:
    """Whether a file is the module of that name, or below the package of that name."""
    parts = tuple(part for part in module.split(".") if part)
    inside = path.with_suffix("").parts
    return any(
        inside[start : start + len(parts)] == parts for start in range(len(inside) - len(parts) + 1)
    )
