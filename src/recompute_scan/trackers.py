"""Where the script keeps track of its trainings: what was found goes there too.

A tracker is used where the script has imported it and has a run or a writer open; none is imported
or opened here. No call moves a step counter of the script's. A failure
of one is logged, and does not reach the training.

Sources: the documentation of ``wandb.Run``, ``mlflow``, ``torch.utils.tensorboard`` and
``trackio``.
"""

from __future__ import annotations

import gc
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

_log = logging.getLogger("recompute_scan.trackers")
_PREFIX = "recompute_scan/"
_ARTIFACT = "recompute-scan"


class Note(Struct, frozen=True):
    """The values that a tracker gets.

    Attributes:
        step: The training's step that has ended, from 1.
        text: What was found, in a sentence or two.
        scalars: Numbers by name; unknown ones are left out.
        alert: The title of an alert; ``None`` for no alert.
        verdict: That of a scan; ``None`` where there was none.
        files: What is kept with the run, by file name.
        artifact: The name that the files are kept under.
    """

    step: int
    text: str
    scalars: Mapping[str, float]
    alert: str | None = None
    verdict: str | None = None
    files: Mapping[str, bytes] = {}
    artifact: str = _ARTIFACT


def in_use() -> tuple[str, ...]:
    """The names of the trackers that have something open in this process."""
    return tuple(name for name, find, _ in _TRACKERS if _found(name, find))


def tell(note: Note) -> tuple[str, ...]:
    """Send it to every tracker in use; the names of the trackers that took all. Raises nothing."""
    told: list[str] = []
    try:
        in_turn = [(name, one, how) for name, find, how in _TRACKERS for one in _found(name, find)]
        if in_turn:
            scalars = {_PREFIX + key: float(value) for key, value in note.scalars.items()}
            with tempfile.TemporaryDirectory(prefix=_ARTIFACT) as folder:
                files = [Path(folder, file) for file in note.files]
                for file in files:
                    file.write_bytes(note.files[file.name])
                for name, one, how in in_turn:
                    try:
                        how(one, note, scalars, files)
                    except Exception:  # the training goes on whatever a tracker does
                        _log.warning("%s could not be updated", name, exc_info=True)
                    else:
                        told.append(name)
    except Exception:  # no room, no memory
        _log.exception("Trackers could not be updated")
    return tuple(dict.fromkeys(told))


def _found(name: str, find: Callable[[], list[Any]]) -> list[Any]:
    try:
        return [one for one in find() if one is not None]
    except Exception:  # another module of that name, say
        _log.warning("Whether %s is in use is not known", name, exc_info=True)
        return []


def _open_wandb() -> list[Any]:
    return [getattr(sys.modules.get("wandb"), "run", None)]


def _tell_wandb(run: Any, note: Note, scalars: dict[str, float], files: list[Path]) -> None:
    # With commit, the row would end here, and what the script logs for this step be refused.
    run.log(dict(scalars), commit=False)
    for key, value in scalars.items():
        run.summary[key] = value
    if note.verdict is not None:
        run.summary[_PREFIX + "verdict"] = note.verdict
    if note.alert is not None:
        run.alert(title=note.alert, text=note.text, level="WARN")
    if files:
        run.log_artifact(_artifact(sys.modules["wandb"], note, files))


def _artifact(tracker: Any, note: Note, files: list[Path]) -> Any:
    artifact = tracker.Artifact(note.artifact, type="report")
    for file in files:
        artifact.add_file(str(file))
    return artifact


def _open_mlflow() -> list[Any]:
    active = getattr(sys.modules.get("mlflow"), "active_run", None)
    return [] if active is None else [active()]


def _tell_mlflow(run: Any, note: Note, scalars: dict[str, float], files: list[Path]) -> None:
    mlflow: Any = sys.modules["mlflow"]
    mlflow.log_metrics(scalars, step=note.step)
    if note.verdict is not None:
        mlflow.set_tag("recompute_scan.verdict", note.verdict)
    if note.alert is not None:  # it has no alerts: a tag is what its search finds
        mlflow.set_tag("recompute_scan.alert", f"{note.alert}: {note.text}")
    for file in files:
        mlflow.log_artifact(str(file), note.artifact)


def _open_tensorboard() -> list[Any]:
    modules = (
        sys.modules.get(f"{name}.writer") for name in ("torch.utils.tensorboard", "tensorboardX")
    )
    kinds = tuple(filter(None, (getattr(one, "SummaryWriter", None) for one in modules)))
    if not kinds:
        return []
    # No list of writers is kept anywhere. `type`, for proxies that answer isinstance by running
    # their code. A writer that was closed would open another file.
    found = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    return [one for one in found if getattr(one, "all_writers", None)]


def _tell_tensorboard(
    writer: Any, note: Note, scalars: dict[str, float], files: list[Path]
) -> None:
    for key, value in scalars.items():
        writer.add_scalar(key, value, note.step)
    if note.verdict is not None:
        writer.add_text(_PREFIX + "verdict", note.verdict, note.step)
    if note.alert is not None:
        writer.add_text(_PREFIX + "alert", f"{note.alert}: {note.text}", note.step)
    folder = Path(str(writer.log_dir), note.artifact)
    if files and folder.parent.is_dir():  # it has no artifacts, and may write to a bucket
        folder.mkdir(exist_ok=True)
        for file in files:
            (folder / file.name).write_bytes(file.read_bytes())
    writer.flush()


def _open_trackio() -> list[Any]:
    current = getattr(sys.modules.get("trackio.context_vars"), "current_run", None)
    return [] if current is None else [current.get()]


def _tell_trackio(run: Any, note: Note, scalars: dict[str, float], files: list[Path]) -> None:
    trackio: Any = sys.modules["trackio"]
    # Without a step it would count one more, and the script's next steps be off by one.
    last = getattr(run, "_next_step", note.step + 1) - 1
    verdict = {} if note.verdict is None else {_PREFIX + "verdict": note.verdict}
    trackio.log({**scalars, **verdict}, step=max(last, 0))
    if note.alert is not None:
        trackio.alert(note.alert, note.text)
    if files:
        trackio.log_artifact(_artifact(trackio, note, files))


_Tell = Callable[[Any, Note, dict[str, float], list[Path]], None]
_TRACKERS: tuple[tuple[str, Callable[[], list[Any]], _Tell], ...] = (
    ("wandb", _open_wandb, _tell_wandb),
    ("mlflow", _open_mlflow, _tell_mlflow),
    ("tensorboard", _open_tensorboard, _tell_tensorboard),
    ("trackio", _open_trackio, _tell_trackio),
)
