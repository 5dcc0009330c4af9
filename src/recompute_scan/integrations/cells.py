"""``%load_ext recompute_scan``: the magic ``%%recompute`` of IPython and Jupyter.

IPython runs the cell itself, so results, exceptions, ``await`` and names are as without the magic:
its first line becomes a call that begins a recording, and an event of the shell ends it.
"""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

from recompute_scan.errors import ScanError

_FIRST_LINE = re.compile(r"%%recompute(?:\s+(?P<line>.*))?\s*")
_loaded: list[CellRecorder] = []


class CellRecorder:
    """Records the cells of one shell that begin with ``%%recompute``."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._recording: Any = None
        self._name: str | None = None

    def install(self) -> None:
        shell = self._shell
        shell.register_magic_function(self.recompute, "line_cell", "recompute")
        shell.input_transformers_cleanup.append(self.rewritten)
        shell.events.register("post_run_cell", self.end)

    def remove(self) -> None:
        shell = self._shell
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop("recompute", None)
        shell.input_transformers_cleanup.remove(self.rewritten)
        shell.events.unregister("post_run_cell", self.end)

    def rewritten(self, lines: list[str]) -> list[str]:
        """The lines of a cell; a first line ``%%recompute`` becomes a call."""
        first = _FIRST_LINE.fullmatch(lines[0]) if lines else None
        if first is None:
            return lines
        call = f"get_ipython().run_line_magic('recompute', {(first['line'] or '').strip()!r})\n"
        return [call, *lines[1:]]

    def recompute(self, line: str, cell: str | None = None) -> None:
        """Record the training loop of this cell, and show the answer below it.

        %%recompute [NAME] [--steps N] [--warmup N] [--timing-steps N] [--device DEVICE]

        The cell runs to its end, with the names of the notebook. A step ends with the optimizer's
        step, or with ``recompute_scan.step()`` where there is no ``torch.optim`` optimizer. With
        the defaults 20 steps are needed. The cell prints when they are recorded; later ones run
        without a recording, and if you interrupt the cell then, the answer is shown too.

        Switch checkpointing on in this cell, for the answer to name the lines that do it.

        NAME            variable that gets the Scan
        --steps         steps to profile (5)
        --warmup        steps before anything is recorded (3)
        --timing-steps  steps to time without the profiler (10)
        --device        auto, cpu or cuda: the device to record (auto)
        """
        from IPython.core.error import UsageError  # noqa: PLC0415 - only where IPython loads this
        from IPython.core.magic_arguments import MagicArgumentParser  # noqa: PLC0415

        if cell is not None:  # a call of the magic from code
            self._shell.run_cell(f"%%recompute {line}\n{cell}").raise_error()
            return
        parser = MagicArgumentParser("%%recompute")
        parser.add_argument("name", nargs="?")
        parser.add_argument("--steps", type=int, default=5)
        parser.add_argument("--warmup", type=int, default=3)
        parser.add_argument("--timing-steps", type=int, default=10)
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        options = vars(parser.parse_argstring(line))
        name = options.pop("name")
        if name is not None and not name.isidentifier():
            raise UsageError(f"%%recompute: {name!r} cannot be the name of a variable")
        try:
            from recompute_scan.record.recording import record  # noqa: PLC0415 - needs torch

            recording = record(**options)
            recording.begin(gives_way=True, in_cell=True)
        except ScanError as error:
            raise UsageError(str(error)) from None
        self._recording, self._name = recording, name

    def end(self, result: Any) -> None:
        """End the recording of the cell that has run, and show what it found."""
        from IPython.display import display  # noqa: PLC0415

        if self._recording is None or "%recompute" not in result.info.raw_cell:  # a cell in a cell
            return
        recording, self._recording = self._recording, None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no trace is printed below
                recording.end(result.error_before_exec or result.error_in_exec)
            scan = recording.scan
        except ScanError as error:
            print(f"recompute-scan: {error}", file=sys.stderr)
            return
        if self._name is not None:
            self._shell.user_ns[self._name] = scan
        display(scan)


def load_ipython_extension(shell: Any) -> None:
    recorder = CellRecorder(shell)
    recorder.install()
    _loaded.append(recorder)


def unload_ipython_extension(shell: Any) -> None:
    for recorder in [one for one in _loaded if one._shell is shell]:
        recorder.remove()
        _loaded.remove(recorder)
