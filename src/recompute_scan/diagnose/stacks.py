"""The stacks that ``faulthandler`` writes, read back."""

from __future__ import annotations

import re

from recompute_scan.crash import Frame

_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"
)
_WATCHDOG = "recompute_scan/record/watchdog.py"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')


def main_stack(text: str) -> tuple[Frame, ...]:
    """Where the main thread stood, outermost frame first; empty where the text holds no stack.

    The main thread is the one that got the signal (``Current thread``), else the oldest, which
    faulthandler lists last. Of several dumps the last counts.
    """
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head is not None:
            threads.append((head["current"] == "Current thread", []))
        elif threads and (match := _FRAME.match(line)) is not None:
            threads[-1][1].append(Frame(match["file"], int(match["line"]), match["function"]))
    # The watchdog's own dump has the watchdog's thread as the current one.
    threads = [one for one in threads if one[1] and not one[1][0].file.endswith(_WATCHDOG)]
    current = [frames for is_current, frames in threads if is_current]
    chosen = current or [frames for _, frames in threads]
    return tuple(reversed(chosen[-1])) if chosen else ()
