"""The document: its schema, and that it survives a round trip whatever it holds."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from recompute_scan import crash, result
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import InputError
from recompute_scan.report.render import render_html, render_markdown, render_text
from recompute_scan.result import (
    SCHEMA,
    Result,
    fidelity,
    from_json,
    json_schema,
    run_record,
    to_json,
    watched_step,
)
from tests.effort import examples
from tests.recompute.training import checkpointed_step
from tests.result_schema import validate
from tests.trace_builder import as_bytes, document, thread

_SCHEMAS = Path(__file__).parent.parent / "docs" / "schemas"

TEXT = st.text(st.characters(codec=None, exclude_categories=[]), max_size=20)


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Result:
    file = tmp_path_factory.mktemp("result") / "trace.json"
    recomputes = dict.fromkeys(range(3), 2)
    file.write_bytes(as_bytes(document(thread(checkpointed_step(0, recomputes=recomputes)))))
    return analyse([file])


def test_the_shipped_schema_is_the_generated_one() -> None:
    shipped = (_SCHEMAS / "result.json").read_text(encoding="utf-8")
    generated = json.loads(json.dumps(json_schema()))
    assert json.loads(shipped) == generated, "run python docs/generate.py"


def test_the_schema_is_a_schema_and_closed() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for definition in schema["$defs"].values():
        if "properties" in definition:
            assert set(definition["required"]) == set(definition["properties"])
            assert definition["additionalProperties"] is False


def test_a_result_fits_the_schema_and_begins_with_its_name(doubled: Result) -> None:
    written = to_json(doubled)
    validate(json.loads(written))
    assert next(iter(json.loads(written))) == "schema"
    assert json.loads(written)["schema"] == SCHEMA == "recompute-scan/1"


def test_unknown_numbers_are_null_and_never_missing(doubled: Result) -> None:
    unknown = structs.replace(doubled, cost=None, mean_recompute=None, proof=None)
    written = json.loads(to_json(unknown))
    assert [written[key] for key in ("cost", "mean_recompute", "proof")] == [None] * 3
    validate(written)


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "maybe"},
        {"schema": "recompute-scan/2"},
        {"recompute_per_backward": "2"},
        {"another": 1},
        {"regions": [{}]},
    ],
)
def test_the_schema_refuses_what_is_no_result(doubled: Result, change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate(json.loads(to_json(doubled)) | change)


def test_the_same_result_gives_the_same_bytes_and_reads_back(doubled: Result) -> None:
    written = to_json(doubled)
    assert from_json(written) == from_json(written.encode()) == doubled
    assert to_json(from_json(written)) == written


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "E302"),
        ("{", "E302"),
        ("{}", "E305"),
        ("[]", "E305"),
        ('{"schema": "recompute-scan/1"}', "E305"),
        (b"\xff\xfe", "E302"),
        ('{"schema": "recompute-scan/1", "more": ' + "9" * 400 + "}", "E305"),
    ],
)
def test_what_is_no_result_is_said(text: str | bytes, code: str) -> None:
    with pytest.raises(InputError) as caught:
        from_json(text)
    assert caught.value.code == code


def test_a_result_of_another_schema_is_said(doubled: Result) -> None:
    other = json.loads(to_json(doubled)) | {"schema": "recompute-scan/2"}
    with pytest.raises(InputError) as caught:
        from_json(json.dumps(other))
    assert caught.value.code == "E305"
    assert "recompute-scan/2" in caught.value.what


def with_text(result: Result, text: str) -> Result:
    """The result with this text wherever a trace or a file name can bring text in."""
    region = structs.replace(result.regions[0], module=text, module_class=text, signature=text)
    assert result.proof is not None
    lane = result.proof.lanes[0]
    op = structs.replace(lane.ops[0], name=text, family=text)
    proof = structs.replace(result.proof, lanes=(structs.replace(lane, ops=(op,)),))
    rank = structs.replace(result.ranks[0], trace=text)
    return structs.replace(
        result,
        headline=text,
        regions=(region,),
        proof=proof,
        ranks=(rank,),
        environment={text: text},
        warnings=(text,),
    )


@settings(deadline=None, max_examples=examples(40))
@given(TEXT)
def test_any_text_can_be_written_and_rendered(doubled: Result, text: str) -> None:
    hostile = with_text(doubled, text)
    written = to_json(hostile)
    written.encode()
    validate(json.loads(written))
    back = from_json(written)
    if text.isascii():
        assert back == hostile
    for render in (render_html, render_markdown):
        render(back).encode()
    render_text(back, color=False).encode()


@pytest.mark.parametrize("text", ["half \ud83d", "\udcff", "bell \x07", "\x00", "</script>"])
def test_text_that_no_file_can_hold_is_written_all_the_same(doubled: Result, text: str) -> None:
    written = to_json(with_text(doubled, text))
    assert "\ud83d" not in written
    assert render_html(with_text(doubled, text)).encode()
    expected = text.encode(errors="replace").decode()
    assert from_json(written).headline == expected


def test_numbers_that_json_cannot_hold_become_null(doubled: Result) -> None:
    odd = structs.replace(doubled, mean_recompute=float("nan"))
    assert json.loads(to_json(odd))["mean_recompute"] is None


def test_every_class_of_the_document_is_frozen() -> None:
    for name in json_schema()["$defs"]:
        homes = (result, crash, fidelity, run_record, watched_step)
        module = next(home for home in homes if hasattr(home, name))
        assert getattr(module, name).__struct_config__.frozen, name
