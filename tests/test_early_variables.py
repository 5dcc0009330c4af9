"""What a script sets in its environment before it imports torch is set before we do."""

import os
from pathlib import Path
from textwrap import dedent

import pytest

from recompute_scan.cli.run import set_early
from tests.record.runs import tool


def settings(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Which of the variables A, B and C are set after a look at a script."""
    script = tmp_path / "train.py"
    script.write_text(dedent(text))
    with monkeypatch.context() as patch:
        for name in "ABC":
            patch.delenv(name, raising=False)
        patch.setenv("C", "from outside")
        set_early(script)
        found = {name: os.environ[name] for name in "ABC" if name in os.environ}
        for name in "AB":  # undone by nobody else
            os.environ.pop(name, None)
    return found


def test_the_first_lines_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '''
        """A script."""
        from __future__ import annotations
        import logging, os
        from pathlib import Path
        STEPS = 5
        os.environ["A"] = "1"
        os.environ.setdefault("B", "2")
        os.environ.setdefault("C", "3")
        import torch
        os.environ["A"] = "too late"
    '''
    assert settings(tmp_path, script, monkeypatch) == {"A": "1", "B": "2", "C": "from outside"}


@pytest.mark.parametrize(
    "script",
    [
        "import torch, os\nos.environ['A'] = '1'",
        "import os\nif True:\n    os.environ['A'] = '1'",
        "import os\nprint(os.environ.get('A'))\nos.environ['A'] = '1'",
        "import os\nos.environ['A'] = os.environ.get('HOME', '')",
        "import os\nfrom mine import config\nos.environ['A'] = '1'",
        "import mine as os\nos.environ['A'] = '1'",
        "import json as os\nos.environ['A'] = '1'",
        "from . import os\nos.environ['A'] = '1'",
        "import os\nos.environ['A'] = 1",
        "import os\nos.environ['A'] = '1\\0'",
        "this is no Python",
        "\0",
    ],
)
def test_what_cannot_be_told_is_left_to_the_script(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings(tmp_path, script, monkeypatch) == {"C": "from outside"}


@pytest.mark.slow
def test_the_number_of_threads_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n")
    with script.open("a") as file:
        file.write("print('threads', torch.get_num_threads())\n")
    done = tool(tmp_path, "run", "-o", "out", "train.py", OMP_NUM_THREADS="2")
    assert "threads 1\n" in done.stdout, done.stderr
