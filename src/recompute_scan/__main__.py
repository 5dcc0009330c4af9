"""The command, ``python -m recompute_scan``, and the file that processes of ours start by its path.

By its path, since ``-m recompute_scan`` finds a ``recompute_scan.py`` of the current folder first.
"""

import os
import sys

# `python -m` looks for modules in the folder where it is started first, which may be a stranger's.
# The first place is kept: `run` puts the script's own folder there.
# Started by its path, it finds its own folder there.
_own = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - links stay
try:
    _here = os.getcwd()  # noqa: PTH109 - text
except OSError:  # the folder is gone
    _here = ""
if not getattr(sys.flags, "safe_path", False) and sys.path[0] in (_here, _own):
    sys.path[0] = os.path.dirname(_own)  # noqa: PTH120
# A PYTHONPATH that ends in a colon names that folder, too. Only a script may find modules there.
_command = next((one for one in sys.argv[1:] if not one.startswith("-")), "")
_verifies = "--verify" in sys.argv or os.environ.get("RECOMPUTE_SCAN_FIX_VERIFY")
_records = (
    _command in ("run", "plan") or sys.argv[1:2] == ["--trial"] or (_command == "fix" and _verifies)
)
_named = os.environ.get("PYTHONPATH", "")
if _here and _named and not _records and os.path.realpath(_here) != os.path.dirname(_own):  # noqa: PTH120
    _place, _all = os.path.realpath(_here), _named.split(os.pathsep)
    _kept = [one for one in _all if os.path.realpath(one) != _place]
    if _kept != _all:
        os.environ["PYTHONPATH"] = os.pathsep.join(_kept)  # of the processes that this one starts
        sys.path[:] = [one for one in sys.path if os.path.realpath(one) != _place]

from recompute_scan.cli import main  # noqa: E402 - found in that place

if __name__ == "__main__":
    if sys.argv[1:2] == ["--trial"]:
        from recompute_scan.record.children import run_trial_here

        sys.exit(run_trial_here(sys.argv[2:]))
    sys.exit(main())
