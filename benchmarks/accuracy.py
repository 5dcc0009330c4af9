"""Record every case with its oracle, analyse the trace, and print truth beside answer.

    python benchmarks/accuracy.py                            on the CPU
    python benchmarks/accuracy.py --device cuda --attention flash efficient cudnn math
    python benchmarks/accuracy.py --group distributed --ranks 2

The truth is counted by the model itself while it trains (``tests/cases``); the analyser sees
nothing but the trace. With ``--keep FOLDER`` the traces and their truths stay there.

Where a compiler hides what it recomputes, `inconclusive` for that reason is right as well, and
the table says so. With ``--ranks N`` the distributed cases run in N processes over gloo, and the
traces of all ranks have to give the truth.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from recompute_scan.pipeline import analyse
from recompute_scan.result import Result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.cases.architectures import ARCHITECTURES
from tests.cases.bystanders import BYSTANDERS
from tests.cases.case import Case, record
from tests.cases.compiled import COMPILED
from tests.cases.discarded import DISCARDED
from tests.cases.distributed import DISTRIBUTED, record_ranks
from tests.cases.hooks import HOOKS
from tests.cases.huggingface import HUGGING_FACE
from tests.cases.nesting import CASES
from tests.cases.places import PLACES
from tests.cases.schedules import SCHEDULES
from tests.cases.stacks import STACKS
from tests.cases.truth import Truth, write_truth

GROUPS: dict[str, tuple[Case, ...]] = {
    "core": CASES,
    "huggingface": HUGGING_FACE,
    "architectures": ARCHITECTURES,
    "bystanders": BYSTANDERS + HOOKS,
    "schedules": SCHEDULES,
    "places": PLACES + STACKS + DISCARDED,
    "distributed": DISTRIBUTED,
    "compiled": COMPILED,
}

# Open to the answer that the compiler hides it.
HIDDEN = frozenset(case.name for case in COMPILED if case.verdict is None)

BACKENDS = {
    "any": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def main() -> int:
    """Print the table; the status is 1 when an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE", help="cases; all by default")
    parser.add_argument("--group", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", nargs="*", choices=BACKENDS, default=["any"])
    parser.add_argument("--ranks", type=int, default=1, help="processes of distributed cases")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    chosen = [
        case
        for group in options.group
        for case in GROUPS[group]
        if not options.names or case.name in options.names
    ]
    right = total = 0
    print(f"torch {torch.__version__} on {_device_name(options.device)}")
    print(f"{'case':34} {'attention':10} {'truth':22} {'answer':22} ok")
    with _folder(options.keep) as folder:
        for attention in options.attention:
            for case in chosen:
                ranks = options.ranks if case in DISTRIBUTED else 1
                for trace, truth in _record(case, attention, folder, options.device, ranks):
                    result = analyse([trace])
                    good = _agrees(truth, result)
                    right, total = right + good, total + 1
                    print(
                        f"{_title(case, trace, ranks):34} {attention:10} {_expected(truth):22} "
                        f"{_answer(result):22} {'yes' if good else 'NO'}",
                        flush=True,
                    )
    print(f"{right} of {total} right")
    return 0 if right == total else 1


def _record(
    case: Case, attention: str, folder: Path, device: str, ranks: int
) -> list[tuple[Path, Truth]]:
    if ranks > 1:
        return record_ranks(case.name, folder, ranks)
    stem = case.name if attention == "any" else f"{case.name}.{attention}"
    trace = folder / f"{stem}.json.gz"
    backend = BACKENDS[attention]
    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        truth = record(case, trace, device)
    write_truth(folder / f"{stem}.truth.json", truth)
    return [(trace, truth)]


def _title(case: Case, trace: Path, ranks: int) -> str:
    return trace.name.removesuffix(".json.gz") if ranks > 1 else case.name


def _agrees(truth: Truth, result: Result) -> bool:
    if truth.name in HIDDEN and result.verdict == "inconclusive":
        return "compiled" in (result.reason or "")
    same_verdict = truth.verdict in (None, result.verdict)
    return same_verdict and result.recompute_per_backward == _highest(truth)


def _highest(truth: Truth) -> float:
    return max(max(layer) for layer in truth.multiplicity())


def _expected(truth: Truth) -> str:
    verdict = truth.verdict or ("compiled" if truth.name in HIDDEN else "open")
    return f"{verdict} {_highest(truth):g}"


def _answer(result: Result) -> str:
    runs = result.recompute_per_backward
    return f"{result.verdict} {'-' if runs is None else f'{runs:g}'}"


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
