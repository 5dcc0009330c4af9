"""``python -m tests.cases FOLDER [NAME…]``: record the cases, all or those named."""

from __future__ import annotations

import argparse
from pathlib import Path

from .case import record_all
from .nesting import CASES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cases", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases to record; all by default")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if unknown := set(args.names) - {case.name for case in CASES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    chosen = [case for case in CASES if not args.names or case.name in args.names]
    args.folder.mkdir(parents=True, exist_ok=True)
    for truth in record_all(chosen, args.folder, args.device):
        runs = " ".join(f"{attention:g}/{mlp:g}" for attention, mlp in truth.multiplicity())
        print(f"{truth.name:30} {truth.verdict or 'open':8} {runs}  {dict(truth.kept) or ''}")


if __name__ == "__main__":
    main()
