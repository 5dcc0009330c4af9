"""Record every case with its oracle, analyse the trace, and print truth beside answer.

    python benchmarks/accuracy.py                            on the CPU
    python benchmarks/accuracy.py --device cuda --attention flash efficient cudnn math

The truth is counted by the model itself while it trains (``tests/cases``); the analyser sees
nothing but the trace. With ``--keep FOLDER`` the traces and their truths stay there.
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

from tests.cases.case import record
from tests.cases.huggingface import HUGGING_FACE
from tests.cases.nesting import CASES
from tests.cases.truth import Truth

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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", nargs="*", choices=BACKENDS, default=["any"])
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    cases = CASES + HUGGING_FACE
    chosen = [case for case in cases if not options.names or case.name in options.names]
    right = total = 0
    print(f"torch {torch.__version__} on {_device_name(options.device)}")
    print(f"{'case':32} {'attention':10} {'truth':22} {'answer':22} ok")
    with _folder(options.keep) as folder:
        for attention in options.attention:
            for case in chosen:
                stem = case.name if attention == "any" else f"{case.name}.{attention}"
                trace = folder / f"{stem}.json.gz"
                backend = BACKENDS[attention]
                with sdpa_kernel(backend) if backend else contextlib.nullcontext():
                    truth = record(case, trace, options.device)
                result = analyse([trace])
                good = _agrees(truth, result)
                right, total = right + good, total + 1
                print(
                    f"{case.name:32} {attention:10} {_expected(truth):22} {_answer(result):22} "
                    f"{'yes' if good else 'NO'}",
                    flush=True,
                )
    print(f"{right} of {total} right")
    return 0 if right == total else 1


def _agrees(truth: Truth, result: Result) -> bool:
    highest = max(max(layer) for layer in truth.multiplicity())
    same_verdict = truth.verdict in (None, result.verdict)
    return same_verdict and result.recompute_per_backward == highest


def _expected(truth: Truth) -> str:
    highest = max(max(layer) for layer in truth.multiplicity())
    return f"{truth.verdict or 'open'} {highest:g}"


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
