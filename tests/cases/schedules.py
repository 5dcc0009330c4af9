"""Micro-batches out of order, and shapes that change."""

import torch
from torch import Tensor

from .case import Build, Case, TrainingStep, doubled, full, none
from .loops import next_token_loss, two_losses, updated
from .model import BATCH, LENGTH, NON_REENTRANT, REENTRANT, VOCABULARY, Checkpoints, Model, Oracle
from .truth import Verdict

N, R = NON_REENTRANT, REENTRANT
NONE, ONCE, ONCE_R = Checkpoints(), Checkpoints(outer=N), Checkpoints(outer=R)
DOUBLED = Checkpoints(outer=N, inner=R)


def _tokens(device: torch.device, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, length), device=device)


def pipeline(asked: Checkpoints, order: str, mixed_lengths: bool = False) -> Build:
    """Micro-batches of one stage, forward and backward interleaved.

    Args:
        asked: The checkpoints.
        order: ``F`` and ``B`` in order of time, such as ``FFBFBB``; the oldest micro-batch that
            waits goes backward first.
        mixed_lengths: No two micro-batches are of the same length.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle, asked).to(device)
        count = order.count("F")
        lengths = [LENGTH + 4 * i * mixed_lengths for i in range(count)]
        batches = [_tokens(device, length) for length in lengths]

        def gradients() -> None:
            coming, waiting = iter(batches), list[Tensor]()
            for what in order:
                if what == "F":
                    tokens = next(coming)
                    waiting.append(next_token_loss(model(tokens), tokens) / count)
                else:
                    waiting.pop(0).backward()

        return updated(model.parameters(), gradients)

    return build


def changing_length(asked: Checkpoints) -> Build:
    """Every step's sequences are of another length."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle, asked).to(device)
        lengths = iter(range(LENGTH, 100 * LENGTH, 3))

        def gradients() -> None:
            tokens = _tokens(device, next(lengths))
            next_token_loss(model(tokens), tokens).backward()

        return updated(model.parameters(), gradients)

    return build


def _pipelines() -> tuple[Case, ...]:
    cases = []
    kinds: tuple[tuple[str, Verdict, Checkpoints], ...] = (
        ("none", "none", NONE),
        ("n", "full", ONCE),
        ("r", "full", ONCE_R),
        ("doubled", "doubled", DOUBLED),
    )
    for name, verdict, asked in kinds:
        for order in ("FFBB", "FFBFBFBB"):
            cases.append(
                Case(
                    f"pipeline_{order.lower()}_{name}",
                    f"Micro-batches in the order {order}, all of one shape.",
                    verdict,
                    pipeline(asked, order),
                    micro_batches=order.count("F"),
                )
            )
    return tuple(cases)


SCHEDULES = (
    *_pipelines(),
    doubled(
        "pipeline_mixed_lengths",
        "Three interleaved micro-batches, each of another length, checkpointed twice.",
        pipeline(DOUBLED, "FFBFBB", mixed_lengths=True),
        micro_batches=3,
    ),
    full(
        "accumulation_mixed_lengths",
        "Three micro-batches of three lengths.",
        pipeline(ONCE, "FBFBFB", mixed_lengths=True),
        micro_batches=3,
    ),
    none("length_none", "Another length in every step.", changing_length(NONE)),
    full("length_once", "The same, checkpointed.", changing_length(ONCE)),
    doubled("length_doubled", "The same, twice.", changing_length(DOUBLED)),
    doubled(
        "two_losses_doubled",
        "Two backward passes through one forward, checkpointed twice.",
        two_losses(DOUBLED),
        backwards_per_forward=2,
    ),
)
