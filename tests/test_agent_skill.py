"""The skill for coding agents: a client follows its table, and a table that is wrong fails."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests import agent_client
from tests.agent_client import (
    ROOT,
    TRACES,
    Question,
    Seen,
    follow,
    right,
    spoilt,
    table_of,
)

TEXT = agent_client.SKILL.read_text(encoding="utf-8")
ROWS = table_of(TEXT)


def seen(**fields: object) -> Seen:
    usual: dict[str, object] = {
        "verdict": "full",
        "confidence": "high",
        "crash": None,
        "findings": [],
    }
    return Seen(0, usual | fields)


@pytest.mark.parametrize(
    ("answer", "verdict", "action"),
    [
        (seen(verdict="doubled"), "doubled", "remove-one-checkpoint"),
        (seen(verdict="doubled", confidence="low"), "doubled", "run-the-script"),
        (seen(), "full", "leave-it"),
        (seen(confidence="low"), "full", "run-the-script"),
        (seen(verdict="partial"), "partial", "leave-it"),
        (seen(verdict="none"), "none", "leave-it"),
        (seen(verdict="inconclusive"), "unknown", "record-again"),
        (seen(crash={"kind": "raised"}), "unknown", "read-the-crash"),
        (
            seen(verdict="doubled", findings=[{"wrong_gradients": True}]),
            "doubled",
            "restore-the-gradients",
        ),
        (Seen(2, {}), "unknown", "correct-the-command"),
        (Seen(3, {}), "unknown", "use-another-input"),
        (Seen(70, {}), "unknown", "report-the-bug"),
    ],
)
def test_every_row_is_followed(answer: Seen, verdict: str, action: str) -> None:
    assert follow(ROWS, answer)[1:] == (verdict, action)


def test_a_wrong_table_is_not_right() -> None:
    question = Question("doubled", (), "doubled", "remove-one-checkpoint")
    answers = [(question, seen(verdict="doubled"))]
    assert right(ROWS, answers) == (1, 1)
    number, *_ = follow(ROWS, answers[0][1])
    assert right(spoilt(ROWS, number), answers) == (0, 0)
    wrong = table_of(TEXT.replace("| `verdict = inconclusive` |", "| `verdict = doubled` |"))
    assert right(wrong, answers) == (0, 0)
    assert follow([replace(ROWS[0])], seen())[0] == -1


@pytest.mark.parametrize(
    "text",
    [
        "no table",
        TEXT.replace("`exit = 2`", "`exit is two`"),
        TEXT.replace("| when | verdict | do |", "| when | do |"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        table_of(text)


def test_a_field_that_no_result_has_is_refused() -> None:
    rows = table_of(TEXT.replace("`crash != null`", "`crashed != null`"))
    with pytest.raises(ValueError, match="crashed"):
        follow(rows, seen())


def test_every_action_is_explained_and_every_field_exists() -> None:
    explained = set(re.findall(r"`([a-z-]+)`", TEXT.partition("The actions:")[2]))
    assert {row.action for row in ROWS} <= explained
    schema = json.loads((ROOT / "docs" / "schemas" / "result.json").read_text())
    document = schema["$defs"]["Result"]["properties"]
    fields = {field for row in ROWS for _, field, _, _ in row.conditions} - {"exit"}
    for field in fields:
        first, _, rest = field.partition(".")
        assert first in document
        assert not rest or rest in schema["$defs"]["Finding"]["properties"]


def test_the_command_line_is_asked() -> None:
    trace = Path(TRACES, "plain_twice")
    question = agent_client._analyze("twice", trace, "doubled")
    assert right(ROWS, [(question, agent_client.ask(question))]) == (1, 1)
