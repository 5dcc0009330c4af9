"""The logs: one for each known failure, and failures that are none of them."""

from pathlib import Path

from recompute_scan.diagnose.outcome import Findings, diagnose_log, lines_of, read_log

FOLDER = Path(__file__).with_name("corpus")
KNOWN = sorted((FOLDER / "known").glob("*.log"))
UNRELATED = sorted((FOLDER / "unrelated").glob("*.log"))


def diagnosed(path: Path) -> Findings:
    with path.open("rb") as file:
        return diagnose_log(read_log(lines_of(file)))


def answer(found: Findings) -> str | None:
    """Code and cause, such as ``RS101-kv-cache``; a hint counts where there is no cause."""
    diagnosis = found.cause or (found.hints[0] if found.hints and not found.first else None)
    if diagnosis is None:
        return None
    return f"{diagnosis.signature.code}-{diagnosis.signature.cause_name}"


def expected(path: Path) -> str:
    """What the name of a log says: code and cause; a further log of a cause adds ``+word``."""
    return path.stem.partition("+")[0]
