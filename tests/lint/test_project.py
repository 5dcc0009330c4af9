"""Edits, acceptance, settings of a project, and the hook for pre-commit."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from recompute_scan.cli import cli, main
from recompute_scan.lint import lint
from recompute_scan.project_file import lint_settings
from tests.lint.cases import PARTS

ROOT = Path(__file__).resolve().parents[2]
DOUBLED = PARTS["HEAD"] + PARTS["WRAP"] + PARTS["ON_REENTRANT"]
NOTE = "checkpoint(f, x, use_reentrant=False, preserve_rng_state=False)"
RANDOM = f"from torch.utils.checkpoint import checkpoint\n{NOTE}"


def _patched(folder: Path, text: bytes) -> None:
    subprocess.run(["patch", "-p1"], input=text, cwd=folder, check=True)


@pytest.mark.skipif(not shutil.which("patch"), reason="patch is not installed")
@pytest.mark.parametrize(
    "files",
    [
        {"train.py": DOUBLED},
        {"train.py": DOUBLED.rstrip("\n")},
        {"train.py": DOUBLED.replace("\n", "\r\n")},
        {
            "train.py": PARTS["HEAD"]
            + "if x:\n    "
            + PARTS["WRAP"].replace("\n", "\n    ")
            + PARTS["ON_REENTRANT"]
        },
        {"sub/a b.py": DOUBLED, "train.py": DOUBLED},
        {
            "sft.yaml": PARTS["LLAMA_FACTORY"] + "fsdp: full_shard auto_wrap\nfsdp_config:\n"
            "  activation_checkpointing: true  # saves memory\n"
        },
        {
            "args.json": '{"output_dir": "o", "fsdp": "full_shard",\n "fsdp_config": {\n'
            '  "activation_checkpointing": true},\n "gradient_checkpointing": true}\n'
        },
    ],
)
def test_the_diff_mends_what_is_certain(files: dict[str, str], inside: Path) -> None:
    for name, text in files.items():
        (inside / name).parent.mkdir(exist_ok=True)
        (inside / name).write_bytes(text.encode())
    result = CliRunner().invoke(cli, ["lint", ".", "--diff"], standalone_mode=False)
    assert result.return_value == 1
    _patched(inside, result.stdout_bytes)
    assert not [found for found in lint([inside]).found if found.severity == "error"]
    for file in inside.rglob("*.py"):
        compile(file.read_text(), str(file), "exec")


def test_a_block_is_never_left_empty(inside: Path) -> None:
    script = PARTS["HEAD"] + "def f():\n    " + PARTS["ON_REENTRANT"] + "f()\n"
    (inside / "t.py").write_text(script.replace("f()\n", "f()\n", 1))
    from recompute_scan.lint.output import diff  # noqa: PLC0415
    from recompute_scan.lint.rules import Found  # noqa: PLC0415

    at = script.splitlines().index("    " + PARTS["ON_REENTRANT"].rstrip()) + 1
    assert "+    pass" in diff([Found("t.py", at, "RS601", "", "", "", "delete")])


@pytest.mark.parametrize(
    ("comment", "found", "unused"),
    [
        ("# noqa: RS605 - no dropout", 0, 0),
        ("# noqa: E501, RS605 - no dropout", 0, 0),
        ("# noqa: RS605", 1, 1),
        ("# noqa: RS601 - wrong code", 1, 1),
        ("# noqa: E501", 1, 0),
        ("# recompute-scan: ignore[RS605] no dropout", 0, 0),
    ],
)
def test_noqa(comment: str, found: int, unused: int, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(f"{RANDOM}  {comment}\n")
    report = lint([tmp_path])
    assert (len(report.found), len(report.unused)) == (found, unused)


def test_a_comment_in_a_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        'x = "# noqa: RS605 - no"\n"""\n# recompute-scan: ignore a\n"""\n'
    )
    assert not lint([tmp_path]).unused


@pytest.mark.parametrize(
    ("table", "status", "found"),
    [
        ("", 0, 1),
        ('fail-on = "info"', 1, 1),
        ('fail-on = "none"', 0, 1),
        ('ignore = ["RS605"]', 0, 0),
        ('ignore = ["RS60"]\nfail-on = "info"', 0, 0),
        ('select = ["RS601"]', 0, 0),
        ('exclude = ["sub"]', 0, 0),
        ('exclude = ["s*/t.py"]', 0, 0),
    ],
)
def test_settings_of_a_project(table: str, status: int, found: int, inside: Path) -> None:
    (inside / "sub").mkdir()
    (inside / "sub" / "t.py").write_text(RANDOM + "\n")
    (inside / "pyproject.toml").write_text(f"[tool.recompute-scan.lint]\n{table}\n")
    report = lint([Path()], lint_settings(Path.cwd()))
    assert (report.status, len(report.found)) == (status, found)


@pytest.mark.parametrize(
    "text",
    [
        "[tool.recompute-scan]\nselect = []\n",
        "[tool.recompute-scan.lint]\nselct = []\n",
        "[tool.recompute-scan.lint]\nselect = [1.5]\n",
        '[tool.recompute-scan.lint]\nfail-on = "often"\n',
        '[tool.recompute-scan]\nlint = "x"\n',
        '[tool.recompute-scan.lint]\nselect = ["RS60", "RS666"]\n',
        "recompute-scan = [\n",
    ],
)
def test_wrong_settings_are_said(
    text: str, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (inside / "pyproject.toml").write_text(text)
    assert main(["lint", "."]) == 2
    assert "[E240]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["tool = 1\n# recompute-scan\n", "# recompute-scan\na = " + "[" * 50_000]
)
def test_odd_project_files_are_no_bugs(text: str, inside: Path) -> None:
    (inside / "pyproject.toml").write_text(text)
    assert main(["lint", "."]) in (0, 2)


def test_what_is_not_ours_is_not_read(inside: Path) -> None:
    (inside / "pyproject.toml").write_text("= broken\n")
    assert main(["lint", "."]) == 0


def test_the_hook_runs_on_the_files_that_it_is_given(tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    command, *options = shlex.split(hook["entry"])
    assert command == "recompute-scan"
    (tmp_path / "train.py").write_text(DOUBLED)
    (tmp_path / "fsdp.yaml").write_text(PARTS["FSDP_ON"])
    files = [str(tmp_path / name) for name in ("train.py", "fsdp.yaml")]
    assert main([*options, *files]) == 1
    assert main([*options, files[1]]) == 0
