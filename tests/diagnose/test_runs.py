"""Scripts that fail, run under the command: each gets its finding, and nothing else changes."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recompute_scan.result.run_record import read_run_info, run_info_name
from tests.diagnose.cases import CASES, FORMS, HUNG, REPAIRED, Case, Ended, run_case
from tests.present import present
from tests.record.runs import TORCHRUN, run_plain, write_script
from tests.result_schema import validate

BY_NAME = {case.script: case for case in CASES}

Ran = Callable[[str], Ended]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs a case, once for all tests that read what it left."""
    return functools.cache(
        lambda name: run_case(BY_NAME[name], tmp_path_factory.mktemp(Path(name).name))
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.script)
def test_a_failing_script_gets_its_finding(case: Case, ran: Ran) -> None:
    if case.missing is not None:
        pytest.skip(case.missing)
    ended = ran(case.script)
    assert (ended.code, ended.status) == (case.code, case.status), ended.stderr
    result = ended.result
    validate(json.loads((ended.folder / "result.json").read_text()))
    assert (ended.folder / "report.html").read_text().count("<h1") == 1
    assert case.code in ended.stdout
    if case.status == 0:
        assert result.crash is None
        return
    assert result.crash is not None
    assert len(result.crash.ranks) == case.ranks
    kind = "hung" if case.hangs else "exited" if case.script == "exit_after_error" else "raised"
    assert result.crash.kind == kind
    assert ended.stdout.count("Run: ") == 1
    assert "train.py:" in result.crash.headline


@pytest.mark.slow
@pytest.mark.parametrize("case", [*FORMS, *REPAIRED], ids=lambda case: f"{case.script}-{case.code}")
def test_other_forms_get_theirs_and_their_repaired_twins_get_none(
    case: Case, tmp_path: Path
) -> None:
    if case.missing is not None:
        pytest.skip(case.missing)
    ended = run_case(case, tmp_path)
    assert (ended.code or "", ended.status) == (case.code, case.status), ended.stderr
    if case.repaired:
        assert not [one for one in ended.result.findings if one.code.startswith(("RS1", "RS2"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kv_cache", "no_input_grad"])
def test_what_the_script_prints_and_its_status_are_pythons(name: str, ran: Ran) -> None:
    ended = ran(name)
    plain = run_plain(ended.folder.parent, "train.py")
    assert ended.status == plain.returncode == 1
    # Under the command the file is the absolute one in both.
    assert ended.stderr == plain.stderr


@pytest.mark.slow
def test_the_state_of_the_model_is_told(ran: Ran) -> None:
    ended = ran("kv_cache")
    crash = present(ended.result.crash)
    assert crash.phase == "while a checkpointed region was recomputed"
    (rank,) = crash.ranks
    (model, *_) = rank.models
    assert (model.name, model.use_cache, model.wrapped, model.switched) == (
        "Decoder",
        True,
        True,
        False,
    )
    assert model.checkpoints == ("2 x checkpoint wrapper around DecoderLayer, non-reentrant",)
    assert rank.regions == {"non-reentrant": 2}
    assert (rank.memory or {})["host_peak"] > 0
    assert present(rank.place).startswith("train.py:")
    (finding,) = ended.result.findings
    assert "use_cache=False" in present(finding.fix).summary
    assert "RS001" in present(finding.fix).summary
    page = (ended.folder / "report.html").read_text()
    assert "have different metadata than during the forward pass" in page


@pytest.mark.slow
def test_an_unknown_failure_is_reported_without_a_guess(tmp_path: Path) -> None:
    write_script(tmp_path, "def f():\n    return {}['x']\nf()\n", "odd.py")
    done = run_plain(tmp_path, "-m", "recompute_scan", "run", "-o", "out", "odd.py")
    assert done.returncode == 1
    assert "does not know this failure" in done.stdout
    assert "The script raised KeyError at odd.py:2." in done.stdout
    assert done.stderr.endswith("KeyError: 'x'\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp_weight", "save_hang"])
def test_under_somebody_elses_launcher_one_rank_reports(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    ended = run_case(case, tmp_path, *TORCHRUN)
    assert ended.status != 0
    assert ended.code == case.code, ended.stderr
    assert ended.stdout.count("Run: ") == 1


@pytest.mark.slow
def test_one_failing_rank_is_named_and_the_other_is_told_of(tmp_path: Path) -> None:
    """Rank 1 raises while rank 0 waits in a collective, where the launcher ends it."""
    text = (
        "import torch, torch.distributed as dist\nfrom torch import nn\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    x = torch.randn(2, 2, requires_grad=True)\n"
        "    loss = checkpoint(nn.Linear(2, 2), x, use_reentrant=True).sum()\n"
        "    torch.autograd.grad(loss, [x])\n"
        "dist.barrier()\n"
    )
    write_script(tmp_path, text)
    options = ["--nproc-per-node", "2", "-o", "out", "train.py"]
    done = run_plain(tmp_path, "-m", "recompute_scan", "run", *options)
    assert done.returncode == 1
    assert "Rank 1 raised RuntimeError at train.py:8" in done.stdout
    assert "RS106" in done.stdout
    assert "rank 0: " in done.stdout


@pytest.mark.slow
def test_a_save_that_hangs_names_both_places_and_keeps_what_was_recorded(ran: Ran) -> None:
    ended = ran("save_hang")
    assert ended.status == HUNG
    lines = (ended.folder.parent / "train.py").read_text().splitlines()
    place = {
        text: f"train.py:{number}"
        for number, text in enumerate(lines, 1)
        for text in [text.strip()]
    }
    result = ended.result
    (finding, *_) = result.findings
    saving, waiting = place["state = model.state_dict()"], place["dist.barrier()"]
    assert finding.evidence[0].startswith(f"rank 0: at {saving} (state = model.state_dict())")
    assert finding.evidence[1].startswith(f"rank 1: at {waiting} (dist.barrier())")
    assert "every rank" in present(finding.fix).summary
    for rank in (0, 1):
        account = read_run_info(ended.folder / run_info_name(rank))
        assert (account.status, account.exit_status) == ("failed", HUNG)
        assert (ended.folder / f"trace-rank{rank}.json.gz").exists()
        assert "train.py" in (ended.folder / f"where-rank{rank}.txt").read_text()
    assert [rank.trace for rank in result.ranks] == [f"trace-rank{n}.json.gz" for n in (0, 1)]
