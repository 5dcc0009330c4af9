"""Launch commands in a shell script, and what each shows with the files that it names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace as replaced

from recompute_scan.frameworks import accelerate, llamafactory
from recompute_scan.frameworks.configuration import RUN, Setting, truthy
from recompute_scan.frameworks.known import commands
from recompute_scan.lint.doubling import ONE_SETTING, REFUSES, asks, found_flaw, script_findings
from recompute_scan.lint.python import Script
from recompute_scan.lint.said import Found, Pinned, Unreadable
from recompute_scan.lint.settings import read_settings
from recompute_scan.run_info import source_lines

_LAUNCHERS = re.compile(
    "|".join(
        rf"\b{re.escape(command)}\b".replace(r"\ ", r"\s+")
        for command in ("python", "python3", *commands())
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
    conditions are around it: what rests on it is said with the caution of the rules.

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
            words = _split(whole)
            if words:
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


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command, comments=True)
    except ValueError:
        return []


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
    """What one command shows; each file comes with its name, settings as far as they were read."""
    plugin = launch.get("fsdp_activation_checkpointing")
    wrapped = truthy(plugin.value) if plugin else accelerate.wrapper_of(config[1]) is not None
    if not (wrapped and (launch.get("use_fsdp") is not None or accelerate.is_fsdp(config[1]))):
        return
    if llamafactory.is_its_own(arguments[1]):
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
            "Pass gradient_checkpointing=False to TRL's configuration, or delete FSDP's "
            "activation_checkpointing.",
        )
    else:
        plugin = accelerate.wrapper_of(config[1])
        at = f"{config[0]}:{plugin.line}" if plugin else f"{file}:{launch.line}"
        whole = accelerate.wraps_layers(config[1])
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
    own = llamafactory.own_variant(arguments[1], fsdp2=accelerate.is_fsdp2(config[1]))
    if own is None:
        return
    plugin = accelerate.wrapper_of(config[1])
    name, line = (config[0], plugin.line) if plugin else (file, launch.line)
    where = f"FSDP's wrapper, which {file}:{launch.line} launches with {arguments[0]}"
    found = llamafactory.doubled(line, own, certain=accelerate.wraps_layers(config[1]), where=where)
    yield found_flaw(name, found)
