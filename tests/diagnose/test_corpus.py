"""Every known log gets its own diagnosis, and no other failure gets any."""

from pathlib import Path

import pytest

from recompute_scan.diagnose.outcome import HANGS, SIGNATURES
from recompute_scan.frameworks.detect import NAMES
from tests.diagnose.corpus import KNOWN, UNRELATED, answer, diagnosed, expected


@pytest.mark.parametrize("path", KNOWN, ids=lambda path: path.stem)
def test_a_known_failure_is_recognised(path: Path) -> None:
    assert answer(diagnosed(path)) == expected(path)


@pytest.mark.parametrize("path", UNRELATED, ids=lambda path: path.stem)
def test_another_failure_gets_no_diagnosis(path: Path) -> None:
    assert diagnosed(path).cause is None


def test_there_are_enough_of_both() -> None:
    assert len(UNRELATED) >= 50
    wanted = {f"{one.code}-{one.cause_name}" for one in (*SIGNATURES, *HANGS)}
    # Seen only while a run hangs: a log says nothing of it.
    assert wanted - {expected(path) for path in KNOWN} == {"RS211-waiting", "RS211-one-behind"}


def test_codes_and_names_go_together() -> None:
    pairs = {(one.code, one.name) for one in (*SIGNATURES, *HANGS)}
    assert dict(pairs) == NAMES
    assert len({name for _, name in pairs}) == len(pairs)
    causes = [(one.code, one.cause_name) for one in (*SIGNATURES, *HANGS)]
    assert len(set(causes)) == len(causes)


@pytest.mark.parametrize("one", [*SIGNATURES, *HANGS], ids=lambda one: one.cause_name)
def test_a_failure_tells_cause_fix_versions_and_sources(one: object) -> None:
    for name in ("title", "cause", "fix", "versions"):
        text = getattr(one, name)
        assert text, name
        assert text.endswith(".") or name == "title", (name, text)
    assert all(address.startswith("https://") for address in one.sources)  # type: ignore[attr-defined]
    assert bool(one.keep) == bool(one.remove)  # type: ignore[attr-defined]


def test_no_fix_tells_people_to_switch_a_wrapper_to_reentrant() -> None:
    """It leaves the check out and has given wrong gradients. Two fixes may name the variant, for
    faults where the tensors are right: ZeRO-3's placeholders and CUDA graphs.
    """
    naming = {
        (one.code, one.cause_name)
        for one in SIGNATURES
        if "reentrant variant for" in one.fix or "use_reentrant': True" in one.fix
    }
    assert naming == {("RS101", "zero3-frozen"), ("RS122", "deallocated")}
    cache = next(one for one in SIGNATURES if one.cause_name == "kv-cache")
    assert "use_cache=False" in cache.fix
    assert "wrong gradients" in cache.fix
    assert "recomputed twice" in cache.fix
