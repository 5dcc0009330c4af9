"""The cases: every line of the design's nesting table, and what surrounds it.

``NESTING`` holds what checkpoints do to one another, ``COVERAGE`` what part of a model they
cover, ``LOOPS`` other shapes of training step, ``LOOKALIKES`` what must not count as recompute.
"""

from .builtin import chunked_loss, recomputed_mlp
from .case import doubled, full, none, partial
from .loops import adversarial, frozen_teacher, gradient_penalty, train, two_losses
from .model import NON_REENTRANT, REENTRANT, Checkpoints
from .versions import HAS_SELECTIVE

N, R = NON_REENTRANT, REENTRANT
asks = Checkpoints

# Outer and inner checkpoint around the same layer.
NESTING = (
    none("no_checkpoint", "Nothing is checkpointed.", train()),
    full("r_inside", "Each layer checkpoints itself, reentrant.", train(asks(inner=R))),
    full("n_inside", "The same, non-reentrant.", train(asks(inner=N))),
    full("r_outside", "The model checkpoints each layer, reentrant.", train(asks(outer=R))),
    full("n_outside", "The same, non-reentrant.", train(asks(outer=N))),
    doubled("r_in_r", "Reentrant around reentrant.", train(asks(outer=R, inner=R))),
    doubled("n_in_r", "Reentrant around non-reentrant.", train(asks(outer=R, inner=N))),
    doubled("r_in_n", "Non-reentrant around reentrant.", train(asks(outer=N, inner=R))),
    full(
        "n_in_n",
        "Non-reentrant around non-reentrant: costs nothing.",
        train(asks(outer=N, inner=N)),
    ),
    doubled(
        "n_in_n_no_early_stop",
        "The same without early stop.",
        train(asks(outer=N, inner=N), early_stop=False),
    ),
    full(
        "n_outside_no_early_stop",
        "One checkpoint without early stop.",
        train(asks(outer=N), early_stop=False),
    ),
    doubled(
        "r_in_wrapper",
        "PyTorch's checkpoint wrapper around reentrant: the reported pair.",
        train(asks(inner=R), wrapper=True),
    ),
    full(
        "n_in_wrapper",
        "PyTorch's checkpoint wrapper around non-reentrant.",
        train(asks(inner=N), wrapper=True),
    ),
    doubled(
        "n_halves_in_n",
        "Non-reentrant around one non-reentrant checkpoint per half.",
        train(asks(outer=N, attention=N, mlp=N)),
    ),
    doubled(
        "n_first_half_in_n",
        "Non-reentrant around a non-reentrant first half.",
        train(asks(outer=N, attention=N)),
    ),
    doubled(
        "r_halves_in_r",
        "Reentrant around one reentrant checkpoint per half.",
        train(asks(outer=R, attention=R, mlp=R)),
    ),
    full(
        "n_halves",
        "One non-reentrant checkpoint per half, nothing outside.",
        train(asks(attention=N, mlp=N)),
    ),
    doubled(
        "r_three_levels",
        "Three reentrant checkpoints around the same work.",
        train(asks(outer=R, inner=R, attention=R, mlp=R)),
    ),
    doubled(
        "n_layers_in_n_stack",
        "All layers under one non-reentrant checkpoint, each under its own.",
        train(asks(stack=N, inner=N)),
    ),
    doubled("r_layers_in_r_stack", "The same, both reentrant.", train(asks(stack=R, inner=R))),
    doubled(
        "n_layers_in_r_stack",
        "Reentrant around the stack, non-reentrant inside.",
        train(asks(stack=R, inner=N)),
    ),
    doubled(
        "r_layers_in_n_stack",
        "Non-reentrant around the stack, reentrant inside.",
        train(asks(stack=N, inner=R)),
    ),
    doubled(
        "n_layers_in_n_stack_with_head",
        "The outer checkpoint covers norm and head too.",
        train(asks(stack=N, stack_with_head=True, inner=N)),
    ),
)

# Only part of the model.
COVERAGE = (
    partial(
        "two_layers_of_four",
        "Half of the layers are checkpointed.",
        train(asks(outer=N, outer_layers=frozenset({1, 2}))),
    ),
    doubled(
        "one_layer_doubled",
        "All layers once, one of them twice.",
        train(asks(outer=N, inner=R, inner_layers=frozenset({2}))),
    ),
    partial("first_half_only", "Only the attention half of each layer.", train(asks(attention=N))),
    partial(
        "selective_matmuls",
        "Selective: matrix products are kept, the rest runs again.",
        train(asks(selective=True)),
    ),
    full("n_stack", "All layers under one non-reentrant checkpoint.", train(asks(stack=N))),
    partial(
        "r_sequential",
        "checkpoint_sequential in two segments: the last is not checkpointed.",
        train(asks(sequential=R)),
    ),
    partial("n_sequential", "The same, non-reentrant.", train(asks(sequential=N))),
    doubled(
        "r_layers_in_r_sequential",
        "checkpoint_sequential over layers that checkpoint themselves.",
        train(asks(sequential=R, inner=R)),
    ),
    doubled(
        "n_layers_in_n_sequential",
        "The same, both non-reentrant.",
        train(asks(sequential=N, inner=N)),
    ),
)

# Other shapes of the step.
LOOPS = (
    full(
        "accumulation_once",
        "Two micro-batches per step, checkpointed once.",
        train(asks(outer=N), micro_batches=2),
        micro_batches=2,
    ),
    doubled(
        "accumulation_doubled",
        "Two micro-batches per step, checkpointed twice.",
        train(asks(outer=N, inner=R), micro_batches=2),
        micro_batches=2,
    ),
    full(
        "autocast_once",
        "Mixed precision, which casts the weights again in each recompute.",
        train(asks(outer=N), autocast=True),
    ),
    doubled(
        "autocast_doubled",
        "Mixed precision, checkpointed twice.",
        train(asks(outer=R, inner=N), autocast=True),
    ),
    full(
        "evaluation_between_steps",
        "An evaluation pass after each update.",
        train(asks(outer=R), evaluate=True),
    ),
    doubled(
        "no_schedule_doubled",
        "Recorded without a schedule: nothing marks the steps but the optimizer.",
        train(asks(outer=N, inner=R)),
        scheduled=False,
    ),
    none("no_schedule_none", "The same, nothing checkpointed.", train(), scheduled=False),
    doubled(
        "no_optimizer_doubled",
        "Weights updated by hand.",
        train(asks(outer=R, inner=R), optimizer="none"),
    ),
    doubled(
        "closure_doubled",
        "The optimizer calls for loss and gradients itself (a closure), as Lightning lets it.",
        train(asks(outer=R, inner=R), optimizer="closure"),
    ),
    none("closure_none", "The same, nothing checkpointed.", train(optimizer="closure")),
    full(
        "two_losses_n",
        "Two backward passes through one checkpointed forward: once in each.",
        two_losses(asks(outer=N)),
        backwards_per_forward=2,
    ),
    full(
        "two_losses_r", "The same, reentrant.", two_losses(asks(outer=R)), backwards_per_forward=2
    ),
    full(
        "frozen_teacher_once",
        "Distillation from a frozen teacher; the student is checkpointed.",
        frozen_teacher(asks(outer=N)),
    ),
)

# Nothing is checkpointed, and something looks as if it were.
LOOKALIKES = (
    none("gradient_penalty", "Double backward.", gradient_penalty(), backwards_per_forward=2),
    none("adversarial", "Generator and discriminator.", adversarial(), micro_batches=2),
    none(
        "two_losses_none",
        "Two backward passes through one forward.",
        two_losses(),
        backwards_per_forward=2,
    ),
    none("frozen_teacher_none", "Distillation from a frozen teacher.", frozen_teacher()),
    none(
        "accumulation_none", "Two micro-batches per step.", train(micro_batches=2), micro_batches=2
    ),
    none("evaluation_none", "An evaluation pass after each update.", train(evaluate=True)),
    none(
        "builtin_mlp",
        "A custom function computes its hidden layer again in its formula.",
        recomputed_mlp(),
    ),
    none(
        "builtin_chunked_loss",
        "A chunked loss runs the head again, under autograd, in its formula.",
        chunked_loss(),
    ),
)

CASES = tuple(
    case
    for case in NESTING + COVERAGE + LOOPS + LOOKALIKES
    if HAS_SELECTIVE or not case.name.startswith("selective")
)
