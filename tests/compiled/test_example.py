"""The example that trains as torchtitan does, recorded on two processes: cold cache and warm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recompute_scan.analysis.pipeline import analyse

_EXAMPLE = Path(__file__).parents[2] / "examples" / "compiled_fsdp2.py"


def _line(text: str) -> str:
    """The number of the line of the example that has this text."""
    lines = _EXAMPLE.read_text().split("\n")
    (number,) = [at for at, line in enumerate(lines, 1) if text in line]
    return str(number)


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_once_and_twice_are_told_apart_cold_and_warm(tmp_path: Path, twice: bool) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    for state in ("cold", "warm"):
        out = tmp_path / state
        environment["TORCH_TRACE"] = str(tmp_path / f"logs-{state}")
        command = [sys.executable, "-m", "recompute_scan", "run", "--nproc-per-node", "2"]
        command += ["--steps", "2", "--timing-steps", "2", "--warmup", "2", "-o", str(out)]
        command += [str(_EXAMPLE), *(["--twice"] if twice else [])]
        subprocess.run(command, env=environment, capture_output=True, check=True)
        result = analyse([out])
        expected = ("doubled", 2.0) if twice else ("full", 1.0)
        assert (result.verdict, result.recompute_per_backward) == expected
        assert [one.verdict for one in result.ranks] == [expected[0]] * 2
        assert [one.recompute_runs_per_backward for one in result.regions] == [expected[1]] * 4
        inner, outer = _line("checkpoint_wrapper(layer)"), _line("checkpoint(layer, x")
        for region in result.regions:
            sites = [re.sub(r".*:", "", one.call_site or "") for one in region.checkpoints]
            assert sites == ([outer, inner] if twice else [inner])

        alone = analyse([tmp_path / f"logs-{state}"])
        assert (alone.verdict, alone.recompute_per_backward) == expected
        assert [one.verdict for one in alone.ranks] == [expected[0]] * 2
