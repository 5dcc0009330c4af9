"""The real trackers, offline: what they have kept is read back. ``make trackers`` installs them."""

import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import recompute_scan
from tests.trackers.training import GUARDED, INJECTED, STEPS, followed, guarded

# What the libraries warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

RECOMPUTES = "recompute_scan/recompute_per_backward"
PER_FORWARD = "recompute_scan/recomputes_per_forward"
DOUBLED = "Activation checkpointing is doubled"
CHANGED = "Recomputes have changed: doubled"
GUARDS = "recompute-scan-guard"


def tells(page: Path, change: Any) -> None:
    """The guard's page, of which the script of a browser would run nothing."""
    text = page.read_text(encoding="utf-8")
    assert change.text in unescape(text)
    assert "<script" not in text


def are_kept(artifact: Path) -> None:
    """The page, and what `check`, its baseline and `bundle` work on as on any other run."""
    assert "<html" in (artifact / "report.html").read_text(encoding="utf-8")
    tool = [sys.executable, "-m", "recompute_scan"]
    baseline, again = artifact.parent / "baseline.json", artifact.parent / "again.zip"
    for kept in (artifact, artifact / "result.json", artifact / "bundle.zip"):
        done = subprocess.run([*tool, "check", str(kept)], capture_output=True, check=False)
        assert done.returncode == 1, done.stderr
    whole = str(artifact)
    subprocess.run([*tool, "check", whole, "--write-baseline", str(baseline)], check=True)
    subprocess.run([*tool, "check", whole, "--baseline", str(baseline)], check=True)
    subprocess.run([*tool, "bundle", whole, "-o", str(again)], check=True)
    assert recompute_scan.analyze(again).verdict == "doubled"


def wandb_records(folder: Path) -> list[Any]:
    """The records of an offline run, once that of its end is among them.

    W&B's own process writes them, in blocks of 32 KiB, and the last one when it closes the run.
    `finish` only asks it to (`inform_finish` has no answer), so that right behind it a small run's
    file may have nothing but its first seven bytes.
    """
    until = time.monotonic() + 60
    while True:
        found = wandb_records_so_far(folder)
        ended = any(record.WhichOneof("record_type") == "exit" for record in found)
        if ended or time.monotonic() > until:
            assert ended, f"{len(found)} records, and none of the run's end"
            return found
        time.sleep(0.05)


def wandb_records_so_far(folder: Path) -> list[Any]:
    """The whole records in the file: a LevelDB log of protobuf messages behind seven bytes."""
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, parts, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # being written
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = internal.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def wandb_history(records: list[Any]) -> Iterator[dict[str, str]]:
    for record in records:
        if record.WhichOneof("record_type") == "history":
            yield {
                one.key or "/".join(one.nested_key): one.value_json for one in record.history.item
            }


def wandb_artifact(records: list[Any]) -> Any:
    (artifact,) = [
        record.artifact for record in records if record.WhichOneof("record_type") == "artifact"
    ] or [
        record.request.log_artifact.artifact
        for record in records
        if record.request.WhichOneof("request_type") == "log_artifact"
    ]
    return artifact


def wandb_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(folder / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(folder / "cache"))
    return wandb.init(project="tried", dir=str(folder))


def test_wandb_is_told_of_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = wandb_run(tmp_path, monkeypatch)
    _, counted = followed(lambda step, loss: run.log({"loss": loss}, step=step))
    run.finish()
    records = wandb_records(tmp_path)
    rows = list(wandb_history(records))
    # None of the script's own steps is lost to ours.
    assert [int(row["_step"]) for row in rows if "loss" in row] == list(range(STEPS))
    assert [float(row[RECOMPUTES]) for row in rows if RECOMPUTES in row] == [counted] == [2.0]
    alerts = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    assert [alert.title for alert in alerts] == [DOUBLED]
    summary = {
        one.key or "/".join(one.nested_key): one.value_json
        for record in records
        if record.WhichOneof("record_type") == "summary"
        for one in record.summary.update
    }
    assert summary["recompute_scan/verdict"] == '"doubled"'
    artifact = wandb_artifact(records)
    assert artifact.name == "recompute-scan"
    folder = tmp_path / "artifacts" / "recompute-scan:v0"  # as `artifact.download()` names it
    folder.mkdir(parents=True)
    for entry in artifact.manifest.contents:
        shutil.copyfile(entry.local_path, folder / entry.path)
    are_kept(folder)


def test_wandb_is_told_by_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = wandb_run(tmp_path, monkeypatch)
    (change,) = guarded(lambda step, loss: run.log({"loss": loss}, step=step))
    run.finish()
    assert change.step == INJECTED
    records = wandb_records(tmp_path)
    rows = list(wandb_history(records))
    assert [int(row["_step"]) for row in rows if "loss" in row] == list(range(1, GUARDED + 1))
    assert [float(row[PER_FORWARD]) for row in rows if PER_FORWARD in row] == [change.after]
    (alert,) = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    assert (alert.title, alert.text) == (CHANGED, change.text)
    artifact = wandb_artifact(records)
    assert artifact.name == GUARDS
    (entry,) = artifact.manifest.contents
    assert entry.path == "guard.html"
    tells(Path(entry.local_path), change)


def mlflow_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((folder / "mlruns").as_uri())
    return mlflow


def test_mlflow_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = mlflow_at(tmp_path, monkeypatch)
    with mlflow.start_run() as run:
        _, counted = followed(lambda step, loss: mlflow.log_metric("loss", loss, step=step))
        (change,) = guarded(lambda step, loss: None)
    client = mlflow.MlflowClient()
    kept = client.get_run(run.info.run_id).data
    assert kept.metrics[RECOMPUTES] == counted == 2.0
    assert kept.metrics[PER_FORWARD] == change.after
    assert kept.tags["recompute_scan.verdict"] == "doubled"
    assert kept.tags["recompute_scan.alert"] == f"{CHANGED}: {change.text}"
    assert len(client.get_metric_history(run.info.run_id, "loss")) == STEPS
    folder = Path(client.download_artifacts(run.info.run_id, "recompute-scan"))
    are_kept(folder)
    tells(Path(client.download_artifacts(run.info.run_id, GUARDS)) / "guard.html", change)


def test_mlflow_without_a_run_begins_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = mlflow_at(tmp_path, monkeypatch)
    followed(lambda step, loss: None)
    assert mlflow.active_run() is None
    assert not list((tmp_path / "mlruns").glob("*/*/meta.yaml"))


def test_tensorboard_is_told(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    closed = tensorboard.SummaryWriter(str(tmp_path / "closed"))
    closed.close()
    before = sorted((tmp_path / "closed").iterdir())
    writer = tensorboard.SummaryWriter(str(tmp_path / "open"))
    _, counted = followed(lambda step, loss: writer.add_scalar("loss", loss, step))
    (change,) = guarded(lambda step, loss: None)
    writer.close()
    assert sorted((tmp_path / "closed").iterdir()) == before
    kept = accumulators.EventAccumulator(str(tmp_path / "open")).Reload()
    assert [one.value for one in kept.Scalars(RECOMPUTES)] == [counted] == [2.0]
    assert [(one.step, one.value) for one in kept.Scalars(PER_FORWARD)] == [
        (change.told, change.after)
    ]
    assert [one.step for one in kept.Scalars("loss")] == list(range(STEPS))
    said = [
        one.tensor_proto.string_val[0].decode()
        for name in ("verdict", "alert")
        for one in kept.Tensors(f"recompute_scan/{name}/text_summary")
    ]
    assert said[0] == "doubled"
    assert said[1].startswith(DOUBLED)
    assert said[2] == f"{CHANGED}: {change.text}"
    folder = tmp_path / "open" / "recompute-scan"
    are_kept(folder)
    tells(folder.with_name(GUARDS) / "guard.html", change)


def test_trackio_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    run = trackio.init(project=f"tried-{tmp_path.name}", embed=False)
    _, counted = followed(lambda step, loss: trackio.log({"loss": loss}))
    (change,) = guarded(lambda step, loss: None)
    trackio.finish()
    logs = storage.get_logs(run.project, run.name)
    # The script counts no steps of its own here: ours must not move trackio's count.
    assert [row["step"] for row in logs if "loss" in row] == list(range(STEPS))
    assert [row[RECOMPUTES] for row in logs if RECOMPUTES in row] == [counted] == [2.0]
    assert [row[PER_FORWARD] for row in logs if PER_FORWARD in row] == [change.after]
    assert [row["recompute_scan/verdict"] for row in logs if RECOMPUTES in row] == ["doubled"]
    alerts = storage.get_alerts(run.project, run.name)
    assert {one["title"] for one in alerts} == {DOUBLED, CHANGED}
    assert change.text in [one["text"] for one in alerts]
    artifacts = storage.get_run_artifacts(run.project, run.name, run.id)["output"]
    assert len(artifacts) == 2
    assert GUARDS in str(artifacts)
    kept = sorted((tmp_path / "artifacts").rglob("*"), key=lambda file: file.name)
    texts = [file.read_text(errors="replace") for file in kept if file.is_file()]
    assert sum(text.startswith("PK") for text in texts) == 1
    assert sum("<html" in text for text in texts) == 2
    assert sum(change.text in unescape(text) for text in texts) == 1
    assert sum(text.startswith("{") and '"recompute-scan/1"' in text for text in texts) == 1
