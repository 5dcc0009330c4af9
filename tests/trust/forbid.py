"""Run one command of recompute-scan with everything forbidden that reading a trace must not do.

    python forbid.py PROJECT COMMAND…

An audit hook (https://docs.python.org/3/library/audit_events.html) ends the process with status
99, and says why, when something opens a connection, looks up a host, starts a program, unpickles,
runs code of a file below PROJECT, or opens one of its files that is not named ``trace…``,
``run-…`` or ``result…`` (``lint`` may read scripts and configurations, too); when torch or a model
library is imported; or when a file is written outside the current folder.
"""

import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

PROJECT = Path(sys.argv[1]).resolve()
OUT = Path.cwd().resolve()
_CONNECTS = ("socket.", "urllib.", "http.", "ftplib.", "smtplib.", "ssl.")
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.startfile")
_MODEL_CODE = {"torch", "transformers", "peft", "accelerate", "deepspeed", "wrapt"}
_INPUT = ("trace", "run-", "result")
# Settings of ours are in pyproject.toml, and pins of versions.
_LINTED = {"lint": (".py", ".json", "pyproject.toml"), "check": ("pyproject.toml",)}.get(
    sys.argv[2], ()
)


def watch(event: str, args: tuple[Any, ...]) -> None:
    if (event.startswith(_CONNECTS) and event != "socket.gethostname") or event.startswith(_STARTS):
        end(f"{event} {args!r}")
    elif event == "pickle.find_class":
        end(f"unpickles {args!r}")
    elif event == "import" and str(args[0]).partition(".")[0] in _MODEL_CODE:
        end(f"imports {args[0]}")
    elif event == "exec" and isinstance(args[0], CodeType):
        if below(args[0].co_filename, PROJECT):
            end(f"runs {args[0].co_filename}")
    elif event == "open" and isinstance(args[0], (str, bytes)):
        opened(os.fsdecode(args[0]), args[1], args[2])


def opened(path: str, mode: str | None, flags: int) -> None:
    name = Path(path).name
    if below(path, PROJECT) and not (name.startswith(_INPUT) or name.endswith(_LINTED)):
        end(f"opens {path}")
    writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes and not below(path, OUT) and path != os.devnull:
        end(f"writes {path} ({mode})")


def below(path: str, folder: Path) -> bool:
    # Without following links, which would open nothing and look everywhere.
    return Path(os.path.normpath(OUT / path)).is_relative_to(folder)


def end(why: str) -> None:
    sys.stderr.write(f"FORBIDDEN: {why}\n")
    sys.stderr.flush()
    os._exit(99)


sys.dont_write_bytecode = True
sys.addaudithook(watch)

if sys.argv[2] == "--try":
    # What the hook is there for: each of these must end the process.
    exec(sys.argv[3])
    sys.exit(0)

from recompute_scan.cli import main  # noqa: E402 - after the hook

sys.exit(main(sys.argv[2:]))
