"""The cases: every line of the design's nesting table, and what surrounds it.

``NESTING`` holds what checkpoints do to one another, ``COVERAGE`` what part of a model they
cover, ``LOOPS`` other shapes of training step, ``LOOKALIKES`` what must not count as recompute.
"""

from __future__ import annotations

from .builtin import chunked_loss, recomputed_mlp
from .case import Case
from .loops import adversarial, frozen_teacher, gradient_penalty, train, two_losses
from .model import NON_REENTRANT, REENTRANT, Checkpoints
from .versions import HAS_SELECTIVE

N, R = NON_REENTRANT, REENTRANT

# Outer and inner checkpoint around the same layer.
NESTING = (
    Case("no_checkpoint", "Nothing is checkpointed.", "none", train()),
    Case(
        "r_inside", "Each layer checkpoints itself, reentrant.", "full", train(Checkpoints(inner=R))
    ),
    Case("n_inside", "The same, non-reentrant.", "full", train(Checkpoints(inner=N))),
    Case(
        "r_outside",
        "The model checkpoints each layer, reentrant.",
        "full",
        train(Checkpoints(outer=R)),
    ),
    Case("n_outside", "The same, non-reentrant.", "full", train(Checkpoints(outer=N))),
    Case("r_in_r", "Reentrant around reentrant.", "doubled", train(Checkpoints(outer=R, inner=R))),
    Case(
        "n_in_r", "Reentrant around non-reentrant.", "doubled", train(Checkpoints(outer=R, inner=N))
    ),
    Case(
        "r_in_n", "Non-reentrant around reentrant.", "doubled", train(Checkpoints(outer=N, inner=R))
    ),
    Case(
        "n_in_n",
        "Non-reentrant around non-reentrant: costs nothing.",
        "full",
        train(Checkpoints(outer=N, inner=N)),
    ),
    Case(
        "n_in_n_no_early_stop",
        "The same without early stop.",
        "doubled",
        train(Checkpoints(outer=N, inner=N), early_stop=False),
    ),
    Case(
        "n_outside_no_early_stop",
        "One checkpoint without early stop.",
        "full",
        train(Checkpoints(outer=N), early_stop=False),
    ),
    Case(
        "r_in_wrapper",
        "PyTorch's checkpoint wrapper around reentrant: the reported pair.",
        "doubled",
        train(Checkpoints(inner=R), wrapper=True),
    ),
    Case(
        "n_in_wrapper",
        "PyTorch's checkpoint wrapper around non-reentrant.",
        "full",
        train(Checkpoints(inner=N), wrapper=True),
    ),
    Case(
        "n_halves_in_n",
        "Non-reentrant around one non-reentrant checkpoint per half.",
        "doubled",
        train(Checkpoints(outer=N, attention=N, mlp=N)),
    ),
    Case(
        "n_first_half_in_n",
        "Non-reentrant around a non-reentrant first half.",
        "doubled",
        train(Checkpoints(outer=N, attention=N)),
    ),
    Case(
        "r_halves_in_r",
        "Reentrant around one reentrant checkpoint per half.",
        "doubled",
        train(Checkpoints(outer=R, attention=R, mlp=R)),
    ),
    Case(
        "n_halves",
        "One non-reentrant checkpoint per half, nothing outside.",
        "full",
        train(Checkpoints(attention=N, mlp=N)),
    ),
    Case(
        "r_three_levels",
        "Three reentrant checkpoints around the same work.",
        "doubled",
        train(Checkpoints(outer=R, inner=R, attention=R, mlp=R)),
    ),
    Case(
        "n_layers_in_n_stack",
        "All layers under one non-reentrant checkpoint, each under its own.",
        "doubled",
        train(Checkpoints(stack=N, inner=N)),
    ),
    Case(
        "r_layers_in_r_stack",
        "The same, both reentrant.",
        "doubled",
        train(Checkpoints(stack=R, inner=R)),
    ),
    Case(
        "n_layers_in_r_stack",
        "Reentrant around the stack, non-reentrant inside.",
        "doubled",
        train(Checkpoints(stack=R, inner=N)),
    ),
    Case(
        "r_layers_in_n_stack",
        "Non-reentrant around the stack, reentrant inside.",
        "doubled",
        train(Checkpoints(stack=N, inner=R)),
    ),
    Case(
        "n_layers_in_n_stack_with_head",
        "The outer checkpoint covers norm and head too.",
        "doubled",
        train(Checkpoints(stack=N, stack_with_head=True, inner=N)),
    ),
)

# Only part of the model.
COVERAGE = (
    Case(
        "two_layers_of_four",
        "Half of the layers are checkpointed.",
        "partial",
        train(Checkpoints(outer=N, outer_layers=frozenset({1, 2}))),
    ),
    Case(
        "one_layer_doubled",
        "All layers once, one of them twice.",
        "doubled",
        train(Checkpoints(outer=N, inner=R, inner_layers=frozenset({2}))),
    ),
    Case(
        "first_half_only",
        "Only the attention half of each layer.",
        "partial",
        train(Checkpoints(attention=N)),
    ),
    Case(
        "selective_matmuls",
        "Selective: matrix products are kept, the rest runs again.",
        "partial",
        train(Checkpoints(selective=True)),
    ),
    Case(
        "n_stack",
        "All layers under one non-reentrant checkpoint.",
        "full",
        train(Checkpoints(stack=N)),
    ),
    Case(
        "r_sequential",
        "checkpoint_sequential in two segments: the last is not checkpointed.",
        "partial",
        train(Checkpoints(sequential=R)),
    ),
    Case("n_sequential", "The same, non-reentrant.", "partial", train(Checkpoints(sequential=N))),
    Case(
        "r_layers_in_r_sequential",
        "checkpoint_sequential over layers that checkpoint themselves.",
        "doubled",
        train(Checkpoints(sequential=R, inner=R)),
    ),
    Case(
        "n_layers_in_n_sequential",
        "The same, both non-reentrant.",
        "doubled",
        train(Checkpoints(sequential=N, inner=N)),
    ),
)

# Other shapes of the step.
LOOPS = (
    Case(
        "accumulation_once",
        "Two micro-batches per step, checkpointed once.",
        "full",
        train(Checkpoints(outer=N), micro_batches=2),
        micro_batches=2,
    ),
    Case(
        "accumulation_doubled",
        "Two micro-batches per step, checkpointed twice.",
        "doubled",
        train(Checkpoints(outer=N, inner=R), micro_batches=2),
        micro_batches=2,
    ),
    Case(
        "autocast_once",
        "Mixed precision, which casts the weights again in each recompute.",
        "full",
        train(Checkpoints(outer=N), autocast=True),
    ),
    Case(
        "autocast_doubled",
        "Mixed precision, checkpointed twice.",
        "doubled",
        train(Checkpoints(outer=R, inner=N), autocast=True),
    ),
    Case(
        "evaluation_between_steps",
        "An evaluation pass after each update.",
        "full",
        train(Checkpoints(outer=R), evaluate=True),
    ),
    Case(
        "no_schedule_doubled",
        "Recorded without a schedule: nothing marks the steps but the optimizer.",
        "doubled",
        train(Checkpoints(outer=N, inner=R)),
        scheduled=False,
    ),
    Case("no_schedule_none", "The same, nothing checkpointed.", "none", train(), scheduled=False),
    Case(
        "no_optimizer_doubled",
        "Weights updated by hand.",
        "doubled",
        train(Checkpoints(outer=R, inner=R), optimizer="none"),
    ),
    Case(
        "closure_doubled",
        "The optimizer calls for loss and gradients itself (a closure), as Lightning lets it.",
        "doubled",
        train(Checkpoints(outer=R, inner=R), optimizer="closure"),
    ),
    Case(
        "closure_none",
        "The same, nothing checkpointed.",
        "none",
        train(optimizer="closure"),
    ),
    Case(
        "two_losses_n",
        "Two backward passes through one checkpointed forward: once in each.",
        "full",
        two_losses(Checkpoints(outer=N)),
        backwards_per_forward=2,
    ),
    Case(
        "two_losses_r",
        "The same, reentrant.",
        "full",
        two_losses(Checkpoints(outer=R)),
        backwards_per_forward=2,
    ),
    Case(
        "frozen_teacher_once",
        "Distillation from a frozen teacher; the student is checkpointed.",
        "full",
        frozen_teacher(Checkpoints(outer=N)),
    ),
)

# Nothing is checkpointed, and something looks as if it were.
LOOKALIKES = (
    Case(
        "gradient_penalty", "Double backward.", "none", gradient_penalty(), backwards_per_forward=2
    ),
    Case(
        "adversarial",
        "Generator and discriminator.",
        "none",
        adversarial(),
        micro_batches=2,
    ),
    Case(
        "two_losses_none",
        "Two backward passes through one forward.",
        "none",
        two_losses(),
        backwards_per_forward=2,
    ),
    Case("frozen_teacher_none", "Distillation from a frozen teacher.", "none", frozen_teacher()),
    Case(
        "accumulation_none",
        "Two micro-batches per step.",
        "none",
        train(micro_batches=2),
        micro_batches=2,
    ),
    Case("evaluation_none", "An evaluation pass after each update.", "none", train(evaluate=True)),
    Case(
        "builtin_mlp",
        "A custom function computes its hidden layer again in its formula.",
        "none",
        recomputed_mlp(),
    ),
    Case(
        "builtin_chunked_loss",
        "A chunked loss runs the head again, under autograd, in its formula.",
        "none",
        chunked_loss(),
    ),
)

CASES = tuple(
    case
    for case in NESTING + COVERAGE + LOOPS + LOOKALIKES
    if HAS_SELECTIVE or not case.name.startswith("selective")
)
