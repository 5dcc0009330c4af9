"""The pages that follow from the code are what the code gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_pages_are_true(generator: ModuleType) -> None:
    assert {"commands.md", "result-fields.md", "findings/RS101.md"} <= set(generator.PAGES)
    for page, write in generator.PAGES.items():
        written, now = (DOCS / page).read_text(encoding="utf-8"), write()
        if page.endswith(".html"):  # how a template is indented is no content
            written, now = " ".join(written.split()), " ".join(now.split())
        assert written == now, f"{page}: run python docs/generate.py (make fix does)"
