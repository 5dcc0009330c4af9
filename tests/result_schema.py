"""The schema of results, compiled once: `jsonschema.validate` takes half a second each time."""

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from recompute_scan.result import json_schema


@cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(json_schema())


def validate(written: Any) -> None:
    """Raise ``jsonschema.ValidationError`` where this is no result as JSON."""
    _validator().validate(written)
