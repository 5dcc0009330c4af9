"""A model whose own switch puts two checkpoints around one layer, counted by hooks."""

import pytest

from tests.cases.by_themselves import swin, tried


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_swin_doubles_by_itself() -> None:
    counted, verdict, often = tried(swin)
    assert counted == {2.0: 1, 3.0: 9}
    assert (verdict, often) == ("doubled", 2.0)
