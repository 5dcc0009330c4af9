"""``action.yml``, run as GitHub's runner runs it: its steps' scripts, in bash, with its inputs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
DOUBLED = str(ROOT / "traces" / "doubled_llama_fsdp")
REPAIRED = str(ROOT / "traces" / "repaired_llama_fsdp")
_INPUT = re.compile(r"\$\{\{ inputs\.([\w-]+) \}\}")


def run(
    folder: Path, runner: dict[str, str | None] | None = None, /, **given: str
) -> tuple[int, str, dict[str, str]]:
    """Exit status, output and the step's own outputs of the action with these inputs.

    ``runner`` has variables that another runner sets in another way, or not at all.
    """
    inputs = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
    inputs |= {name.replace("_", "-"): value for name, value in given.items()}
    missing = [n for n, one in ACTION["inputs"].items() if one.get("required") and not inputs[n]]
    assert not missing
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    command = programs / "recompute-scan"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m recompute_scan "$@"\n')
    command.chmod(0o755)
    outputs = folder / "outputs"
    outputs.touch()
    printed = ""
    status = 0
    for step in ACTION["runs"]["steps"]:
        if step.get("if") == "inputs.package != ''" and not inputs["package"]:
            continue
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]  # what stands there would be run
        env = {name: _INPUT.sub(lambda m: inputs[m[1]], v) for name, v in step["env"].items()}
        bash = shutil.which("bash")
        assert bash
        environment = {
            **os.environ,
            **env,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_OUTPUT": str(outputs),
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
            **(runner or {}),
        }
        done = subprocess.run(
            # As the runner does: https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-syntax
            [bash, "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder,
            env={name: text for name, text in environment.items() if text is not None},
            capture_output=True,
            text=True,
            timeout=120,
        )
        printed += done.stdout + done.stderr
        status = done.returncode
        if status:
            break
    told = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
    return status, printed, told


def errors_in(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("::error")]


def test_a_doubled_trace_fails_with_one_annotation(tmp_path: Path) -> None:
    status, printed, told = run(tmp_path, traces=DOUBLED, package="", sarif="out.sarif")
    assert status == 1
    assert told == {"outcome": "refused"}
    (line,) = errors_in(printed)
    assert line.startswith("::error file=examples/doubled_llama_fsdp.py,line=95,")
    assert (tmp_path / "out.sarif").exists()


def test_the_repaired_trace_passes(tmp_path: Path) -> None:
    status, printed, told = run(tmp_path, traces=REPAIRED, package="")
    assert (status, told) == (0, {"outcome": "passed"})
    assert errors_in(printed) == []


def test_thresholds_reach_the_command(tmp_path: Path) -> None:
    inputs = {"max_cost": "20\nRS001=30\n", "max_recompute": "2", "fail_on": "doubled"}
    status, _, told = run(tmp_path, traces=f"{DOUBLED}\n", package="", **inputs)
    assert (status, told["outcome"]) == (0, "passed")


@pytest.mark.parametrize("name", ["traces", "fail-on", "max-cost", "baseline", "sarif"])
def test_inputs_are_never_run(name: str, tmp_path: Path) -> None:
    attack = f'$(touch {tmp_path}/owned); `touch {tmp_path}/owned` "; touch {tmp_path}/owned #'
    inputs = {"traces": DOUBLED, "package": "", name.replace("-", "_"): attack}
    run(tmp_path, **inputs)
    assert not (tmp_path / "owned").exists()


def test_the_summary_has_the_report_and_the_comparison(tmp_path: Path) -> None:
    status, _, told = run(tmp_path, traces=REPAIRED, base=DOUBLED, package="")
    assert (status, told) == (0, {"outcome": "passed"})
    report, _, compared = (
        (tmp_path / "summary.md")
        .read_text(encoding="utf-8")
        .partition("\n### Compared with the base\n\n")
    )
    assert "| " in report
    assert "once" in report
    # GitHub draws it: https://docs.github.com/en/get-started/writing-on-github/working-with-advanced-formatting/creating-diagrams
    assert report.count("```mermaid\npie title One step takes ") == 1
    lines = compared.splitlines()
    assert any("doubled" in line for line in lines)
    assert all(line.startswith("    ") for line in lines)


def test_a_base_that_is_missing_changes_no_outcome(tmp_path: Path) -> None:
    status, printed, told = run(tmp_path, traces=REPAIRED, base="nowhere", package="")
    assert (status, told) == (0, {"outcome": "passed"})
    assert "nowhere" in printed


def test_the_action_installs_its_own_checkout(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    python = programs / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    _, printed, _ = run(tmp_path, traces=REPAIRED)
    assert f"-m pip install --quiet {ROOT}\n" in printed


RUNNERS: list[dict[str, str | None]] = [
    {"GITHUB_STEP_SUMMARY": None, "GITHUB_OUTPUT": None},
    *({"GITHUB_STEP_SUMMARY": name} for name in ("/nowhere/summary.md", None, "", "/", "-n")),
]


# A trace that passes shows of the others what one that is refused shows of them.
@pytest.mark.parametrize(
    ("trace", "runner"),
    [
        *((DOUBLED, runner) for runner in RUNNERS),
        *((REPAIRED, runner) for runner in RUNNERS[:2]),
        *(pytest.param(REPAIRED, runner, marks=pytest.mark.slow) for runner in RUNNERS[2:]),
    ],
    ids=lambda value: Path(value).name if isinstance(value, str) else str(value),
)
def test_a_runner_without_a_summary_changes_no_outcome(
    runner: dict[str, str | None], trace: str, tmp_path: Path
) -> None:
    status, printed, told = run(tmp_path, runner, traces=trace, package="")
    refused = trace == DOUBLED
    assert status == int(refused), printed
    if "GITHUB_OUTPUT" not in runner:
        assert told == {"outcome": "refused" if refused else "passed"}
