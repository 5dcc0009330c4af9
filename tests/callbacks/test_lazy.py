"""No framework is imported before its class is asked for."""

import subprocess
import sys

import pytest

import recompute_scan.integrations


def test_importing_the_callbacks_imports_no_framework() -> None:
    code = "import sys, recompute_scan.integrations; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "transformers", "lightning", "pytorch_lightning", "accelerate"}
    assert not heavy & set(done.stdout.split())


def test_what_is_offered_is_there() -> None:
    for name in recompute_scan.integrations.__all__:
        assert getattr(recompute_scan.integrations, name).__name__ == name
    with pytest.raises(AttributeError):
        recompute_scan.integrations.NoSuchCallback  # noqa: B018
