"""Every tuned number of the analysis has a row that says what it decides."""

import re

from tests.tuned import ROOT, numbers

RESULTS = (ROOT / "benchmarks" / "results" / "constants.md").read_text(encoding="utf-8")


def test_every_number_has_a_row_with_its_value() -> None:
    rows, _, _ = RESULTS.partition("## With the rule off")
    told: dict[str, float] = {}
    for names, values in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", rows, re.M):
        module = ""
        for name, value in zip(re.findall(r"`([\w.]+)`", names), values.split(", "), strict=True):
            module, _, last = (name if "." in name else f"{module}.{name}").rpartition(".")
            told[f"{module}.{last}"] = float(value.replace(",", ""))
    found = {
        f"{module.removeprefix('recompute_scan.')}.{name}": float(value)
        for module, name, value in numbers()
    }
    assert found == told
