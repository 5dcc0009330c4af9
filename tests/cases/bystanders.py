"""Work in the step, or in the backward pass itself, that belongs to no checkpoint.

Moving averages, reference models, evaluation, and optimizers that step inside the backward
pass. None of it is recompute, whatever it looks like.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .case import Build, TrainingStep, doubled, full, none
from .loops import batch, next_token_loss, stepping, updated
from .model import NON_REENTRANT, REENTRANT, Checkpoints, Model, Oracle

N, R = NON_REENTRANT, REENTRANT
ONCE, DOUBLED = Checkpoints(outer=N), Checkpoints(outer=N, inner=R)


def moving_average_teacher(asked: Checkpoints | None = None) -> Build:
    """The teacher is a moving average of the student; both see the batch in every step."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        student = Model(oracle, asked).to(device)
        teacher = Model(oracle, asked, prefix="teacher.").to(device).eval()
        teacher.load_state_dict(student.state_dict())
        adamw = torch.optim.AdamW(student.parameters())
        tokens = batch(device)

        def step() -> None:
            logits = student(tokens)
            with torch.no_grad():
                wanted = teacher(tokens).softmax(-1)
            F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1)).backward()
            adamw.step()
            adamw.zero_grad()
            with torch.no_grad():
                pairs = zip(teacher.parameters(), student.parameters(), strict=True)
                for slow, fast in pairs:
                    slow.lerp_(fast, 0.1)

        return step

    return build


def reference_model(asked: Checkpoints | None = None, rollouts: int = 2) -> Build:
    """Policy training: rollouts, then the policy's forward, then that of its frozen twin.

    The twin has the same switches and stays in training mode, as people leave it; its forward
    stands between the policy's forward and backward, and is counted nowhere.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        policy = Model(oracle, asked).to(device)
        reference = Model(Oracle(), asked).to(device)
        reference.load_state_dict(policy.state_dict())
        reference.requires_grad_(False)
        start = batch(device)

        def gradients() -> None:
            tokens = start
            policy.eval()
            with torch.no_grad():
                for _ in range(rollouts):
                    best = policy(tokens)[:, -1:].argmax(-1)
                    tokens = torch.cat([tokens[:, 1:], best], 1)
            policy.train()
            ours = policy(tokens).log_softmax(-1)
            with torch.no_grad():
                theirs = reference(tokens).log_softmax(-1)
            gain = -ours.gather(-1, tokens[..., None]).mean()
            distance = F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
            (gain + distance).backward()

        return updated(policy.parameters(), gradients)

    return build


def evaluation_in_step(asked: Checkpoints | None = None, gradients: bool = False) -> Build:
    """The model is evaluated on the same batch between forward and backward.

    With ``gradients`` somebody forgot ``no_grad``: the pass builds a graph nobody uses.
    """

    def backward(model: Model, tokens: Tensor) -> None:
        loss = next_token_loss(model(tokens), tokens)
        model.eval()
        with torch.set_grad_enabled(gradients):
            next_token_loss(model(tokens), tokens)
        model.train()
        loss.backward()

    return stepping(backward, asked)


def optimizer_in_backward(asked: Checkpoints | None = None) -> Build:
    """Every parameter is updated the moment its gradient is there, by an optimizer of its own."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle, asked).to(device)
        tokens = batch(device)

        def update(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                optimizer.step()
                optimizer.zero_grad()

            return hook

        for parameter in model.parameters():
            adamw = torch.optim.AdamW([parameter])
            parameter.register_post_accumulate_grad_hook(update(adamw))

        def step() -> None:
            next_token_loss(model(tokens), tokens).backward()

        return step

    return build


def two_optimizers(asked: Checkpoints | None = None) -> Build:
    """Matrices have one optimizer, everything else another, as with Muon."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle, asked).to(device)
        matrices = [p for p in model.layers.parameters() if p.ndim == 2]
        known = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in known]
        optimizers = (torch.optim.SGD(matrices, momentum=0.9), torch.optim.AdamW(others))
        tokens = batch(device)

        def step() -> None:
            next_token_loss(model(tokens), tokens).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return step

    return build


BYSTANDERS = (
    none("ema_none", "A moving average as teacher.", moving_average_teacher()),
    full("ema_once", "The same, student checkpointed.", moving_average_teacher(ONCE)),
    none("reference_none", "A reference model in the step.", reference_model()),
    full("reference_once", "The same, both checkpointed.", reference_model(ONCE)),
    doubled("reference_doubled", "The same, both twice.", reference_model(DOUBLED)),
    full(
        "reference_r",
        "The same, both once, reentrant: the twin's checkpoint functions have no backward.",
        reference_model(Checkpoints(outer=R)),
    ),
    none("evaluated_none", "Evaluation before the backward.", evaluation_in_step()),
    full("evaluated_once", "The same, checkpointed.", evaluation_in_step(ONCE)),
    full(
        "evaluated_grad_once",
        "The same, and the evaluation forgot no_grad.",
        evaluation_in_step(ONCE, gradients=True),
    ),
    none(
        "evaluated_grad_none",
        "Nothing checkpointed, and the evaluation forgot no_grad.",
        evaluation_in_step(gradients=True),
    ),
    none(
        "optimizer_in_backward_none",
        "An optimizer per parameter steps inside the backward pass.",
        optimizer_in_backward(),
    ),
    full("optimizer_in_backward_n", "The same, checkpointed.", optimizer_in_backward(ONCE)),
    full(
        "optimizer_in_backward_r",
        "The same, reentrant.",
        optimizer_in_backward(Checkpoints(outer=R)),
    ),
    doubled("optimizer_in_backward_doubled", "The same, twice.", optimizer_in_backward(DOUBLED)),
    doubled(
        "optimizer_in_backward_no_schedule",
        "The same without marked steps: no optimizer step ends a training step.",
        optimizer_in_backward(DOUBLED),
        scheduled=False,
    ),
    full(
        "two_optimizers_no_schedule",
        "Two optimizers step one after the other; nothing else marks the steps.",
        two_optimizers(ONCE),
        scheduled=False,
    ),
)
