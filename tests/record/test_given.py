"""Where a setting was given: in the code, on the command line, in a file, by a class, around it."""

import importlib
from pathlib import Path

import pytest

from recompute_scan.record.attribution import Made, SourceLine, given_at

NAMES = {"gradient_checkpointing", "activation_checkpointing"}
PLAIN = "args = TrainingArguments('out')"


class Settings:
    """Stands for a library's class of settings."""


def made(*arguments: str, kind: type = Settings, **environment: str) -> Made:
    return Made("train.py:1", kind, arguments, environment)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--gradient_checkpointing",), "--gradient_checkpointing"),
        (("--gradient_checkpointing", "True", "--lr", "1"), "--gradient_checkpointing"),
        (("--gradient-checkpointing=true",), "--gradient-checkpointing"),
        (("-gradient_checkpointing",), "-gradient_checkpointing"),
        (("--train.activation_checkpointing", "yes"), "--train.activation_checkpointing"),
        (("training.gradient_checkpointing=true",), "training.gradient_checkpointing"),
        (("+training.gradient_checkpointing=true",), "training.gradient_checkpointing"),
        (("--gradient_checkpointing", "False"), None),
        (("--gradient_checkpointing=0",), None),
        (("--gradient_checkpointing", "--gradient_checkpointing=false"), None),
        (("--no-gradient-checkpointing",), None),
        (("--gradient_checkpointing_kwargs", "{}"), None),
        (("gradient_checkpointing",), None),
        ((), None),
    ],
)
def test_an_option_of_the_command_line(arguments: tuple[str, ...], option: str | None) -> None:
    assert given_at(made(*arguments), NAMES, (), PLAIN) == option


@pytest.mark.parametrize(
    ("statement", "arguments", "option"),
    [
        ("a = T(gradient_checkpointing=True)", ("--gradient_checkpointing",), None),
        ("a = T(gradient_checkpointing=opts.remat)", ("--remat",), "--remat"),
        ("a = T(gradient_checkpointing=not opts.fast)", ("--remat",), None),
        ("a = T(gradient_checkpointing=cfg['remat'])", ("--remat=1",), "--remat"),
        ("a = T(fsdp_config={'activation_checkpointing': on})", ("--on",), "--on"),
        ("a = T(\n    gradient_checkpointing=remat,\n)", ("--remat",), "--remat"),
        ("    a = T(**options)", ("--gradient_checkpointing",), "--gradient_checkpointing"),
        ("with T() as a:", ("--gradient_checkpointing",), "--gradient_checkpointing"),
    ],
)
def test_a_value_in_the_statement_comes_first(
    statement: str, arguments: tuple[str, ...], option: str | None
) -> None:
    assert given_at(made(*arguments), NAMES, (), statement) == option


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "lr: 1\ntrain:\n  gradient_checkpointing: true\n", 3),
        ("a.yml", "# gradient_checkpointing: true\ngradient_checkpointing: false\n", None),
        ("a.json", '{"lr": 1,\n "fsdp": {"activation_checkpointing": true}}', 2),
        ("a.toml", "gradient_checkpointing = true\n", 1),
        ("a.txt", "gradient_checkpointing: true\n", None),
        ("a.yaml", "use_gradient_checkpointing: true\n", None),
    ],
)
@pytest.mark.parametrize("option", ["", "--config="])
def test_a_configuration_file(
    tmp_path: Path, name: str, text: str, line: int | None, option: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = given_at(made(f"{option}{path}"), NAMES, (), PLAIN)
    assert found == (SourceLine(str(path), line) if line else None)


def test_the_default_of_a_class_derived_from_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "given_settings.py"
    path.write_text(
        "from tests.record.test_given import Settings\n"
        "class Mine(Settings):\n    lr: float = 1\n    gradient_checkpointing: bool = True\n"
        "class More(Mine):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = importlib.import_module("given_settings").More
    assert given_at(made(kind=kind), NAMES, (), PLAIN) == SourceLine(str(path), 4)


def test_a_variable_of_the_environment() -> None:
    holder = made(FSDP_ACTIVATION_CHECKPOINTING="true")
    assert given_at(holder, NAMES, ("FSDP_ACTIVATION_CHECKPOINTING",), PLAIN) == (
        "FSDP_ACTIVATION_CHECKPOINTING"
    )
    holder = made(FSDP_ACTIVATION_CHECKPOINTING="false")
    assert given_at(holder, NAMES, ("FSDP_ACTIVATION_CHECKPOINTING",), PLAIN) is None
