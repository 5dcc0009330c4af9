"""``recompute-scan doctor``: what is installed here, and what that allows."""

from __future__ import annotations

import sys

import click

from recompute_scan.cli.output import debug_option, say
from recompute_scan.terminal import colored

_COLORS = {"ok": "green", "missing": None, "problem": "red"}
_WIDTH = 80


@click.command(short_help="Say what is installed, and what that allows.")
@debug_option
def doctor(debug: bool) -> int:
    """Look at what is installed: torch and its GPUs, launchers, the optional packages.

    A line that begins with `missing` names something that only some uses need.
    """
    import textwrap

    from recompute_scan.installation import heading, look
    from recompute_scan.report.templating import visible

    lines = look()
    say(f"{heading()}\n\n")
    color = colored(sys.stdout)
    wide = max(len(line.purpose) for line in lines)
    for line in lines:
        state = f"{line.state:<9}"
        if color:
            state = click.style(state, fg=_COLORS[line.state], bold=line.state != "missing")
        margin = 9 + wide + 2
        said = textwrap.wrap(visible(line.said, 400), _WIDTH - margin, break_on_hyphens=False)
        first, *more = said or [""]
        say(f"{state}{line.purpose:<{wide}}  {first}\n", codes=color)
        for each in more:
            say(f"{' ' * margin}{each}\n")
    return 0
