"""Settings to put in: for fewer checkpointed layers, for less of each, or for an arrangement."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.advise.choice import (
    UNKNOWN_RUN,
    RunFacts,
    kept,
    leave_out,
    mechanism_of,
    place,
    review,
    switch_of,
    title_of,
    worded,
)
from recompute_scan.frameworks.base import (
    CHECKPOINT_DOCS,
    NON_REENTRANT,
    SELECTIVE_DOCS,
    SELECTIVELY,
)
from recompute_scan.frameworks.registry import find_mechanism
from recompute_scan.result import Checkpoint, Fix, PlannedModule, Region
from recompute_scan.units import first_few, runs_of

_ADD = "Add this once the model is made, before it is sharded or compiled:"
_MOST_NAMED = 4
# Names in code: from so many of one list on they are counted, in lines no wider than this.
_FEWEST_COUNTED = 3
_WIDEST = 88
_IMPORT = (
    "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (\n"
    "    apply_activation_checkpointing,\n"
    "{more})"
)
_SELECTIVE = """import functools

import torch
{}
from torch.utils.checkpoint import create_selective_checkpoint_contexts

kept = [
{}]
contexts = functools.partial(create_selective_checkpoint_contexts, kept)
selective = functools.partial(checkpoint_wrapper, context_fn=contexts)"""


def advise_fewer(
    checkpoints: Sequence[Checkpoint], layers: str, whole: bool, run: RunFacts = UNKNOWN_RUN
) -> Fix:
    """The change that stops checkpointing these layers, which may be the whole of the checkpointed
    ones.
    """
    checkpoint = kept(checkpoints, sharded=run.sharded)
    title = title_of(checkpoint)
    mechanism = find_mechanism(checkpoint.mechanism)
    if whole and mechanism is not None:
        setting = worded(mechanism.remove, mechanism, run, checkpoint.source or "")
    else:
        setting = leave_out(mechanism, run).format(layers=layers, title=title)
    where = f" ({checkpoint.call_site})" if checkpoint.call_site else ""
    return review(
        summary=f"Stop checkpointing {layers}: {setting}{where}.",
        keep="no checkpoint at all" if whole else f"{title} for all other layers",
        remove=f"{title} for {layers}",
        docs=mechanism.docs if mechanism else CHECKPOINT_DOCS,
    )


def advise_selective(
    checkpoints: Sequence[Checkpoint], operators: Sequence[str], run: RunFacts = UNKNOWN_RUN
) -> Fix:
    """The change that keeps the results of these operators, named as the profiler does."""
    checkpoint = kept(checkpoints, sharded=run.sharded)
    listed = ", ".join(f"torch.ops.{name.replace('::', '.')}.default" for name in operators)
    context = f"functools.partial(create_selective_checkpoint_contexts, [{listed}])"
    title = title_of(checkpoint)
    mechanism = find_mechanism(checkpoint.mechanism)
    template = mechanism.selectively if mechanism else SELECTIVELY
    return review(
        summary=template.format(title=title, context=context) + ".",
        keep="the recompute of everything else in the layers; the checkpoint must be "
        "non-reentrant (torch 2.5 and newer)",
        remove="nothing",
        docs=SELECTIVE_DOCS,
        reason=f"Where the checkpoint was reentrant: {NON_REENTRANT[0].lower()}{NON_REENTRANT[1:]}",
    )


def setting_for(
    modules: Sequence[PlannedModule],
    regions: Sequence[Region],
    run: RunFacts = UNKNOWN_RUN,
    operators: Sequence[str] = (),
) -> tuple[tuple[str, ...], str]:
    """The change in words, and the code to add after the model is made, if any.

    Selective checkpoints keep the results of these operators, ``aten.mm.default``.
    """
    partly = any(one.selective or one.offloaded or one.parts for one in modules)
    on = {one.module for one in modules if one.recompute}
    before = {one.module for one in modules if one.checkpointed}
    parts_before = {name for one in modules for name in one.names_of_parts(one.parts_today)}
    today = [*dict.fromkeys(c for region in regions for c in region.checkpoints)]
    nested = any(len(region.checkpoints) > 1 for region in regions)
    around = {region.module for region in regions if region.checkpoints}
    as_today = all(one.stays for one in modules) and not nested
    if as_today and (not today or around == before | parts_before):
        return ("The script already does this, so there is nothing to change.",), ""
    off = [_off(one, run) for one in {switch_of(one): one for one in today}.values()]
    if not on and not partly:
        return tuple(off), ""
    code = _code(modules, operators)
    if on < before and not nested and today and not partly and not parts_before:
        # Layers are left out of the existing setting; the code does the same.
        left_out = [one.module for one in modules if one.module in before - on]
        checkpoints = [kept(today, sharded=run.sharded)]
        fewer = advise_fewer(checkpoints, listed(left_out), whole=False, run=run).summary
        instead = f"Or {_lower(' '.join(off))} Then {_lower(_ADD)}"
        return (f"Either {_lower(fewer)}", instead), code
    return (*off, _ADD), code


def listed(names: Sequence[str]) -> str:
    """Names of modules in words; modules of one list by its name and numbers."""
    stem = names[0].rpartition(".")[0] if names else ""
    numbers = [name.rpartition(".")[2] for name in names]
    if (
        len(names) > 1
        and all(n.isdigit() for n in numbers)
        and all(name.rpartition(".")[0] == stem for name in names)
    ):
        return f"{stem}[{', '.join(_spans(sorted(map(int, numbers))))}]"
    return first_few(names, _MOST_NAMED)


def _spans(numbers: Sequence[int]) -> list[str]:
    return [
        f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}"
        for a, b in runs_of(numbers)
    ]


def _code(modules: Sequence[PlannedModule], operators: Sequence[str]) -> str:
    """``apply_activation_checkpointing`` with a check that chooses the modules."""
    offloaded = [one for one in modules if one.offloaded]
    more = "    offload_wrapper,\n" if offloaded else ""
    lines, calls = [_IMPORT.format(more=more)], []
    if operators:
        named = "".join(f"    torch.ops.{name},\n" for name in operators)
        lines = [_SELECTIVE.format(_IMPORT.format(more=f"    checkpoint_wrapper,\n{more}"), named)]
    selective = [one for one in modules if one.selective]
    whole = [one for one in modules if one.checkpointed_names and not one.selective]
    # Wrapped, a module goes by another name, so all are looked up before.
    for chosen, name, wrapper in (
        (whole, "chosen", ""),
        (selective, "selectively", "checkpoint_wrapper_fn=selective, "),
        (offloaded, "on_host", "checkpoint_wrapper_fn=offload_wrapper, "),
    ):
        if not chosen:
            continue
        kinds = {one.module_class for one in chosen}
        check = f"isinstance(module, {chosen[0].module_class})"
        some = len(chosen) < len(modules) or any(one.parts for one in chosen)
        if some or len(kinds) > 1 or not min(kinds).isidentifier():
            check = f"module in {name}"
            lines.append(_looked_up(name, chosen))
        check = f"{wrapper}check_fn=lambda module: {check}"
        calls.append(f"apply_activation_checkpointing(\n    model, {check}\n)")
    return "\n".join((lines[0], "", *lines[1:], *calls))


def _looked_up(variable: str, chosen: Sequence[PlannedModule]) -> str:
    """Python that looks these modules up, or their parts."""
    each = _names(chosen)
    alone = len(each) == 1 and each[0].startswith("*")
    names = each[0].removeprefix("*") if alone else f"[{', '.join(each)}]"
    line = f"{variable} = [model.get_submodule(name) for name in {names}]"
    if len(line) <= _WIDEST or alone:
        return line
    inner = "".join(f"        {one},\n" for one in each)
    return f"{variable} = [\n    model.get_submodule(name)\n    for name in [\n{inner}    ]\n]"


def _names(chosen: Sequence[PlannedModule]) -> list[str]:
    """Python for the names, what is in one list together and unpacked."""
    lists: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for one in chosen:
        stem, _, number = one.module.rpartition(".")
        for part in one.parts or ("",):
            behind = f".{part}" if part else ""
            lists.setdefault((stem, behind), []).append((number, f"{one.module}{behind}"))
    found: list[str] = []
    for (stem, behind), known in lists.items():
        plain = f"{stem}{behind}".replace(".", "_").isidentifier()
        if len(known) < _FEWEST_COUNTED or not plain or not all(n.isdecimal() for n, _ in known):
            found += [repr(name) for _, name in known]
        else:
            places = _counted([int(number) for number, _ in known])
            found.append(f'*(f"{stem}.{{n}}{behind}" for n in {places})')
    return found


def _counted(places: Sequence[int]) -> str:
    step = places[1] - places[0]
    if step > 0 and list(places) == list(range(places[0], places[-1] + 1, step)):
        return f"range({places[0]}, {places[-1] + 1}{f', {step}' if step > 1 else ''})"
    return repr(tuple(places))


def _off(checkpoint: Checkpoint, run: RunFacts) -> str:
    mechanism = mechanism_of(checkpoint)
    where = place(checkpoint.call_site)
    if mechanism is None:
        return f"Take out {title_of(checkpoint)}{where}."
    words = worded(mechanism.remove, mechanism, run, checkpoint.source or "")
    return f"{words[0].upper()}{words[1:]}{where}."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
