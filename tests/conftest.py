"""What a test run shares: recorded cases, and which slow tests ``make test`` runs too."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from tests.cases.recorded import SHARED

# One slow test of each kind; ``make test`` runs these, ``make test-all`` every one.
SAMPLE = frozenset(
    {
        "tests/check/test_pytest_plugin.py::test_in_a_project_of_its_own",
        "tests/cost/test_repaired.py::test_the_redundant_removed_is_the_repaired_script",
        "tests/diagnose/test_runs.py::test_a_save_that_hangs_names_both_places_and_keeps_what_was_recorded",
    }
)


def pytest_configure(config: pytest.Config) -> None:
    if SHARED not in os.environ:
        os.environ[SHARED] = tempfile.mkdtemp(prefix="recompute-scan-cases-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(SHARED)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in SAMPLE:
            item.add_marker("sample")
    if config.args == config.getini("testpaths"):
        missing = SAMPLE - {item.nodeid for item in items}
        assert not missing, f"no such test: {sorted(missing)}"
