"""What a test run shares: recorded cases, and which slow tests ``make test`` runs too."""

import gc
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import SHARED

# Of the slow tests one or two of each kind, by file; ``make test-all`` runs every one.
SAMPLE = {
    "check/test_pytest_plugin.py": ["test_in_a_project_of_its_own"],
    "cost/test_repaired.py": ["test_the_redundant_removed_is_the_repaired_script"],
    "diagnose/test_runs.py": [
        "test_a_failing_script_gets_its_finding[kv_cache]",
        "test_one_failing_rank_is_named_and_the_other_is_told_of",
        "test_what_the_script_prints_and_its_status_are_pythons[kv_cache]",
    ],
    "findings/test_recompute_rules.py": ["test_real_scripts[idle]"],
    "record/test_applied.py": [
        "test_the_diff_changes_the_verdict_and_not_the_losses[plain_pytorch.py-args1]"
    ],
    "record/test_children.py": ["test_each_rank_is_seen_and_one_reports[fork]"],
    "record/test_in_the_wild.py": ["test_a_package_with_all_that_scripts_do"],
    "record/test_own_functions.py": ["test_the_line_that_applies_it[GradCkpt-NAME.apply]"],
    "record/test_phases.py": [
        "test_the_phases_in_order_and_an_orderly_end",
        "test_an_interrupt_keeps_its_trace",
    ],
    "record/test_probe.py": [
        "test_removing_the_probe_restores_torch",
    ],
    "record/test_sites.py": ["test_every_way_of_torchs_own"],
    "record/test_verify.py": ["test_wrong_use[options0-environment0-E220]"],
    "recompute/test_marked_cases.py": [
        f"test_marks_and_operators_agree[{name}]"
        for name in (
            "n_inside",
            "llama_own_n_in_wrapper_n",
            "reference_none",
            "alternating_variants",
            "fsdp2_mixed",
        )
    ],
    "test_early_variables.py": ["test_the_number_of_threads_is_the_scripts"],
    "test_stacks.py": ["test_a_doubled_model_names_both[few frames]"],
    "trust/test_secrets_of_run.py": ["test_arguments_and_environment_are_not_kept"],
}


def pytest_configure(config: pytest.Config) -> None:
    # At Python's own pace, a sixth of the time and more goes to looking for garbage among the
    # objects of torch and of all that is imported.
    gc.set_threshold(50_000, 10, 10)
    if SHARED not in os.environ:
        os.environ[SHARED] = tempfile.mkdtemp(prefix="recompute-scan-cases-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(SHARED)))


@pytest.fixture(autouse=True, scope="module")
def _heap_of_its_own() -> Iterator[None]:
    """What earlier modules left is not collected again and again: it was most of some tests' time.

    A recording collects garbage as it ends, and a process of many tests holds millions of objects.
    Nor is a process group left that a case made: its rank would be that of every later test, and
    torch's excepthook puts it before each line.
    """
    hook = sys.excepthook
    yield
    sys.excepthook = hook
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = {f"tests/{file}::{name}" for file, names in SAMPLE.items() for name in names}
    found = [item for item in items if item.nodeid in wanted]
    for item in found:
        item.add_marker("sample")
    whole = {f"tests/{file}" for file in SAMPLE} <= {item.nodeid.split("::")[0] for item in items}
    if whole and len(found) < len(wanted):
        missing = sorted(wanted - {item.nodeid for item in found})
        raise pytest.UsageError(f"SAMPLE in tests/conftest.py: no such test: {missing}")
    # Files that train in processes of their own come first: at the end, no worker is left alone
    # with one of them. So do those that look through all modules and classes, while there are few.
    first = {item.path for item in found}
    first |= {item.path for item in items if hasattr(getattr(item, "module", None), "left_behind")}
    items.sort(key=lambda item: item.path not in first)


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the test alone, in which it is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def alone_again() -> Iterator[None]:
    yield  # and no process group is left
    importlib.import_module("tests.cases.distributed").leave_group()
