"""No framework is imported before its class is asked for."""

import pytest

import recompute_scan.integrations


def test_what_is_offered_is_there() -> None:
    for name in recompute_scan.integrations.__all__:
        assert getattr(recompute_scan.integrations, name).__name__ == name
    with pytest.raises(AttributeError):
        recompute_scan.integrations.NoSuchCallback  # noqa: B018
