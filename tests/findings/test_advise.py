"""Which checkpoint stays, and a diff that really takes the other one out."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest

from recompute_scan.advise.choice import (
    RunFacts,
    advise_removal,
    edited,
    keep_and_drop,
    switch_of,
    title_of,
)
from recompute_scan.advise.settings import advise_fewer
from recompute_scan.cost.memory import Levels
from recompute_scan.frameworks.base import Edit
from recompute_scan.frameworks.registry import MECHANISMS, find_mechanism, recognise
from recompute_scan.recompute.vocabulary import CHECKPOINT_FUNCTIONS
from recompute_scan.result import Checkpoint, Fix
from recompute_scan.result.patch import change_diff
from recompute_scan.result.run_record import Source
from tests.present import present

CALL = "model.enable()"
DELETE = (Edit("enable", "delete"),)


def removal_diff(site: str, source: Source, edits: tuple[Edit, ...] = DELETE) -> str:
    new = present(edited(source, edits))
    return change_diff(site, source, new)


def source_of(text: str, statement: str, alone: bool = False, around: int = 3) -> Source:
    """The statement in a file's text as `run` would have noted it."""
    lines = text.splitlines()
    wanted = statement.splitlines()
    begin = next(
        n for n in range(len(lines)) if [x.strip() for x in lines[n : n + len(wanted)]] == wanted
    )
    end = begin + len(wanted) - 1
    first, last = max(0, begin - around), min(len(lines) - 1, end + around)
    return Source(first + 1, "\n".join(lines[first : last + 1]), begin + 1, end + 1, alone, True)


@pytest.mark.parametrize(
    ("before", "after", "alone"),
    [
        ("a = 1\nmodel.enable()\nb = 2\n", "a = 1\nb = 2\n", False),
        ("model.enable()\nb = 2\nc = 3\nd = 4\ne = 5\n", "b = 2\nc = 3\nd = 4\ne = 5\n", False),
        ("a = 1\nb = 2\nmodel.enable()\n", "a = 1\nb = 2\n", False),
        ("model.enable()\n", "", False),
        ("if big:\n    model.enable()\nb = 2\n", "if big:\n    pass\nb = 2\n", True),
        ("a = 1\nmodel.enable()\nmodel.enable()\n", "a = 1\nmodel.enable()\n", False),
        ("a = 1\n\n\tx = 1\n\n\nmodel.enable()\n\n\n", "a = 1\n\n\tx = 1\n\n\n\n\n", False),
        ("é = 'ü'\nmodel.enable()\nb = '漢'\n", "é = 'ü'\nb = '漢'\n", False),
    ],
    ids=["plain", "first", "last", "only-line", "sole-in-block", "twice", "blank", "unicode"],
)
@pytest.mark.parametrize("tool", ["git", "patch"])
def test_the_diff_applies(tmp_path: Path, before: str, after: str, alone: bool, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    apply = {"git": ["git", "apply", "-"], "patch": ["patch", "-p1"]}[tool]
    (tmp_path / "src").mkdir()
    file = tmp_path / "src" / "train.py"
    file.write_text(before, encoding="utf-8")
    diff = removal_diff("src/train.py:2", source_of(before, CALL, alone))
    done = subprocess.run(apply, input=diff.encode(), cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert (file.read_text(encoding="utf-8") if file.exists() else "") == after


def test_an_absolute_path_is_not_prefixed() -> None:
    diff = removal_diff("/home/me/train.py:1", source_of("model.enable()\nb = 2\n", CALL))
    assert diff.splitlines()[:2] == ["--- /home/me/train.py", "+++ /home/me/train.py"]


N, R = "non-reentrant", "reentrant"


def advised(*args: Any, **others: Any) -> Fix:
    """The advice, where there is some."""
    return present(advise_removal(*args, **others))


def checkpoint(depth: int, mechanism: str | None, variant: str | None = N) -> Checkpoint:
    return Checkpoint(depth, variant, mechanism, f"train.py:{depth + 1}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outer", "inner", "kept", "dropped"),
    [
        (("fsdp-wrapper", N), ("hf-gradient-checkpointing", R), 0, 1),
        (("hf-gradient-checkpointing", N), ("fsdp-wrapper", R), 1, 0),
        (("fsdp-wrapper", N), ("composable-checkpoint", N), 0, 1),
        (("torch-checkpoint", N), ("hf-gradient-checkpointing", R), 1, 0),
        (("checkpoint-sequential", R), ("torch-checkpoint", N), 0, 1),
        # Of two equal ones the non-reentrant, and of two equal in that too the outer one.
        (("torch-checkpoint", R), ("torch-checkpoint", N), 1, 0),
        (("torch-checkpoint", N), ("torch-checkpoint", R), 0, 1),
        (("torch-checkpoint", R), ("torch-checkpoint", R), 0, 1),
        # What is not known is never told to stay.
        (("of-tomorrow", N), ("torch-checkpoint", R), 1, None),
    ],
)
def test_which_one_stays(
    outer: tuple[str, str], inner: tuple[str, str], kept: int, dropped: int | None
) -> None:
    stack = (checkpoint(0, *outer), checkpoint(1, *inner))
    fix = advised(stack, {}, run=RunFacts(sharded=True))
    if dropped is None:
        assert (fix.diff, fix.disposition) == (None, "review")
        return
    assert fix.keep.startswith(title_of(stack[kept]))
    one_of_two = "the second application of " if outer[0] == inner[0] else ""
    assert fix.remove == f"{one_of_two}{title_of(stack[dropped])} at train.py:{dropped + 1}"


def _around(depth: int, around: str, variant: str = N, site: str = "net.py:4") -> Checkpoint:
    return Checkpoint(depth, variant, "torch-checkpoint", site, around=around)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outer", "inner", "kept"),
    [
        (("several", N), ("block", N), 1),
        (("several", N), ("block", R), 1),
        (("block", N), ("part", N), 0),
        (("block", R), ("part", N), 0),
        (("several", N), ("part", N), 0),
    ],
)
def test_what_is_around_single_blocks_stays(
    outer: tuple[str, str], inner: tuple[str, str], kept: int
) -> None:
    """As what it is around decides what it holds; even where all else speaks for the other."""
    stack = (_around(0, *outer), _around(1, *inner))
    fix = advised(stack, {}, alone=[switch_of(stack[1 - kept])])
    assert fix.removes == stack[1 - kept]
    words = [stack[place].extent for place in (kept, 1 - kept)]
    assert f"keep it {words[0]} at net.py:4, leave it out {words[1]} at net.py:4" in fix.summary


def test_of_unknown_ones_too() -> None:
    outer = Checkpoint(0, "non-reentrant", around="several")
    fix = advised((outer, Checkpoint(1, "non-reentrant")), {})
    assert fix.keep == "the checkpoint around each block"


def test_one_checkpoint_needs_no_fix() -> None:
    assert advise_removal((checkpoint(0, "fsdp-wrapper"),), {}) is None
    assert advise_removal((), {}) is None


def test_beside_an_unknown_checkpoint_the_non_reentrant_one_stays() -> None:
    """As the advice says, whatever the other one is."""
    own, unknown = checkpoint(0, "own-function", R), checkpoint(1, None, N)
    assert keep_and_drop((own, unknown)) == (unknown, own)
    fix = advised((own, unknown), {})
    assert fix.keep.startswith("the non-reentrant checkpoint")


def test_two_unknown_checkpoints_get_general_advice() -> None:
    fix = advised((checkpoint(0, None), checkpoint(1, None)), {})
    assert (fix.diff, fix.disposition) == (None, "review")


@pytest.mark.parametrize(("whole_lines", "has_diff"), [(True, True), (False, False)])
def test_a_line_that_holds_more_is_not_deleted(whole_lines: bool, has_diff: bool) -> None:
    statement = "model.gradient_checkpointing_enable()"
    source = Source(1, statement + ("" if whole_lines else "; train()"), 1, 1, False, whole_lines)
    stack = (checkpoint(1, "fsdp-wrapper"), checkpoint(0, "hf-gradient-checkpointing"))
    fix = advised(stack, {"train.py:1": source})
    assert (fix.diff is not None) == has_diff


@pytest.mark.parametrize(
    ("statement", "edit", "after"),
    [
        ("x = checkpoint(f, x)", Edit("checkpoint", "call"), "x = f(x)"),
        (
            "x = checkpoint(self.block, x, mask, use_reentrant=False, scale=2)",
            Edit("checkpoint", "call"),
            "x = self.block(x, mask, scale=2)",
        ),
        (
            "y = ckpt.checkpoint(lambda t: t + 1, x, preserve_rng_state=False, **more)",
            Edit("checkpoint", "call"),
            "y = (lambda t: t + 1)(x, **more)",
        ),
        ("return checkpoint(f, *args)", Edit("checkpoint", "call"), "return f(*args)"),
        ("x = checkpoint(\n    f,\n    x,\n)", Edit("checkpoint", "call"), "x = f(x)"),
        ("é = checkpoint(ü, 'ß')  # ç", Edit("checkpoint", "call"), "é = ü('ß')  # ç"),
        ("x = checkpoint(*everything)", Edit("checkpoint", "call"), None),
        ("x = checkpoint()", Edit("checkpoint", "call"), None),
        ("x = checkpoint(f, checkpoint(g, x))", Edit("checkpoint", "call"), None),
        ("checkpoint(f, x)", Edit("checkpoint", "call"), None),
        ("x = ckpt(f, x)", Edit("checkpoint", "call"), None),
        (
            "self.block = checkpoint_wrapper(Block(4), CheckpointImpl.REENTRANT)",
            Edit("checkpoint_wrapper", "unwrap"),
            "self.block = Block(4)",
        ),
        ("checkpoint_wrapper(block)", Edit("checkpoint_wrapper", "unwrap"), None),
        ("done = model.enable()", Edit("enable", "delete"), None),
        ("trainer.train()", Edit("enable", "delete"), None),
        (
            "args = Arguments('out', gradient_checkpointing=True, steps=3)",
            Edit("*", "keyword", "gradient_checkpointing"),
            "args = Arguments('out', gradient_checkpointing=False, steps=3)",
        ),
        ("args = Arguments('out')", Edit("*", "keyword", "gradient_checkpointing"), None),
        (
            "model = prepare(model)",
            Edit("prepare", "keyword", "use_gradient_checkpointing", add=True),
            "model = prepare(model, use_gradient_checkpointing=False)",
        ),
        (
            "model = prepare(\n    model,\n    kwargs=dict(a=1),\n)",
            Edit("prepare", "keyword", "use", add=True),
            "model = prepare(\n    model,\n    kwargs=dict(a=1), use=False,\n)",
        ),
        ("model = prepare(**all)", Edit("prepare", "keyword", "use", add=True), None),
        (
            "args = Arguments(fsdp_config={'a': 1, 'checkpointing': True})",
            Edit("*", "entry", "checkpointing"),
            "args = Arguments(fsdp_config={'a': 1, 'checkpointing': False})",
        ),
        ("args = Arguments(fsdp_config=config)", Edit("*", "entry", "checkpointing"), None),
    ],
)
@pytest.mark.parametrize("indent", ["", "    ", "\t"])
def test_how_a_statement_changes(
    statement: str, edit: Edit, after: str | None, indent: str
) -> None:
    lines = [indent + line for line in statement.split("\n")]
    source = Source(1, "\n".join(lines), 1, len(lines), False, True)
    new = edited(source, (edit,))
    assert new == (None if after is None else [indent + line for line in after.split("\n")])


def test_a_library_is_not_to_be_changed() -> None:
    source = Source(1, "x = checkpoint(f, x)", 1, 1, False, True, installed=True)
    assert edited(source, (Edit("checkpoint", "call"),)) is None


def test_the_first_edit_that_fits_is_taken() -> None:
    source = Source(1, "model.new_name()", 1, 1, True, True)
    edits = (Edit("old_name", "delete"), Edit("new_name", "delete"))
    assert edited(source, edits) == ["pass"]


WRAPPED = "site-packages/torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py:forward"
LAYER = "transformers/modeling_layers.py:forward_with_checkpointing"
TRAINER = "transformers/trainer.py:_inner_training_loop"


@pytest.mark.parametrize(
    ("asking", "switching", "name"),
    [
        ("train.py:forward", (), "torch-checkpoint"),
        ("torch/utils/checkpoint.py:checkpoint_sequential", (), "checkpoint-sequential"),
        (WRAPPED, (), "fsdp-wrapper"),
        (WRAPPED, ("accelerate/accelerator.py:prepare_model",), "accelerate-fsdp"),
        (WRAPPED, ("/opt/x/accelerate/utils/fsdp_utils.py:a",), "accelerate-fsdp"),
        (WRAPPED, ("accelerate/accelerator.py:p", TRAINER), "hf-trainer-fsdp"),
        (
            WRAPPED,
            ("lightning/fabric/strategies/fsdp.py:_setup_activation_checkpointing",),
            "lightning-fsdp",
        ),
        (WRAPPED, ("torchtitan/distributed/activation_checkpoint.py:_wrap_block",), "torchtitan"),
        (WRAPPED, ("torchtune/training/memory.py:set_activation_checkpointing",), "torchtune"),
        (WRAPPED, ("composer/distributed/activation_checkpointing.py:apply_ac",), "composer-fsdp"),
        (
            WRAPPED,
            ("nemo_automodel/components/distributed/activation_checkpointing.py:apply",),
            "nemo-automodel",
        ),
        (LAYER, (), "hf-gradient-checkpointing"),
        ("transformers/models/llama/modeling_llama.py:forward", (), "hf-gradient-checkpointing"),
        (LAYER, (TRAINER, "train.py:main"), "hf-trainer"),
        (LAYER, (TRAINER, "trl/trainer/sft_trainer.py:train"), "trl-trainer"),
        (LAYER, (TRAINER, "axolotl/train.py:train"), "axolotl"),
        (LAYER, ("peft/utils/other.py:prepare_model_for_kbit_training",), "peft-kbit"),
        (
            "llamafactory/model/model_utils/checkpointing.py:custom_gradient_checkpointing_func",
            (),
            "llama-factory",
        ),
        ("unsloth_zoo/gradient_checkpointing.py:unsloth_checkpoint", (), "unsloth"),
        ("timm/models/_manipulate.py:checkpoint_seq", (), "timm"),
        ("diffusers/models/modeling_utils.py:_gradient_checkpointing_func", (), "diffusers"),
        (
            "deepspeed/runtime/activation_checkpointing/checkpointing.py:checkpoint",
            (),
            "deepspeed-checkpoint",
        ),
        ("megatron/core/tensor_parallel/random.py:checkpoint", (), "megatron-recompute"),
        ("transformer_engine/pytorch/distributed.py:checkpoint", (), "transformer-engine"),
        (
            "fairscale/nn/checkpoint/checkpoint_activations.py:_checkpointed_forward",
            (),
            "fairscale-wrapper",
        ),
        (
            "torch/distributed/_composable/checkpoint_activation.py:forward_pre_hook",
            (),
            "composable-checkpoint",
        ),
        ("mytransformers/modeling_layers.py:forward", (), "torch-checkpoint"),
    ],
)
def test_a_stack_names_the_mechanism(asking: str, switching: tuple[str, ...], name: str) -> None:
    assert recognise(asking, switching).name == name


def test_a_selective_checkpoint_is_named_where_nothing_wraps_it() -> None:
    assert recognise("train.py:forward", (), selective=True).name == "selective-checkpoint"
    assert recognise(WRAPPED, ("train.py:main",), selective=True).name == "fsdp-wrapper"


def test_every_mechanism_that_calls_a_checkpoint_can_be_recognised() -> None:
    # The compiler's own recomputation calls none; a library's and one's own are told from torch's
    # by whose code calls it, and by the function.
    without = {"compile-memory-budget", "library-checkpoint", "own-function"}
    assert {one.name for one in MECHANISMS if not one.asks} == without
    assert recognise("train.py:forward", own=True).name == "own-function"
    assert recognise("megatron/core/tensor_parallel/random.py:checkpoint", own=True).name == (
        "megatron-recompute"
    )
    assert all(find_mechanism(name) for name in CHECKPOINT_FUNCTIONS.values() if name)


def test_a_checkpoint_that_other_blocks_depend_on_stays() -> None:
    stack = (checkpoint(0, "fsdp-wrapper"), checkpoint(1, "torch-checkpoint"))
    fix = advised(stack, {}, alone={("torch-checkpoint", "train.py:2")})
    assert fix.removes == stack[0]


@pytest.mark.parametrize(
    ("options", "alone", "disposition", "reason"),
    [
        ((), set(), "safe", None),
        (("counts-runs",), set(), "review", "running statistics"),
        (
            (),
            {("torch-checkpoint", "train.py:2"), ("fsdp-wrapper", "train.py:1")},
            "review",
            "Other blocks have only this checkpoint",
        ),
    ],
)
def test_a_fix_is_safe_only_where_results_cannot_change(
    options: tuple[str, ...],
    alone: set[tuple[str | None, str | None]],
    disposition: str,
    reason: str | None,
) -> None:
    dropped = Checkpoint(1, "non-reentrant", "torch-checkpoint", "train.py:2", options=options)
    source = Source(2, "x = checkpoint(f, x)", 2, 2, False, True)
    fix = advised((checkpoint(0, "fsdp-wrapper"), dropped), {"train.py:2": source}, alone)
    assert fix.disposition == disposition
    assert (reason is None) == (fix.reason is None)
    assert reason is None or reason in (fix.reason or "")


def test_no_advice_speaks_for_reentrant() -> None:
    # It hides a recompute that differs from its original, and gave wrong gradients so.
    for mechanism in MECHANISMS:
        assert "use_reentrant=True" not in mechanism.remove
        assert all(edit.value != "True" for edit in mechanism.edits)


def test_mechanisms_have_names_of_their_own() -> None:
    names = [mechanism.name for mechanism in MECHANISMS]
    assert len(set(names)) == len(names)
    assert [find_mechanism(name) for name in names] == list(MECHANISMS)
    assert find_mechanism("of-tomorrow") is find_mechanism(None) is None
    assert len({mechanism.title for mechanism in MECHANISMS}) == len(MECHANISMS)
    assert title_of(Checkpoint(0, None, "of-tomorrow")) == "of-tomorrow"
    assert title_of(Checkpoint(0, None))


@pytest.mark.parametrize(
    ("outer", "inner", "sharded", "stays"),
    [
        # Without FSDP its wrapper has no merit of its own, but for being non-reentrant.
        (("fsdp-wrapper", N), ("hf-gradient-checkpointing", R), False, 0),
        (("fsdp-wrapper", R), ("hf-gradient-checkpointing", N), False, 1),
        (("hf-trainer", R), ("fsdp-wrapper", N), False, 1),
        (("hf-trainer", N), ("fsdp-wrapper", N), False, 0),
        # Under FSDP a reentrant one stays only where nothing else is inside the unit.
        (("fsdp-wrapper", R), ("hf-gradient-checkpointing", N), True, 1),
        (("hf-gradient-checkpointing", N), ("fsdp-wrapper", R), True, 1),
    ],
)
def test_what_stays_depends_on_the_run(
    outer: tuple[str, str], inner: tuple[str, str], sharded: bool, stays: int
) -> None:
    stack = (checkpoint(0, *outer), checkpoint(1, *inner))
    fix = advised(stack, {}, run=RunFacts(sharded=sharded))
    assert fix.removes == stack[1 - stays]
    # Reasons are those that hold here.
    assert ("FSDP unit" in fix.keep) == (sharded and stack[stays].mechanism == "fsdp-wrapper")
    checks = stack[stays].variant == N and R in (stack[0].variant, stack[1].variant)
    assert ("being non-reentrant" in fix.keep) == checks


def test_a_wrapper_without_early_stop_is_not_praised_for_it() -> None:
    wrapper = Checkpoint(0, "non-reentrant", "torchtitan", "a.py:1", options=("early-stop-off",))
    fix = advised((wrapper, checkpoint(1, "hf-gradient-checkpointing", R)), {})
    assert "stops early" not in fix.keep


@pytest.mark.parametrize(
    ("mechanism", "version", "says"),
    [
        ("hf-gradient-checkpointing", "4.45.2", "delete the gradient_checkpointing_enable("),
        ("hf-gradient-checkpointing", "5.22.0", "delete the gradient_checkpointing_enable("),
        ("hf-gradient-checkpointing", "5.23.0", "delete the activation_checkpointing_enable("),
        ("hf-gradient-checkpointing", "10.1", "delete the activation_checkpointing_enable("),
        ("hf-trainer", "4.51.3", "set gradient_checkpointing=False in"),
        ("hf-trainer", "5.23.0", "set activation_checkpointing=False in"),
    ],
)
def test_advice_is_in_the_words_of_the_installed_version(
    mechanism: str, version: str, says: str
) -> None:
    stack = (checkpoint(0, "fsdp-wrapper"), checkpoint(1, mechanism, R))
    fix = advised(stack, {}, run=RunFacts({"transformers": version}))
    assert says in fix.summary
    assert "5.23" not in fix.summary


def test_without_a_version_both_words_stand() -> None:
    stack = (checkpoint(0, "fsdp-wrapper"), checkpoint(1, "hf-gradient-checkpointing", R))
    fix = advised(stack, {})
    assert "gradient_checkpointing_enable(…) call (activation_checkpointing_enable" in fix.summary


def test_the_words_of_the_line_come_first() -> None:
    line = "model.gradient_checkpointing_enable()"
    source = Source(2, line, 2, 2, False, True)
    stack = (checkpoint(0, "fsdp-wrapper"), checkpoint(1, "hf-gradient-checkpointing", R))
    fix = advised(stack, {"train.py:2": source}, run=RunFacts({"transformers": "5.23.0"}))
    assert "delete the gradient_checkpointing_enable(…) call at train.py:2" in fix.summary


@pytest.mark.parametrize(
    ("statement", "says", "never"),
    [
        (
            "a = SFTConfig(gradient_checkpointing=True)",
            "set gradient_checkpointing=False",
            "default",
        ),
        ("a = SFTConfig('out')", "which has it on by default", "set gradient"),
    ],
)
def test_a_default_is_called_one_only_where_nothing_is_passed(
    statement: str, says: str, never: str
) -> None:
    stack = (checkpoint(0, "fsdp-wrapper"), checkpoint(1, "trl-trainer", R))
    fix = advised(stack, {"train.py:2": Source(2, statement, 2, 2, False, True)})
    assert says in fix.summary
    assert never not in f"{fix.summary} {fix.remove}"


@pytest.mark.parametrize(
    ("site", "source", "why"),
    [
        (None, None, "was not found"),
        ("--gradient_checkpointing", None, "on the command line"),
        ("training.gradient_checkpointing", None, "on the command line"),
        ("FSDP_ACTIVATION_CHECKPOINTING", None, "in the environment"),
        ("conf.yaml:8", None, "configuration file"),
        ("train.py:8", None, "could not be read"),
        ("train.py:8", Source(8, "a(); b()", 8, 8, False, False), "shares its line"),
        ("p/a.py:8", Source(8, "a()", 8, 8, False, True, installed=True), "installed package"),
        ("train.py:8", Source(8, "a = cfg.make()", 8, 8, False, True), "not edit the statement"),
    ],
)
def test_why_there_is_no_diff(site: str | None, source: Source | None, why: str) -> None:
    dropped = Checkpoint(1, "reentrant", "hf-gradient-checkpointing", site)
    fix = advised((checkpoint(0, "fsdp-wrapper"), dropped), {site: source} if source else {})
    assert why in (fix.reason or "")
    assert (fix.diff, fix.disposition) == (None, "review")
    if site is not None:
        assert site in fix.summary
        assert "was not found" not in (fix.reason or "")


@pytest.mark.parametrize(
    ("mechanism", "site", "says"),
    [
        # With TRL 0.24 layers run 2 times more with the flag left out, and once with it false.
        ("trl-trainer", "--gradient_checkpointing", "pass --gradient_checkpointing false"),
        ("trl-trainer", "sft.gradient_checkpointing", "pass sft.gradient_checkpointing=false"),
        ("hf-gradient-checkpointing", "--gradient_checkpointing", "leave --gradient_checkpointing"),
        ("trl-trainer", "FSDP_CHECKPOINTS", "unset FSDP_CHECKPOINTS"),
    ],
)
def test_what_is_on_by_default_is_passed_as_false(mechanism: str, site: str, says: str) -> None:
    fix = advised((checkpoint(0, "fsdp-wrapper"), Checkpoint(1, "reentrant", mechanism, site)), {})
    assert says in fix.summary


@pytest.mark.parametrize("sites", [("a.py:1", "a.py:2"), ("a.py:1", "a.py:1")])
def test_what_is_applied_twice_is_to_be_applied_once(sites: tuple[str, str]) -> None:
    stack = tuple(
        Checkpoint(depth, "non-reentrant", "torchtitan", site) for depth, site in enumerate(sites)
    )
    fix = advised(stack, {})
    assert "once" in fix.summary
    assert "configuration" not in fix.summary  # which would switch both off
    assert fix.diff is None


def test_a_function_of_ones_own_is_named() -> None:
    own = Checkpoint(1, "reentrant", "own-function", "net.py:7", function="GradCkpt")
    fix = advised((checkpoint(0, "torch-checkpoint"), own), {})
    assert "a checkpoint function of your own (`GradCkpt`) at net.py:7" in fix.remove


@pytest.mark.parametrize(("version", "says"), [("4.51.3", "no flag"), ("5.23.0", "= False on")])
def test_fewer_layers_in_the_words_of_the_version(version: str, says: str) -> None:
    stack = (checkpoint(0, "hf-gradient-checkpointing"),)
    run = RunFacts({"transformers": version})
    assert says in advise_fewer(stack, "layers.0", False, run).summary


def test_the_checkpoint_inside_compiled_code_stays() -> None:
    outer = Checkpoint(0, "non-reentrant", "torch-checkpoint", "train.py:9")
    inner = Checkpoint(1, None, "torch-checkpoint", "model.py:4", options=("compiled",))
    fix = advised((outer, inner), {})
    assert fix.removes == outer


def test_a_function_that_goes_part_by_part_stays() -> None:
    """Its recompute holds what one part saves."""
    outer = Checkpoint(0, "non-reentrant", "torch-checkpoint", "train.py:9")
    tiles = Checkpoint(1, "reentrant", "own-function", function="Tiles", options=("in-parts",))
    fix = advised((outer, tiles), {})
    assert fix.removes == outer
    assert "part by part" in fix.keep


def _two_levels() -> tuple[Checkpoint, Checkpoint]:
    outer = Checkpoint(0, "reentrant", "torch-checkpoint", "train.py:1")
    inner = Checkpoint(1, "reentrant", "torch-checkpoint", "train.py:2", around="part")
    return outer, inner


@pytest.mark.parametrize(
    ("levels", "removed", "said"),
    [
        (
            Levels(11 << 20, 3 << 20),
            "train.py:1",
            "removing the outer checkpoints raises the peak less",
        ),
        (
            Levels(3 << 20, 11 << 20),
            "train.py:2",
            "removing the inner checkpoints raises the peak less",
        ),
        (Levels(11 << 20, 0), "train.py:1", "not grow without"),
        (Levels(3 << 20, 4 << 20), "train.py:2", "is not known"),
        (None, "train.py:2", "is not known"),
    ],
)
def test_of_two_levels_the_cheaper_goes_and_its_price_is_said(
    levels: Levels | None, removed: str, said: str
) -> None:
    fix = advised(_two_levels(), {}, run=RunFacts(levels=levels))
    assert present(fix.removes).call_site == removed
    assert fix.disposition == "review"
    assert said in f"{fix.reason} {fix.keep}"


def _written(text: str) -> dict[str, Source]:
    """Every line of a file as a statement, with one line around it."""
    lines = text.split("\n")
    return {
        f"train.py:{n}": Source(
            max(n - 1, 1), "\n".join(lines[max(n - 2, 0) : n + 1]), n, n, False, True
        )
        for n in range(1, len(lines) + 1)
    }


def _at(line: int, around: Literal["block", "part"] = "block") -> Checkpoint:
    return Checkpoint(line, "reentrant", "torch-checkpoint", f"train.py:{line}", around=around)


def test_all_but_one_go_by_one_diff(tmp_path: Path) -> None:
    text = (
        "def forward(x):\n    x = checkpoint(one, x, use_reentrant=True)\n    y = 1\n    z = 2\n"
        "    w = 3\n    return checkpoint(two, x)\n\n\nx = checkpoint(forward, x)"
    )
    parts = [_at(line, around="part") for line in (2, 6)]
    fix = advised((_at(9), *parts), _written(text))
    assert fix.removed == tuple(parts)
    (tmp_path / "train.py").write_text(text + "\n")
    subprocess.run(["git", "apply", "-"], input=fix.diff, text=True, cwd=tmp_path, check=True)
    changed = (tmp_path / "train.py").read_text()
    assert (
        changed
        == text.replace("checkpoint(one, x, use_reentrant=True)", "one(x)").replace(
            "checkpoint(two, x)", "two(x)"
        )
        + "\n"
    )


def test_what_one_diff_cannot_take_out_is_named() -> None:
    own = [Checkpoint(n, "reentrant", None, "train.py:2", function=f"F{n}") for n in (1, 2)]
    for three, other in (([_at(1), _at(2), _at(3)], "train.py:3"), ([_at(1), *own], "(`F2`)")):
        fix = advised(three, _written("y = x\n\ny = checkpoint(f, x)"))
        assert len(fix.removed) == 1
        assert re.search(rf"Take out .*{re.escape(other)}.* as well", fix.reason or "")


def test_inputs_go_on_asking_for_gradients() -> None:
    """A reentrant checkpoint around frozen inputs trains nothing without that switch."""
    switch = Checkpoint(0, "reentrant", "hf-gradient-checkpointing", "train.py:1")
    wrapper = Checkpoint(1, "reentrant", "fsdp-wrapper", "train.py:2")
    assert advised((switch, wrapper), {}).removes == wrapper
    sharded = advised((switch, wrapper), {}, run=RunFacts(sharded=True))
    assert sharded.removes == switch
    assert "enable_input_require_grads" in (sharded.reason or "")


def test_checkpoints_around_the_same_block_cost_no_memory_to_part() -> None:
    stack = (checkpoint(0, "fsdp-wrapper"), checkpoint(1, "hf-gradient-checkpointing"))
    fix = advised(stack, {}, run=RunFacts(levels=None))
    assert "memory either saves" not in (fix.reason or "")
