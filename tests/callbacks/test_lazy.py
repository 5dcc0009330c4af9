"""Each class needs its own framework, and no other."""

import subprocess
import sys

import pytest

import recompute_scan.integrations

FRAMEWORKS = {"accelerate", "lightning", "pytorch_lightning", "transformers"}
# The Trainer of transformers trains by Accelerate; Lightning's metrics use transformers where it is
# installed.
NEEDED = {
    "RecomputeScanCallback": {"transformers", "accelerate"},
    "RecomputeScanLightningCallback": {"lightning", "pytorch_lightning", "transformers"},
    "RecomputeScanTracker": {"accelerate"},
}
# A package that is not installed looks like one that is None in sys.modules.
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))
from recompute_scan import integrations
print(getattr(integrations, sys.argv[1]).__name__)
"""


def test_what_is_offered_is_there() -> None:
    assert set(NEEDED) == set(recompute_scan.integrations.__all__)
    with pytest.raises(AttributeError):
        recompute_scan.integrations.NoSuchCallback  # noqa: B018


@pytest.mark.parametrize("name", NEEDED)
def test_a_class_needs_no_other_framework(name: str) -> None:
    command = [sys.executable, "-c", PROGRAM, name, *sorted(FRAMEWORKS - NEEDED[name])]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"{name}\n"), ran.stderr
