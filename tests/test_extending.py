"""The recipes of ``docs/extending.md`` are true: followed in a copy of the package, they work."""

import gzip
import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.scratch import copy_package, printed

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "traces" / "doubled_llama_fsdp"
FAILURE = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    save_memory(model)
RuntimeError: acme: no blocks to save
"""
KNOWN = b"mechanism=hf-gradient-checkpointing"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, to add to."""
    return copy_package(tmp_path)


def example(heading: str) -> str:
    """The module that a recipe shows."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    recipe = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"^   ```python\n(.*?)^   ```$", recipe, re.DOTALL | re.MULTILINE)
    assert found is not None
    return textwrap.dedent(found[1])


def listed(module: Path, entry: str, *, before: str) -> None:
    """One more name in the list of a module."""
    text = module.read_text(encoding="utf-8")
    name = f'"{before}",'
    assert text.count(name) == 1
    module.write_text(text.replace(name, f'"{entry}", {name}'), encoding="utf-8")


def analysed(package: Path, trace: Path) -> str:
    return printed(package, "-m", "recompute_scan", "analyze", str(trace), "--format", "json")


def test_a_finding_is_one_module_and_one_line(package: Path) -> None:
    module = package / "findings" / "all_recomputed.py"
    module.write_text(example("A finding"), encoding="utf-8")
    listed(package / "findings" / "registry.py", "all_recomputed", before="policies")
    result = json.loads(analysed(package, TRACE))
    (found,) = [one for one in result["findings"] if one["code"] == "RS099"]
    assert found["name"] == "all-recomputed"
    assert re.fullmatch(r"(\d+) of \1 blocks run again", found["title"])
    assert (found["severity"], found["confidence"]) == ("info", result["confidence"])
    assert (found["fix"], found["saving_ms"], found["saving_pct"]) == (None, None, None)
    assert ["RS099", "found"] in [[one["code"], one["status"]] for one in result["checked"]]
    assert "RS001" in [one["code"] for one in result["findings"]]


def test_a_framework_is_one_module_and_one_line(package: Path, tmp_path: Path) -> None:
    heading = "A framework's way to switch checkpointing on"
    (package / "frameworks" / "acme.py").write_text(example(heading), encoding="utf-8")
    listed(package / "frameworks" / "registry.py", "acme", before="parallel")
    asked = "from recompute_scan.frameworks.registry import recognise, PACKAGES\n"
    asked += "print(recognise('acme/blocks.py:forward').title, 'acme' in PACKAGES)"
    assert printed(package, "-c", asked) == "Acme's save_memory True\n"

    # The stored run, as if Acme had switched its inner checkpoints on.
    run = shutil.copytree(TRACE, tmp_path / "run")
    trace = run / "trace-rank0.json.gz"
    events = gzip.decompress(trace.read_bytes())
    assert KNOWN in events
    trace.write_bytes(gzip.compress(events.replace(KNOWN, b"mechanism=acme"), 1))
    result = json.loads(analysed(package, run))
    (found,) = [one for one in result["findings"] if one["code"] == "RS001"]
    assert "Acme's save_memory" in found["detail"]

    settings = tmp_path / "acme.json"
    settings.write_text('{"acme": {"every": 2}}', encoding="utf-8")
    said = printed(package, "-m", "recompute_scan", "lint", str(settings))
    assert "RS606" in said
    assert "every switches nothing on alone" in said
    log = tmp_path / "acme.log"
    log.write_text(FAILURE, encoding="utf-8")
    said = printed(package, "-m", "recompute_scan", "explain", str(log))
    assert "RS199" in said
    assert "Acme found no blocks to checkpoint" in said
