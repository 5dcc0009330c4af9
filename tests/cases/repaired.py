"""What a doubled case is after its repair: the same step with one checkpoint around each block.

The one that stays is the one that the tool proposes to keep: the non-reentrant one, where there is
one, of two alike the outer one. Where that covers a part of the block only, or all layers at once,
it is the one around whole layers. A case whose repair leaves other work checkpointed than before
has none here.
"""

from .bystanders import optimizer_in_backward
from .case import Build, Case
from .distributed import shard
from .equal import layered
from .frameworks import under
from .functions import torchs
from .functions_more import TILES
from .functions_others import BUFFERED, BY_HAND, FETCHES, IN_TWO, QUANTISED, TREE
from .loops import train
from .model import NON_REENTRANT, REENTRANT, Checkpoints
from .schedules import pipeline
from .trees import equal_layers

N, R = NON_REENTRANT, REENTRANT
SUFFIX = "_repaired"

# Other cases, by their names.
_CASES = {
    "r_in_r": "r_inside",
    "n_in_r": "n_inside",
    "r_in_n": "n_outside",
    "r_in_wrapper": "n_outside",
    "n_in_n_no_early_stop": "n_outside_no_early_stop",
    "n_halves_in_n": "n_outside",
    "n_first_half_in_n": "n_outside",
    "r_halves_in_r": "r_outside",
    "r_three_levels": "r_outside",
    "n_layers_in_n_stack": "n_inside",
    "n_layers_in_r_stack": "n_inside",
    "r_layers_in_n_stack": "r_inside",
    "r_layers_in_r_stack": "r_inside",
    "one_layer_doubled": "n_outside",
    "r_layers_in_r_sequential": "r_inside",
    "n_layers_in_n_sequential": "n_inside",
}
# By the end of the name; the first that there is.
_ENDS = (
    ("_own_r_in_wrapper_n", "_wrapper_n"),
    ("_own_r_in_wrapper_n", "_own_n"),
    ("_own_n_in_wrapper_r", "_own_n"),
    ("_r_in_wrapper_n", "_wrapper_n"),
    ("_r_in_wrapper_n", "_own_n"),
    ("_r_in_n", "_n"),
    ("_n_in_r", "_n"),
    ("_doubled", "_once"),
    ("_doubled", "_n"),
    ("_in_r", ""),
    ("_round_r", ""),
    ("_twice", ""),
)
_OWN = (
    *("grad_ckpt", "remat", "run_twice", "stash", "to_host", "buffered", "afterwards", "int8"),
    *("prefetch", "cold", "two_gradients", "adds_itself", "tree", "in_two", "hooked_block"),
    *("half_kept", "vjp", "by_hand", "r_own"),
)
_ONCE, _ONCE_R = Checkpoints(outer=N), Checkpoints(outer=R)


def _late(count: int, *, micro_batches: int = 1, models: int = 1) -> Build:
    return layered(equal_layers(count, "N"), micro_batches=micro_batches, models=models)


# Steps that are nobody else's.
_BUILDS: dict[str, Build] = {
    "no_schedule_doubled": train(_ONCE),
    "no_optimizer_doubled": train(_ONCE_R, optimizer="none"),
    "closure_doubled": train(_ONCE_R, optimizer="closure"),
    "optimizer_in_backward_no_schedule": optimizer_in_backward(_ONCE),
    "pipeline_mixed_lengths": pipeline(_ONCE, "FFBFBB", mixed_lengths=True),
    **{f"n_in_n_late_{count}": _late(count) for count in range(1, 9)},
    "r_in_r_late_2": layered(equal_layers(2, "R")),
    # What runs in the backward pass is not under the switch for early stop.
    "n_in_r_late_2": layered(equal_layers(2, "N"), early_stop=True),
    "r_in_n_late_2": _late(2),
    "n_three_levels_late_2": _late(2),
    "n_halves_in_n_late_3": _late(3),
    "n_in_n_late_in_n_stack": _late(4),
    "n_in_n_late_in_r_stack": layered(equal_layers(3, "N"), early_stop=True),
    "n_late_in_n_stack": _late(3),
    "r_round_n_late_in_n_stack": _late(5),
    "n_in_n_late_accumulation": _late(1, micro_batches=2),
    "n_in_n_late_two_models": _late(2, models=2),
    **{f"{name}_round_n": under(torchs(N)) for name in _OWN},
    **{f"{name}_in_r": under(torchs(R)) for name in _OWN},
    "buffered_round_int8": under(BUFFERED),
    "int8_round_buffered": under(QUANTISED),
    "fetch_round_tree": under(FETCHES),
    "in_two_round_cold": under(IN_TWO),
    "own_n_own": under(torchs(N)),
    "own_r_own": under(BUFFERED),
    "r_own_own": under(torchs(R)),
    "own_own_n": under(torchs(N)),
    "by_hand_round_r": under(BY_HAND),
    "by_hand_in_r": under(BY_HAND),
    "by_hand_in_own": under(BY_HAND),
    "by_hand_round_own": under(BY_HAND),
    "stack_own_r": under(torchs(R)),
    "stack_own_own": under(TREE),
    "stack_n_own": under(TREE),
    "halves_in_own": under(TREE),
    "mlp_in_own": under(TREE),
    "mlp_own_in_n": under(torchs(N)),
    "mlp_n_in_own": under(BUFFERED),
    "some_own_in_r": under(torchs(R)),
    "some_own_in_own": under(TREE),
    "some_r_in_own": under(BUFFERED),
    # Without its tiles the block would run other kernels.
    "tiles_in_r": under(TILES),
    "tiles_in_n": under(TILES),
    "fsdp1_accumulation": shard("fsdp1", wrapper=N, micro_batches=2),
    "fsdp2_accumulation": shard("fsdp2", wrapper=N, micro_batches=2),
    "ddp_accumulation": shard("ddp", wrapper=N, micro_batches=2),
    "fsdp1_mixed": shard("fsdp1", wrapper=N, mixed=True),
    "fsdp2_mixed": shard("fsdp2", wrapper=N, mixed=True),
}


def repaired(case: Case, every: dict[str, Case]) -> Case | None:
    """The case after the repair of this one; ``None`` where there is none.

    Args:
        case: A doubled one.
        every: All cases, by their names.
    """
    if case.name in _BUILDS:
        about = f"{case.name}, repaired."
        return Case(
            case.name + SUFFIX, about, None, _BUILDS[case.name], case.micro_batches,
            case.backwards_per_forward, case.scheduled,
        )  # fmt: skip
    ends = (case.name.removesuffix(old) + new for old, new in _ENDS if case.name.endswith(old))
    return next((every[one] for one in (_CASES.get(case.name, ""), *ends) if one in every), None)
