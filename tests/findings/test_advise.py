"""Which checkpoint stays, and a diff that really takes the other one out."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from recompute_scan.advise import advise_removal, title_of
from recompute_scan.advise.diff import change_diff
from recompute_scan.advise.edit import edited
from recompute_scan.advise.mechanism import Edit
from recompute_scan.advise.registry import MECHANISMS, find_mechanism, recognise
from recompute_scan.recompute.vocabulary import CHECKPOINT_FUNCTIONS
from recompute_scan.result import Checkpoint
from recompute_scan.run_info import Source

CALL = "model.enable()"
DELETE = (Edit("enable", "delete"),)


def removal_diff(site: str, source: Source, edits: tuple[Edit, ...] = DELETE) -> str:
    new = edited(source, edits)
    assert new is not None
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


def test_a_statement_of_several_lines_goes_whole(tmp_path: Path) -> None:
    before = (
        "def build():\n    model = make()\n    apply(\n        model,\n    )\n    return model\n"
    )
    source = source_of(before, "apply(\nmodel,\n)")
    (tmp_path / "train.py").write_text(before)
    diff = removal_diff("train.py:3", source, (Edit("apply", "delete"),))
    subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=tmp_path, check=True)
    after = (tmp_path / "train.py").read_text()
    assert after == "def build():\n    model = make()\n    return model\n"
    ast.parse(after)


def test_an_absolute_path_is_not_prefixed() -> None:
    diff = removal_diff("/home/me/train.py:1", source_of("model.enable()\nb = 2\n", CALL))
    assert diff.splitlines()[:2] == ["--- /home/me/train.py", "+++ /home/me/train.py"]


N, R = "non-reentrant", "reentrant"


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
    fix = advise_removal(stack, {})
    assert fix is not None
    if dropped is None:
        assert (fix.diff, fix.disposition) == (None, "review")
        return
    assert fix.keep.startswith(title_of(stack[kept].mechanism))
    assert fix.remove == f"{title_of(stack[dropped].mechanism)} at train.py:{dropped + 1}"


def test_one_checkpoint_needs_no_fix() -> None:
    assert advise_removal((checkpoint(0, "fsdp-wrapper"),), {}) is None
    assert advise_removal((), {}) is None


def test_two_unknown_checkpoints_get_general_advice() -> None:
    fix = advise_removal((checkpoint(0, None), checkpoint(1, None)), {})
    assert fix is not None
    assert (fix.diff, fix.disposition) == (None, "review")


@pytest.mark.parametrize(("whole_lines", "has_diff"), [(True, True), (False, False)])
def test_a_line_that_holds_more_is_not_deleted(whole_lines: bool, has_diff: bool) -> None:
    statement = "model.gradient_checkpointing_enable()"
    source = Source(1, statement + ("" if whole_lines else "; train()"), 1, 1, False, whole_lines)
    stack = (checkpoint(1, "fsdp-wrapper"), checkpoint(0, "hf-gradient-checkpointing"))
    fix = advise_removal(stack, {"train.py:1": source})
    assert fix is not None
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
    ("asking", "switching", "selective", "name"),
    [
        ("train.py:forward", (), False, "torch-checkpoint"),
        ("train.py:forward", (), True, "selective-checkpoint"),
        ("torch/utils/checkpoint.py:checkpoint_sequential", (), False, "checkpoint-sequential"),
        (WRAPPED, (), False, "fsdp-wrapper"),
        (WRAPPED, ("train.py:main",), True, "fsdp-wrapper"),
        (WRAPPED, ("accelerate/accelerator.py:prepare_model",), False, "accelerate-fsdp"),
        (WRAPPED, ("/opt/x/accelerate/utils/fsdp_utils.py:a",), False, "accelerate-fsdp"),
        (WRAPPED, ("accelerate/accelerator.py:p", TRAINER), False, "hf-trainer-fsdp"),
        (
            WRAPPED,
            ("lightning/fabric/strategies/fsdp.py:_setup_activation_checkpointing",),
            False,
            "lightning-fsdp",
        ),
        (
            WRAPPED,
            ("torchtitan/distributed/activation_checkpoint.py:_wrap_block",),
            False,
            "torchtitan",
        ),
        (
            WRAPPED,
            ("torchtune/training/memory.py:set_activation_checkpointing",),
            False,
            "torchtune",
        ),
        (
            WRAPPED,
            ("composer/distributed/activation_checkpointing.py:apply_ac",),
            False,
            "composer-fsdp",
        ),
        (
            WRAPPED,
            ("nemo_automodel/components/distributed/activation_checkpointing.py:apply",),
            False,
            "nemo-automodel",
        ),
        (LAYER, (), False, "hf-gradient-checkpointing"),
        (
            "transformers/models/llama/modeling_llama.py:forward",
            (),
            False,
            "hf-gradient-checkpointing",
        ),
        (LAYER, (TRAINER, "train.py:main"), False, "hf-trainer"),
        (LAYER, (TRAINER, "trl/trainer/sft_trainer.py:train"), False, "trl-trainer"),
        (LAYER, (TRAINER, "axolotl/train.py:train"), False, "axolotl"),
        (
            LAYER,
            ("peft/utils/other.py:prepare_model_for_kbit_training",),
            False,
            "peft-kbit",
        ),
        (
            "llamafactory/model/model_utils/checkpointing.py:custom_gradient_checkpointing_func",
            (),
            False,
            "llama-factory",
        ),
        ("unsloth_zoo/gradient_checkpointing.py:unsloth_checkpoint", (), False, "unsloth"),
        ("timm/models/_manipulate.py:checkpoint_seq", (), False, "timm"),
        (
            "diffusers/models/modeling_utils.py:_gradient_checkpointing_func",
            (),
            False,
            "diffusers",
        ),
        (
            "deepspeed/runtime/activation_checkpointing/checkpointing.py:checkpoint",
            (),
            False,
            "deepspeed-checkpoint",
        ),
        ("megatron/core/tensor_parallel/random.py:checkpoint", (), False, "megatron-recompute"),
        ("transformer_engine/pytorch/distributed.py:checkpoint", (), False, "transformer-engine"),
        (
            "fairscale/nn/checkpoint/checkpoint_activations.py:_checkpointed_forward",
            (),
            False,
            "fairscale-wrapper",
        ),
        (
            "torch/distributed/_composable/checkpoint_activation.py:forward_pre_hook",
            (),
            False,
            "composable-checkpoint",
        ),
        ("mytransformers/modeling_layers.py:forward", (), False, "torch-checkpoint"),
    ],
)
def test_a_stack_names_the_mechanism(
    asking: str, switching: tuple[str, ...], selective: bool, name: str
) -> None:
    assert recognise(asking, switching, selective=selective).name == name


def test_every_mechanism_that_calls_a_checkpoint_can_be_recognised() -> None:
    # The compiler's own recomputation calls none.
    assert [one.name for one in MECHANISMS if not one.asks] == ["compile-memory-budget"]
    assert all(find_mechanism(name) for name in CHECKPOINT_FUNCTIONS.values() if name)


def test_a_checkpoint_that_other_blocks_depend_on_stays() -> None:
    stack = (checkpoint(0, "fsdp-wrapper"), checkpoint(1, "torch-checkpoint"))
    fix = advise_removal(stack, {}, alone={("torch-checkpoint", "train.py:2")})
    assert fix is not None
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
    fix = advise_removal((checkpoint(0, "fsdp-wrapper"), dropped), {"train.py:2": source}, alone)
    assert fix is not None
    assert fix.disposition == disposition
    assert (reason is None) == (fix.reason is None)
    assert reason is None or reason in (fix.reason or "")


def test_no_advice_speaks_for_reentrant() -> None:
    # It hides a replay that differs from its original, and gave wrong gradients so.
    for mechanism in MECHANISMS:
        assert "use_reentrant=True" not in mechanism.remove
        assert all(edit.value != "True" for edit in mechanism.edits)


def test_mechanisms_have_names_of_their_own() -> None:
    names = [mechanism.name for mechanism in MECHANISMS]
    assert len(set(names)) == len(names)
    assert [find_mechanism(name) for name in names] == list(MECHANISMS)
    assert find_mechanism("of-tomorrow") is find_mechanism(None) is None
    assert title_of("of-tomorrow") == "of-tomorrow"
    assert title_of(None)
