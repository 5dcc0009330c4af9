"""Shell scripts and configurations (YAML, JSON, TOML), and the checkpoints that they switch on."""

from __future__ import annotations

import re
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace as replaced

from recompute_scan.errors import how_to_add
from recompute_scan.frameworks import huggingface, registry, trainers
from recompute_scan.frameworks.base import Setting, Variant, truthy, value_of
from recompute_scan.frameworks.registry import COMMANDS
from recompute_scan.lint.doubling import (
    ONE_SETTING,
    REFUSES,
    asks,
    both_on,
    found_flaw,
    pairs,
)
from recompute_scan.lint.library_calls import Script
from recompute_scan.lint.rules import Found, Pinned, Unreadable
from recompute_scan.project_file import refuse_long_keys
from recompute_scan.result.run_record import source_lines

_SETTINGS_MOST = 20_000
_DEEPEST = 50


def read_settings(text: str, suffix: str) -> list[Setting]:
    """Every scalar of the file; of several YAML documents, all.

    Raises:
        Unreadable: It is not what its name says, or PyYAML is not installed.
    """
    if suffix in (".yaml", ".yml"):
        return _yaml(text)
    try:
        if suffix == ".toml":
            refuse_long_keys(text)
        decode = msgspec.json.decode if suffix == ".json" else msgspec.toml.decode
        data = decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unreadable(f"it is no {suffix[1:].upper()} ({type(error).__name__})") from None
    return [Setting(path, value, text) for path, value in _flat(data, (), _budget())]


def _budget(most: int = _SETTINGS_MOST) -> Iterator[int]:
    yield from range(most)
    raise Unreadable("it holds too much")


def _flat(
    data: Any, path: tuple[str, ...], budget: Iterator[int]
) -> Iterator[tuple[tuple[str, ...], object]]:
    next(budget if len(path) <= _DEEPEST else _budget(0))
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _flat(value, (*path, str(key)), budget)
    elif isinstance(data, list):
        for value in data:
            yield from _flat(value, (*path, "[]"), budget)
    else:
        yield path, data


def _yaml(text: str) -> list[Setting]:
    try:
        import yaml  # noqa: PLC0415 - an extra
    except ImportError:
        raise Unreadable(f"YAML needs PyYAML; {how_to_add('lint')}") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def fetch_flow_collection_start(self, token: object) -> None:
            # For each token PyYAML looks at all levels around it.
            next(_budget(self.flow_level <= _DEEPEST))
            super().fetch_flow_collection_start(token)

        def compose_node(self, *around: object) -> object:
            next(composed)
            return super().compose_node(*around)

    try:
        found: list[Setting] = []
        budget, composed = _budget(), _budget(2 * _SETTINGS_MOST)
        # PyYAML counts ends of lines that editors do not.
        ends = [hit.start() for hit in re.finditer("\n", text)]
        for root in yaml.compose_all(text, Loader=Loader):
            found += _nodes(root, (), budget, ends)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise Unreadable(f"it is no YAML ({type(error).__name__})") from None
    return found


def _nodes(
    node: Any, path: tuple[str, ...], budget: Iterator[int], ends: list[int]
) -> Iterator[Setting]:
    # Aliases are met again here, so the budget bounds what they expand to.
    next(budget if len(path) <= _DEEPEST else _budget(0))
    if node is None:
        return
    if node.id == "mapping":
        for key, value in node.value:
            name = str(key.value) if key.id == "scalar" else "?"
            if value.id == "scalar":
                next(budget)
                at = bisect_left(ends, key.start_mark.index) + 1
                yield Setting((*path, name), _scalar(value), at)
            else:
                yield from _nodes(value, (*path, name), budget, ends)
    elif node.id == "sequence":
        for value in node.value:
            yield from _nodes(value, (*path, "[]"), budget, ends)
    else:
        yield Setting(path, _scalar(node), bisect_left(ends, node.start_mark.index) + 1)


def _scalar(node: Any) -> object:
    kind = node.tag.rpartition(":")[2]
    if kind == "bool":
        return truthy(node.value)
    return None if kind == "null" else node.value


_LAUNCHERS = re.compile(
    "|".join(
        rf"\b{re.escape(command)}\b".replace(r"\ ", r"\s+")
        for command in ("python", "python3", *COMMANDS)
    )
)
_FILES = (".py", ".yaml", ".yml", ".json")
_ASSIGNED = re.compile(
    r"^\s*(?:export\s+|declare\s+(?:-a\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL
)
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?")
_OPENED = re.compile(r"^\s*(?:export\s+|declare\s+-a\s+)?\w+\+?=(\(|[\"'])")
_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")
_HERE = re.compile(r"<<-?\s*[\"']?(\w+)")
_NOTE = re.compile(" #")
# Of a command or a value, and of all commands of a file, with variables put in.
_MOST = 50_000
_MOST_OF_A_FILE = 500_000


class Launch(Struct, frozen=True):
    """One command that starts a training: its line, its files, its arguments.

    ``overrides`` are arguments as Hydra takes them, ``model.key=value``.
    """

    line: int
    files: tuple[str, ...]
    settings: tuple[Setting, ...]
    overrides: tuple[Setting, ...] = ()

    @property
    def script(self) -> str | None:
        """The Python script that it starts."""
        return next((name for name in self.files if name.endswith(".py")), None)

    def get(self, name: str) -> Setting | None:
        """The last value of an argument, which is what counts."""
        return next((s for s in reversed(self.settings) if s.path == (name,)), None)


def read_shell(text: str) -> Iterator[Launch]:
    """The launch commands of a shell script, variables and arrays that it sets itself put in.

    A variable that is set in several places has its last value before the command, whatever
    conditions are around it; the rules word their findings with that caution.

    Raises:
        Unreadable: The commands, variables put in, are too long.
    """
    known: dict[str, str] = {}
    left = _MOST_OF_A_FILE
    for line, command in _commands(text):
        assigned = _ASSIGNED.match(command)
        if assigned and not _LAUNCHERS.search(command):
            name, more, value = assigned.groups()
            value = _plain(value.strip(), known)
            known[name] = f"{known.get(name, '')} {value}"[:_MOST] if more else value
        elif _LAUNCHERS.search(command):
            whole = _put_in(command, known)
            left -= len(whole)
            if left < 0:
                raise Unreadable(f"its commands are longer than {_MOST_OF_A_FILE // 1000} kB")
            with suppress(ValueError):  # quotes that do not end
                if words := shlex.split(whole, comments=True):
                    yield _launch(words, line)


def read_documents(text: str) -> Iterator[list[Setting]]:
    """JSON that a shell script has in a variable in quotes, or between ``<<EOF`` and ``EOF``."""
    end, begin, held = "", 0, list[str]()
    for number, whole in enumerate(source_lines(text), 1):
        if end and whole.strip() == end:
            yield from _document("".join(held), begin)
            end, held = "", []
        elif end:
            held.append(whole)
        elif "<<" in whole and (here := _HERE.search(whole)):
            end, begin = here[1], number + 1
    for line, command in _commands(text):
        assigned = _ASSIGNED.match(command)
        if assigned and (value := assigned[3].strip())[:1] in ("'", '"'):
            value = value[1:].rpartition(value[0])[0]
            yield from _document(value.replace('\\"', '"'), line)


def _document(text: str, line: int) -> Iterator[list[Setting]]:
    """Its settings, each with its line in the script."""
    if text.lstrip()[:1] == "{":
        with suppress(Unreadable):
            # Lines are found when they are asked for, as if all else were empty.
            moved = "\n" * (line - 1) + text
            yield read_settings(moved, ".json")


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines, with the lines that they begin at; an array's parentheses join lines."""
    start, parts, size, sign, even = 1, list[str](), 0, "", True
    for number, whole in enumerate(source_lines(text), 1):
        line = whole.rstrip("\r\n")
        if not parts:
            start, size, sign, even = number, 0, "", True
        if line.endswith("\\"):
            parts.append(line[:-1] + " ")
            size += len(line)
            continue
        if not sign and (opened := _OPENED.match("".join((*parts, line)))):
            sign = opened[1]
            even = sign == "(" or "".join(parts).partition("=")[2].count(sign) % 2 == 0
        parts.append(line)
        size += len(line) + 1
        rest = line if sign == "(" or len(parts) > 1 else line.partition("=")[2]
        if sign and sign != "(":
            even = even is (rest.count(sign) % 2 == 0)
        closed = _NOTE.split(line)[0].rstrip().endswith(")") if sign == "(" else even
        if sign and size < _MOST and not closed:
            parts.append("\n")
            continue
        yield start, "".join(parts)
        parts = []


def _plain(value: str, known: dict[str, str]) -> str:
    """A value as the words that it stands for, without its quotes or parentheses."""
    if value.startswith("("):
        inner = value[1:].rpartition(")")[0]
        value = " ".join(
            line.split(" #")[0] for line in inner.split("\n") if line.strip()[:1] != "#"
        )
    elif value[:1] in ("'", '"'):
        value = value[1:].rpartition(value[0])[0]
    return _put_in(value, known)[:_MOST]


def _put_in(command: str, known: dict[str, str]) -> str:
    """The command with its variables; an array in quotes is several words."""
    command = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", command)
    parts, size, at = [], 0, 0
    for used in _USED.finditer(command):
        for part in (command[at : used.start()], known.get(used[1], used[0])):
            parts.append(part)
            size += len(part)
        at = used.end()
        if size > _MOST:
            break
    return "".join((*parts, command[at:]))[:_MOST]


def _launch(words: list[str], line: int) -> Launch:
    settings = []
    files = tuple(word for word in words if word.endswith(_FILES))
    for number, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[number + 1] if number + 1 < len(words) else "--"
        # A flag alone is on.
        given: object = value if equals else True if following.startswith("-") else following
        settings.append(Setting((name.replace("-", "_"),), given, line))
    overridden = [word.lstrip("+").partition("=") for word in words if _OVERRIDE.match(word)]
    overrides = [Setting(tuple(name.split(".")), value, line) for name, _, value in overridden]
    return Launch(line, files, tuple(settings), tuple(overrides))


def launch_findings(
    file: str,
    launch: Launch,
    config: tuple[str, Sequence[Setting]],
    arguments: tuple[str, Sequence[Setting]],
    script: tuple[str, Script] | None,
    pinned: Pinned,
) -> Iterator[Found]:
    """The findings of one command; each file comes with its name, and its settings where read."""
    plugin = launch.get("fsdp_activation_checkpointing")
    wrapper = huggingface.wrapper_of(config[1])
    wrapped = truthy(plugin.value) if plugin else wrapper is not None
    if not (wrapped and (launch.get("use_fsdp") is not None or huggingface.is_fsdp(config[1]))):
        return
    whole = huggingface.wraps_layers(config[1])
    if trainers.is_llama_factory(arguments[1]):
        fsdp2 = huggingface.is_fsdp2(config[1])
        variant = trainers.llama_factory_variant(arguments[1], fsdp2=fsdp2)
        if variant is not None:
            name, line = (config[0], wrapper.line) if wrapper else (file, launch.line)
            where = f"FSDP's wrapper, for {arguments[0]} launched at {file}:{launch.line}"
            flaw = trainers.llama_factory_doubled(line, variant, certain=whole, where=where)
            yield found_flaw(name, flaw)
        return
    own = launch.get("gradient_checkpointing") or launch.get("activation_checkpointing")
    if own is not None and truthy(own.value):
        certain = script is not None and script[1].parses and pinned.refuses
        which = f"--{own.path[0]} and FSDP's activation_checkpointing"
        yield both_on(file, launch.line, which, certain=certain)
    elif own is None and script is not None:
        at = f"{config[0]}:{wrapper.line}" if wrapper else f"{file}:{launch.line}"
        yield from _script(file, launch, script, pinned, at, whole=whole)


def _script(
    file: str,
    launch: Launch,
    script: tuple[str, Script],
    pinned: Pinned,
    wrapped_at: str,
    *,
    whole: bool,
) -> Iterator[Found]:
    name, read = script
    said = next((line for line, keywords in read.arguments if asks(keywords)), None)
    if said is not None:
        code = "RS604" if pinned.refuses else "RS602"
        title = (
            f"both are on: Trainer arguments in {name}:{said}, and FSDP's activation_checkpointing"
        )
        yield Found(file, launch.line, code, title, REFUSES, ONE_SETTING)
    elif read.trl and not (
        read.arguments
        and all(keywords.get("gradient_checkpointing") is False for _, keywords in read.arguments)
    ):
        yield Found(
            file,
            launch.line,
            "RS602",
            "may fail: FSDP's activation_checkpointing is on, and so is TRL's "
            "gradient_checkpointing by default",
            f"TRL's arguments have gradient_checkpointing=True by default. {REFUSES}",
            "Pass gradient_checkpointing=False to TRL's configuration, or delete FSDP's "
            "activation_checkpointing.",
        )
    else:
        where = f"FSDP's wrapper ({wrapped_at})"
        wrappers = [
            replaced(prepared, certain=whole and prepared.certain, where=where)
            for prepared in read.prepared
        ]
        alone = set(pairs(name, read, pinned))
        yield from (found for found in pairs(name, read, pinned, wrappers) if found not in alone)


_OWN = "the layers that the model's own switch covers"
_REENTRANT = re.compile(r"use_reentrant[\"']?\s*[:=]\s*[\"']?(\w+)")
_WRAPPED = ("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap")


class SwitchInFile(Struct, frozen=True, order=True):
    """One switch that is on.

    Attributes:
        by: What switches it on.
        layers: What is checkpointed, in words.
        variant: Which of torch's two; ``default`` where it is the library's, which changed with its
            versions, ``unknown`` where the file does not say.
        conditional: Whether conditions, loops or early ends of a script decide on it.
    """

    file: str
    line: int
    by: str
    layers: str
    variant: Variant
    conditional: bool = False


def on_in_script(file: str, script: Script, pinned: Pinned) -> Iterator[SwitchInFile]:
    """Those of a script."""
    for switch in script.switches:
        subject = switch.subject or "the model"
        if switch.kind == "model":
            by, layers = "the model's own switch", f"{_OWN}, in {subject}"
        else:
            by = "a checkpoint wrapper"
            chosen = f"each {switch.around}" if switch.around else "what is chosen"
            layers = f"{chosen} in {subject}"
        variant = pinned.default if switch.variant == "default" else switch.variant
        yield SwitchInFile(file, switch.line, by, layers, variant, bool(switch.branch))
    for call in script.direct:
        inside = ".".join(part.partition(":")[0] for part in call.scope)
        layers = f"{call.subject}{f' in {inside}' if inside else ''}"
        conditional = bool(call.branch)
        by = "torch.utils.checkpoint"
        yield SwitchInFile(file, call.line, by, layers[:200], call.variant, conditional)
    for line, keywords in script.arguments:
        if asks(keywords):
            given = keywords.get("gradient_checkpointing_kwargs")
            reentrant = given.get("use_reentrant") if isinstance(given, dict) else None
            variant = _variant(reentrant, pinned)
            yield SwitchInFile(file, line, "Trainer arguments", _OWN, variant)
        config = keywords.get("fsdp_config")
        if isinstance(config, dict) and config.get("activation_checkpointing") is True:
            layers = "the layers that FSDP wraps"
            yield SwitchInFile(file, line, "FSDP's wrapper", layers, "non-reentrant")


def on_in_settings(
    file: str, settings: Sequence[Setting], pinned: Pinned
) -> Iterator[SwitchInFile]:
    """Those of a configuration file."""
    values = {setting.path: setting for setting in settings}
    wrapper = huggingface.any_wrapper_of(settings)
    if wrapper is not None and truthy(wrapper.value):
        named = next((s.value for s in settings if s.path[-1] in _WRAPPED if s.path), None)
        layers = f"each {named}" if named else "the layers that FSDP wraps"
        yield SwitchInFile(file, wrapper.line, "FSDP's wrapper", layers, "non-reentrant")
    if trainers.is_llama_factory(settings):
        own = trainers.llama_factory_variant(settings, fsdp2=huggingface.is_fsdp2(settings))
        if own is not None:
            yield SwitchInFile(file, values["stage",].line, "LLaMA-Factory, by default", _OWN, own)
    elif (own_switch := values.get(("gradient_checkpointing",))) and truthy(own_switch.value):
        chosen = value_of(settings, "gradient_checkpointing_kwargs", "use_reentrant")
        by = "gradient_checkpointing"
        yield SwitchInFile(file, own_switch.line, by, _OWN, _variant(chosen, pinned))
    for path, setting in values.items():
        for switch in registry.switched_on(path, setting):
            yield SwitchInFile(file, setting.line, switch.by, switch.layers, switch.variant)


def on_in_launch(file: str, launch: Launch, pinned: Pinned) -> Iterator[SwitchInFile]:
    """Those of one launch command."""
    own = launch.get("gradient_checkpointing") or launch.get("activation_checkpointing")
    if own is not None and truthy(own.value):
        kwargs = launch.get("gradient_checkpointing_kwargs")
        chosen = launch.get("use_reentrant")
        given: object = chosen.value if chosen else None
        if kwargs is not None:
            said = _REENTRANT.search(str(kwargs.value))
            given = said[1] if said else None
        by = f"--{own.path[0]}"
        yield SwitchInFile(file, launch.line, by, _OWN, _variant(given, pinned))
    plugin = launch.get("fsdp_activation_checkpointing")
    if plugin is not None and truthy(plugin.value) and launch.get("use_fsdp") is not None:
        layers = "the layers that FSDP wraps"
        yield SwitchInFile(file, launch.line, "FSDP's wrapper", layers, "non-reentrant")
    for setting in (*launch.settings, *launch.overrides):
        path = tuple(part for name in setting.path for part in name.split("."))
        for switch in registry.switched_on(path, setting):
            yield SwitchInFile(file, launch.line, switch.by, switch.layers, switch.variant)


def _variant(reentrant: object, pinned: Pinned) -> Variant:
    if reentrant is None:
        return pinned.default
    return "reentrant" if truthy(reentrant) else "non-reentrant"
