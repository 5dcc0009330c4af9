"""What one launch command shows, with the configuration, the arguments and the script it names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace as replaced

from recompute_scan.lint.configurations import (
    ONE_SETTING,
    REFUSES,
    RUN,
    factory_finding,
    is_fsdp,
    is_fsdp2,
    is_llama_factory,
    llama_factory_variant,
    wrapper_of,
    wraps_layers,
)
from recompute_scan.lint.doubling import asks, script_findings
from recompute_scan.lint.python import Script
from recompute_scan.lint.said import Found, Pinned, Setting
from recompute_scan.lint.settings import truthy
from recompute_scan.lint.shell import Launch


def launch_findings(
    file: str,
    launch: Launch,
    config: tuple[str, Sequence[Setting]],
    arguments: tuple[str, Sequence[Setting]],
    script: tuple[str, Script] | None,
    pinned: Pinned,
) -> Iterator[Found]:
    """What one command shows; each file comes with its name, settings as far as they were read."""
    plugin = launch.get("fsdp_activation_checkpointing")
    wrapped = truthy(plugin.value) if plugin else wrapper_of(config[1]) is not None
    if not (wrapped and (launch.get("use_fsdp") is not None or is_fsdp(config[1]))):
        return
    if is_llama_factory(arguments[1]):
        yield from _factory(file, launch, config, arguments)
        return
    own = launch.get("gradient_checkpointing") or launch.get("activation_checkpointing")
    if own is not None and truthy(own.value):
        certain = script is not None and script[1].parses and pinned.refuses
        yield Found(
            file,
            launch.line,
            "RS604" if certain else "RS602",
            f"{'both are' if certain else 'may fail or double: both are'} on: "
            f"--{own.path[0]} and FSDP's activation_checkpointing",
            REFUSES if certain else f"{REFUSES} Other trainers may checkpoint twice. {RUN}",
            ONE_SETTING,
        )
    elif own is None and script is not None:
        yield from _script(file, launch, config, script, pinned)


def _script(
    file: str,
    launch: Launch,
    config: tuple[str, Sequence[Setting]],
    script: tuple[str, Script],
    pinned: Pinned,
) -> Iterator[Found]:
    name, read = script
    said = next((line for line, keywords in read.arguments if asks(keywords)), None)
    if said is not None:
        yield Found(
            file,
            launch.line,
            "RS604" if pinned.refuses else "RS602",
            f"both are on: Trainer arguments in {name}:{said}, and FSDP's activation_checkpointing",
            REFUSES,
            ONE_SETTING,
        )
    elif read.trl and not _switched_off(read):
        yield Found(
            file,
            launch.line,
            "RS602",
            "may fail: FSDP's activation_checkpointing is on, and TRL's default is on too",
            f"TRL's arguments have gradient_checkpointing=True unless told otherwise. {REFUSES}",
            "Add --gradient_checkpointing False, or delete FSDP's activation_checkpointing.",
        )
    else:
        plugin = wrapper_of(config[1])
        at = f"{config[0]}:{plugin.line}" if plugin else f"{file}:{launch.line}"
        whole = wraps_layers(config[1])
        wrappers = [
            replaced(prepared, certain=whole and prepared.certain, where=f"FSDP's wrapper ({at})")
            for prepared in read.prepared
        ]
        alone = set(script_findings(name, read, pinned))
        yield from (f for f in script_findings(name, read, pinned, wrappers) if f not in alone)


def _switched_off(read: Script) -> bool:
    """Whether every Trainer arguments that the script makes have its own switch off."""
    return bool(read.arguments) and all(
        keywords.get("gradient_checkpointing") is False for _, keywords in read.arguments
    )


def _factory(
    file: str,
    launch: Launch,
    config: tuple[str, Sequence[Setting]],
    arguments: tuple[str, Sequence[Setting]],
) -> Iterator[Found]:
    own = llama_factory_variant(arguments[1], fsdp2=is_fsdp2(config[1]))
    if own is None:
        return
    plugin = wrapper_of(config[1])
    name, line = (config[0], plugin.line) if plugin else (file, launch.line)
    where = f"FSDP's wrapper, which {file}:{launch.line} launches with {arguments[0]}"
    yield factory_finding(name, line, own, certain=wraps_layers(config[1]), where=where)
