"""What modules did in a step, by name, and which of them are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from recompute_scan.fidelity.module_tree import named_parts, weights
from recompute_scan.guarding.changes import WatchedPart
from recompute_scan.guarding.judging import SeenStep, Training
from recompute_scan.guarding.tallies import TalliedRegion
from recompute_scan.record.module_names import ModuleIndex, plain_name, root_modules

_LEAST = 0.5
# Searches for the names of modules; scripts that make models without end get names by class.
_SEARCHES = 50


class RegionNames:
    """Gives names to regions that were recomputed for the first time."""

    def __init__(self, index: ModuleIndex) -> None:
        self._index = index
        self._searches = 0

    def give(self, regions: Sequence[TalliedRegion]) -> None:
        """Name what has no name yet: qualified names, or function and line."""
        new = [one for one in regions if one.name is None and one.recomputed]
        if not new:
            return
        if self._searches < _SEARCHES:
            self._searches += 1
            self._index.rebuild()
        for region in new:
            module = region.module
            if module is None:
                at = f" ({region.site})" if region.site else ""
                region.name = f"{region.function}{at}"
            else:
                found = self._index.look_up([module])
                region.name = found.name or found.class_name


def seen_step(regions: Sequence[TalliedRegion]) -> dict[str, SeenStep]:
    """What each module did in the step that has ended, by its name."""
    parts: dict[str, list[WatchedPart]] = {}
    sites: dict[str, list[str]] = {}
    for region in regions:
        if region.name is None or not region.entered + region.recomputed:
            continue
        mine, at = parts.setdefault(region.name, []), sites.setdefault(region.name, [])
        if region.runs_again:
            mine.append(
                WatchedPart(
                    region.variant,
                    bool(region.keeps_random),
                    region.nested > 0,
                    region.again > 0,
                )
            )
            if region.site:
                at.append(region.site)
    return {name: SeenStep(tuple(sorted(mine)), tuple(sites[name])) for name, mine in parts.items()}


class Trained:
    """Looks at the gradients that are there when an optimizer has made its step."""

    def __init__(self, then: Iterable[str] = ()) -> None:
        self._then = set(then)
        self._step = -1
        self._found: dict[str, nn.Module] = {}

    def remember(self) -> None:
        """The first steps are over: keep which modules have gradients."""
        with torch._C.DisableTorchFunction():
            for name, module in _named():
                if any(p.grad is not None for p in weights(module)):
                    self._then.add(name)

    def then(self, name: str) -> bool:
        """Whether the module was trained when the first steps were over."""
        return bool({name, name.partition("-")[0]} & self._then)

    def names(self) -> tuple[str, ...]:
        """Those that were trained, for a stored baseline."""
        return tuple(sorted(self._then))

    def now(self, name: str, modules: Sequence[nn.Module], step: int) -> Training:
        """Whether the module is trained in this step.

        Args:
            name: Its name, by which it is looked for where its objects are no more.
            modules: Those of its objects that live.
            step: The number of the step.
        """
        if modules:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                return _training(modules[-1])
        if step != self._step:  # one search for all the modules that are asked for
            self._step, self._found = step, dict(_named())
        known = _plain(name, self._found.__contains__)
        if known is None:
            return "unknown"
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return _training(self._found[known])

    def let_go(self) -> None:
        """Hold no modules."""
        self._step, self._found = -1, {}


def _training(module: nn.Module) -> Training:
    parameters = list(weights(module))
    if not parameters:
        return "unknown"
    wanted = [one for one in parameters if one.requires_grad]
    if not wanted:
        return "frozen"
    reached = sum(one.grad is not None and bool((one.grad != 0).any()) for one in wanted)
    return "trained" if reached >= _LEAST * len(wanted) else "idle"


def _named() -> list[tuple[str, nn.Module]]:
    roots = [(root, list(named_parts(root))) for root in root_modules()]
    # A larger model's names replace a smaller's.
    roots.sort(key=lambda each: len(each[1]))
    return [(plain_name(name), module) for _, names in roots for name, module in names]


def _plain(name: str, known: Callable[[str], bool]) -> str | None:
    """The name as it is, of a run of modules that of the first, or without its model's."""
    for one in (name, name.partition("-")[0], name.partition(".")[2]):
        if one and known(one):
            return one
    return None
