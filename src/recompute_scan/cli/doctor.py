"""``recompute-scan doctor`` and ``completion``: what is installed here, and the shell's part."""

from __future__ import annotations

import sys

import click

from recompute_scan.cli.output import debug_option, say
from recompute_scan.terminal import colored

_COLORS = {"ok": "green", "missing": None, "problem": "red"}
_WIDTH = 80


@click.command(short_help="Say what is installed, and what that allows.")
@debug_option
def doctor() -> int:
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
        said = textwrap.wrap(visible(line.found, 400), _WIDTH - margin, break_on_hyphens=False)
        first, *more = said or [""]
        say(f"{state}{line.purpose:<{wide}}  {first}\n", codes=color)
        for each in more:
            say(f"{' ' * margin}{each}\n")
    return 0


@click.command(short_help="Print what completes commands in a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print a script by which SHELL completes commands, options and files.

    \b
    bash:  recompute-scan completion bash >> ~/.bashrc
    zsh:   recompute-scan completion zsh >> ~/.zshrc
    fish:  recompute-scan completion fish > ~/.config/fish/completions/recompute-scan.fish
    """  # noqa: D301 - \\b is the character by which click keeps lines as they are
    from click.shell_completion import ShellComplete, get_completion_class

    from recompute_scan.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(cli, {}, "recompute-scan", "_RECOMPUTE_SCAN_COMPLETE")
    say(ShellComplete.source(made) + "\n")  # bash's own would start bash to ask for its version
    return 0
