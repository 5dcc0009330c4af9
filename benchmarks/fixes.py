"""Each doubled case as a script: the diff that `run` offers is applied, and the script run again.

A case is trained under `run` from a copy of its sources. Where `fix.patch` was written, `fix
--apply` changes the copy. Then the model counts the runs of its parts in a plain training, which
must be one recompute for each backward pass at most, and `run` must say so too. A fix may leave a
checkpoint only where it names it.

  python -m benchmarks fixes                   every group that a CPU can record
  python -m benchmarks fixes --group core      some

The status is 1 where a diff could not be applied, or did not mend its case.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cases.groups import GROUPS, chosen

from benchmarks._frame import ROOT, TOOL, Table, benchmark, fresh, kept_in, some, words

_RUN = (*TOOL, "run", "--quick", "--quiet")
_SCRIPT = '''\
"""One case of the project's own, trained for some steps."""

import torch
from tests.cases.groups import chosen, GROUPS
from tests.cases.model import Oracle

(case,) = chosen(GROUPS, ["{name}"])
torch.manual_seed(0)
step = case.build(Oracle(), torch.device("cpu"))
for _ in range(16):
    step()
'''
_COUNT = """\
from pathlib import Path
from tests.cases.case import record
from tests.cases.groups import chosen, GROUPS, highest

(case,) = chosen(GROUPS, ["{name}"])
print(highest(record(case, Path("counted.json"))))
"""


@benchmark
@words("names")
@some("--group", GROUPS, text="Groups of cases.")
def main(names: Sequence[str], group: Sequence[str]) -> int:
    table = Table("case <34 | before <16 | diff <9 | counted after >13.2f | after <16")
    failed = offered = left = 0
    for case in chosen(group, names):
        if case.verdict != "doubled":
            continue
        with kept_in(None) as folder:
            shutil.copytree(ROOT / "tests" / "cases", folder / "tests" / "cases")
            (folder / "tests" / "__init__.py").touch()
            (folder / "train.py").write_text(_SCRIPT.format(name=case.name), encoding="utf-8")
            before = _answer(folder, "before")
            diff = folder / "before" / "fix.patch"
            if not diff.exists():
                table.row(case.name, before, "none", None, "")
                continue
            offered += 1
            done = fresh((*TOOL, "fix", "--apply", "--yes", folder / "before"), folder=folder)
            how = "applied" if done.status == 0 else f"status {done.status}"
            count = (sys.executable, "-c", _COUNT.format(name=case.name))
            counted = fresh(count, folder=folder, variables=_here(folder))
            runs = float(counted.output.splitlines()[-1]) if counted.status == 0 else None
            after = _answer(folder, "after")
            mended = runs is not None and runs <= 1 and not after.startswith("doubled")
            named = " as well." in (folder / "before" / "result.json").read_text("utf-8")
            left += named and not mended
            failed += done.status != 0 or not (
                mended or (named and runs and runs < float(before.split()[1]))
            )
            table.row(case.name, before, how, runs, after, note=" names the rest" * named)
    print(f"{offered} with a diff: {left} name what it leaves, {failed} not mended by it")
    return int(failed > 0)


def _here(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}:{ROOT / 'src'}"}


def _answer(folder: Path, output: str) -> str:
    ran = fresh((*_RUN, "-o", output, "train.py"), folder=folder, variables=_here(folder))
    found = folder / output / "result.json"
    if not found.exists():
        return f"status {ran.status}"
    result = json.loads(found.read_text(encoding="utf-8"))
    return f"{result['verdict']} {result['recompute_per_backward'] or 0:g}"
