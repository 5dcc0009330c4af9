"""Scripts that fail, the code of the failure, and how to run them under the command."""

import importlib.metadata
import os
from dataclasses import dataclass, replace
from pathlib import Path

from recompute_scan.result import Result, from_json
from tests.record.runs import plain_environment, run_within

SCRIPTS = Path(__file__).with_name("scripts")
HUNG = 124
# Long enough for two processes to start and train three steps on a busy machine.
TIMEOUT_S = 8.0


@dataclass(frozen=True)
class Case:
    """One script.

    Attributes:
        script: Its name without ``.py``.
        code: The finding that must come first.
        ranks: Number of processes.
        status: What it ends with under the command.
        hangs: Whether it has to be ended by the watchdog.
        before: The last version of lightning in which it fails, for those that need one.
        repaired: Whether to run it without its fault, which its line ``BROKEN = True`` switches.
    """

    script: str
    code: str
    ranks: int = 1
    status: int = 1
    hangs: bool = False
    before: str | None = None
    repaired: bool = False

    @property
    def missing(self) -> str | None:
        """What this machine lacks for it, or ``None``."""
        if self.before is None:
            return None
        try:
            version = importlib.metadata.version("lightning")
        except importlib.metadata.PackageNotFoundError:
            return f"needs lightning {self.before} or older"
        fits = [int(part) for part in version.split(".")[:3]] <= [2, 2, 1]
        return None if fits else f"needs lightning {self.before} or older, not {version}"


CASES = (
    Case("kv_cache", "RS101"),
    Case("kv_cache_eager", "RS110"),
    Case("tensor_count", "RS102"),
    Case("more_tensors", "RS102"),
    Case("unpacked_twice", "RS103"),
    Case("no_input_grad", "RS104"),
    Case("no_input_grad_silent", "RS104", status=0),
    Case("reentrant_kwargs", "RS105"),
    Case("reentrant_inputs", "RS106"),
    Case("exit_after_error", "RS106", status=17),
    Case("frozen_block", "RS107"),
    Case("selective_mutated", "RS108"),
    Case("selective_second_backward", "RS108"),
    Case("selective_other_operators", "RS108"),
    Case("ddp_marked_twice", "RS111", ranks=2),
    Case("ddp_unused", "RS112", ranks=2),
    Case("fsdp_second_root", "RS114", ranks=2),
    Case("fsdp_mixed_grad", "RS115", ranks=2),
    Case("fsdp_mixed_dtype", "RS116", ranks=2),
    Case("fsdp_weight", "RS117", ranks=2),
    Case("fsdp_no_device", "RS118", ranks=2),
    Case("weights_only_save", "RS201", ranks=2, before="2.2.1"),
    Case("optimizer_dtype", "RS202", ranks=2),
    Case("optimizer_subset", "RS205", ranks=2),
    Case("save_hang", "RS204", ranks=2, status=HUNG, hangs=True),
    Case("diverged", "RS210", ranks=2, status=HUNG, hangs=True),
    Case("host_memory", "RS129"),
    Case("no_progress", "RS211", status=HUNG, hangs=True),
    Case("one_behind", "RS211", ranks=2, status=HUNG, hangs=True),
    Case("reentrant_outer_graph", "RS130"),
    Case("input_changed", "RS135"),
    Case("nested_checkpoints", "RS130"),
    Case("weights_on_meta", "RS101"),
    Case("compiled_side_effect", "RS132"),
    Case("checkpoint_in_transform", "RS132"),
    Case("switched_past_method", "RS131"),
    Case("switched_without_support", "RS131"),
    Case("switched_by_old_code", "RS131"),
    Case("message_in_checkpoint", "RS214", ranks=2, status=HUNG, hangs=True),
)
# Reported failures in other forms than their reporters', each with a repaired twin.
FORMS = (
    Case("forms/cache_llama", "RS110"),
    Case("forms/cache_by_hand", "RS101", ranks=2),
    Case("forms/cache_sharded", "RS110", ranks=2),
    Case("forms/weights_only_units", "RS201", ranks=2, before="2.2.1"),
    Case("forms/weights_only_subclass", "RS201", ranks=2, before="2.2.1"),
    Case("forms/weight_by_method", "RS117", ranks=2),
    Case("forms/weight_of_reference", "RS117", ranks=2),
    Case("forms/save_and_train", "RS210", ranks=2, status=HUNG, hangs=True),
    Case("forms/save_distributed", "RS204", ranks=2, status=HUNG, hangs=True),
    # The state is gathered by the collective that the others' next step calls: after that, the
    # ranks are one apart, and no stack shows a save.
    Case("forms/save_no_barrier", "RS210", ranks=2, status=HUNG, hangs=True),
    Case("forms/state_of_one_rank", "RS202", ranks=2),
    Case("forms/state_of_units", "RS202", ranks=2),
)
REPAIRED = tuple(replace(one, code="", status=0, hangs=False, repaired=True) for one in FORMS)


@dataclass(frozen=True)
class Ended:
    """How a run ended: status, what it printed, and its folder."""

    status: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def result(self) -> Result:
        """The result it wrote."""
        return from_json((self.folder / "result.json").read_bytes())

    @property
    def code(self) -> str | None:
        """The code of the first finding."""
        path = self.folder / "result.json"
        findings = self.result.findings if path.exists() else ()
        return findings[0].code if findings else None


def run_case(case: Case, folder: Path, *launcher: str, first: Path | None = None) -> Ended:
    """Run the script under ``recompute-scan run``.

    Args:
        case: Which script.
        folder: A folder of its own; the run's folder is ``out`` in it.
        launcher: What starts the command instead of its own ``--nproc-per-node``; Python first.
        first: A folder with other versions of libraries, which come before those installed.
    """
    script = folder / "train.py"
    text = (SCRIPTS / f"{case.script}.py").read_text(encoding="utf-8")
    if case.repaired:
        text = text.replace("BROKEN = True", "BROKEN = False")
    script.write_text(text, encoding="utf-8")
    options = ["--steps", "1", "--warmup", "1", "--timing-steps", "0", "--keep-going", "-o", "out"]
    options += ["--timeout", str(TIMEOUT_S if case.hangs else 60)]
    if case.ranks > 1 and not launcher:
        options += ["--nproc-per-node", str(case.ranks)]
    command = [*launcher[1:], "-m", "recompute_scan", "run", *options, "train.py", "saved.pt"]
    path = plain_environment()["PYTHONPATH"]
    path = path if first is None else f"{first}{os.pathsep}{path}"
    done = run_within(600, folder, *command, PYTHONPATH=path)
    return Ended(done.returncode, done.stdout, done.stderr, folder / "out")
