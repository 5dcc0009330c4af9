"""Numbers as a person reads them."""

import math

import pytest

from recompute_scan.units import UNKNOWN, about, ms, span


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0.0 ms"),
        (0.0123, "0.012 ms"),
        (5.587, "5.59 ms"),
        (136.04, "136.0 ms"),
        (999.94, "999.9 ms"),
        (999.96, "1.00 s"),
        (2345.6, "2.35 s"),
        (248_880.0, "249 s"),
        (-1500.0, "-1.50 s"),
        (None, UNKNOWN),
        (math.nan, UNKNOWN),
    ],
)
def test_times_are_in_seconds_from_one_on(value: float | None, said: str) -> None:
    assert ms(value) == said


def test_a_span_has_its_unit_once_where_both_ends_have_the_same() -> None:
    assert span(71.1, 363.44) == "71.1 to 363.4 ms"
    assert span(950.0, 1020.0) == "950.0 ms to 1.02 s"
    assert span(1.0, 2.0, "and") == "1.00 and 2.00 ms"
    assert span(None, 2.0) == UNKNOWN


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.186, "about a fifth"),
        (0.21, "about a fifth"),
        (0.24, "about a quarter"),
        (0.33, "about a third"),
        (0.5, "about half"),
        (0.04, "about a twentieth"),
        (0.01, "a small part"),
    ],
)
def test_a_share_without_digits(value: float, said: str) -> None:
    assert about(value) == said
