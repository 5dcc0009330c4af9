"""Copies between host and device in every rendering, and what is tried against them."""

from __future__ import annotations

import pytest
from msgspec import structs

from recompute_scan.errors import InputError
from recompute_scan.report.html import render_html
from recompute_scan.report.text import render_markdown, render_text
from recompute_scan.result import HostCopies, HostCopy, Result, from_json, to_json
from tests.report.sample_results import doubled

GIB = 1024.0**3
OUT = HostCopy("to-host", "pinned", "forward", 32, 3 * GIB, 120.0, 10.0, own_stream=True)
BACK = HostCopy("to-device", "pinned", "backward", 32, 3 * GIB, 115.0, 15.0, own_stream=True)
BATCH = HostCopy("to-device", "pageable", "rest", 1.5, None, 0.5, 0.5, own_stream=False)
OFFLOADED = HostCopies(3, (OUT, BACK, BATCH), 25.5, 4.2, "seen", 3 * GIB)
TITLE = "Copies between host and device"


def shown(copies: HostCopies | None) -> Result:
    return structs.replace(doubled(), host_copies=copies)


def said(copies: HostCopies | None) -> str:
    """The terminal's words on copies, as one line."""
    text = render_text(shown(copies), color=False)
    _, _, rest = text.partition(f"{TITLE}\n")
    return " ".join(rest.partition("\n\n")[0].split())


def test_nothing_is_said_of_what_has_none() -> None:
    for copies in (None, HostCopies(3, (), 0.0, 0.0, "none", None)):
        plain = doubled()
        assert render_text(shown(copies), color=False) == render_text(plain, color=False)
        assert render_markdown(shown(copies)) == render_markdown(plain)
        assert f">{TITLE}</a>" not in render_html(shown(copies))


def test_offloading_is_said_everywhere() -> None:
    first = (
        "Activations are offloaded: in each step 3.0 GiB go to the host in the forward passes and "
        "come back in the backward passes."
    )
    assert said(OFFLOADED) == (
        f"{first} Copies run for 25.5 ms (4.2 % of a step) in which no kernel of the same device "
        "does: as far as a trace can tell, they are on the critical path then."
    )
    assert f"- {first}" in render_markdown(shown(OFFLOADED))
    assert first in render_html(shown(OFFLOADED))
    assert f"#### {TITLE}" in render_markdown(shown(OFFLOADED))


def test_the_page_has_a_row_for_each_kind() -> None:
    written = render_html(shown(OFFLOADED))
    table = written[written.index('id="copies"') :].partition("</table>")[0]
    cells = [
        [cell.partition(">")[2].partition("<")[0] for cell in row.split("<t")[1:]]
        for row in table.partition("<tbody>")[2].split("<tr>")[1:]
    ]
    assert cells == [
        ["to the host", "pinned", "forward", "32", "3.0 GiB", "120.0 ms", "10.0 ms"],
        ["to the device", "pinned", "backward", "32", "3.0 GiB", "115.0 ms", "15.0 ms"],
        ["to the device", "pageable", "optimizer and the rest", "1.5", "not known", "0.50 ms",
         "0.50 ms"],
    ]  # fmt: skip


def test_copies_that_do_not_matter_are_on_the_page_only() -> None:
    small = HostCopies(3, (BATCH,), 0.5, 0.1, "none", None)
    assert said(small) == ""
    assert TITLE not in render_markdown(shown(small))
    assert "No offload of activations was seen." in render_html(shown(small))
    kernels = HostCopies(0, (BATCH,), 0.5, None, "untold", None, "No step.")
    assert said(kernels) == ""
    assert "Copies run for 0.50 ms (of the recording)" in render_html(shown(kernels))


def test_what_is_not_told_is_said_with_its_reason() -> None:
    found = said(HostCopies(3, (OUT,), 0.5, 0.1, "untold", None, "They differ."))
    assert found.startswith("Whether activations are offloaded is not told. They differ. Copies")


@pytest.mark.parametrize(("percent", "tried"), [(5.0, False), (5.001, True), (None, False)])
def test_something_is_tried_against_what_a_step_would_notice(
    percent: float | None, tried: bool
) -> None:
    assert ("Worth a try" in said(structs.replace(OFFLOADED, alone_pct=percent))) == tried


@pytest.mark.parametrize(
    ("worst", "offload", "words"),
    [
        ({"memory": "pageable"}, "seen", "save_on_cpu(pin_memory=True)"),
        ({"memory": "pageable"}, "none", "DataLoader(pin_memory=True)"),
        ({"memory": "pageable", "phase": "rest"}, "seen", "DataLoader(pin_memory=True)"),
        ({"own_stream": False}, "seen", "OffloadActivations(use_streams=True)"),
        ({"own_stream": False}, "none", "a stream of their own, so that"),
        ({}, "seen", "begin them earlier"),
        ({"memory": "unknown"}, "none", "begin them earlier"),
    ],
)
def test_what_is_tried_depends_on_the_copies(
    worst: dict[str, object], offload: str, words: str
) -> None:
    one = structs.replace(BACK, alone_ms=99.0, **worst)
    copies = structs.replace(OFFLOADED, copies=(OUT, one), alone_pct=20.0, offload=offload)
    found = said(copies)
    assert words in found
    assert ("recompute these activations" in found) == (
        offload == "seen" and worst.get("phase") != "rest"
    )
    assert render_markdown(shown(copies)).count("Worth a try, and not measured") == 1


@pytest.mark.parametrize("render", [render_markdown, render_html])
def test_a_hostile_reason_is_inert(render: object) -> None:
    assert callable(render)
    reason = "<script>alert(1)</script> \x1b[31m\u202e @someone"
    written = render(shown(HostCopies(1, (OUT,), 1.0, 9.0, "untold", None, reason)))
    assert "<script>alert" not in written
    assert "\x1b" not in written
    assert "\u202e" not in written


def test_a_result_goes_through_json_and_another_word_does_not() -> None:
    text = to_json(shown(OFFLOADED))
    assert from_json(text) == shown(OFFLOADED)
    with pytest.raises(InputError):
        from_json(text.replace('"offload": "seen"', '"offload": "<b>"'))
