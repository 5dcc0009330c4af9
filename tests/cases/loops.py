"""One training step, in the ways that people write it."""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import set_checkpoint_early_stop

from .case import Build, TrainingStep
from .model import BATCH, LENGTH, VOCABULARY, Checkpoints, Layer, Model, Oracle
from .versions import math_attention, non_reentrant_wrapper


def batch(device: torch.device) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def updated(parameters: Iterable[nn.Parameter], gradients: Callable[[], None]) -> TrainingStep:
    """A step of AdamW on these parameters, each with what ``gradients`` leaves in it."""
    adamw = torch.optim.AdamW(parameters)

    def step() -> None:
        gradients()
        adamw.step()
        adamw.zero_grad()

    return step


def train(
    asked: Checkpoints | None = None,
    *,
    early_stop: bool = True,
    wrapper: bool = False,
    micro_batches: int = 1,
    optimizer: Literal["adamw", "closure", "none"] = "adamw",
    evaluate: bool = False,
    autocast: bool = False,
) -> Build:
    """An ordinary step: forward, loss, backward, update.

    ``wrapper`` puts torch's (non-reentrant) ``CheckpointWrapper`` around every layer, as FSDP
    recipes do; with ``closure`` the optimizer calls for the gradients itself, as Lightning lets it;
    ``evaluate`` runs the model once without gradients after each update.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle, asked).to(device)
        if wrapper:
            apply_activation_checkpointing(
                model, non_reentrant_wrapper, lambda module: isinstance(module, Layer)
            )
        adamw = torch.optim.AdamW(model.parameters()) if optimizer != "none" else None
        tokens = [batch(device) for _ in range(micro_batches)]
        mixed = torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast)

        def gradients() -> Tensor:
            for some in tokens:
                with mixed, set_checkpoint_early_stop(early_stop):
                    loss = next_token_loss(model(some), some) / micro_batches
                loss.backward()
            return loss.detach()

        def step() -> None:
            if adamw is not None and optimizer == "closure":
                adamw.zero_grad()
                adamw.step(gradients)
                return
            gradients()
            if adamw is None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad, alpha=1e-3)
                model.zero_grad()
            else:
                adamw.step()
                adamw.zero_grad()
            if evaluate:
                model.eval()
                with torch.no_grad():
                    model(tokens[0])
                model.train()

        return step

    return build


def stepping(
    backward: Callable[[Model, Tensor], None],
    asked: Checkpoints | None = None,
    change: Callable[[Model, Oracle], None] = lambda model, oracle: None,
) -> Build:
    """A step of the model: ``backward`` makes the gradients of a batch, and an update follows.

    ``change`` puts something else into the model before.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle, asked)
        change(model, oracle)
        model.to(device)
        tokens = batch(device)

        return updated(model.parameters(), lambda: backward(model, tokens))

    return build


def ordinary(model: Model, tokens: Tensor) -> None:
    """The gradients of the ordinary loss."""
    next_token_loss(model(tokens), tokens).backward()


def two_losses(asked: Checkpoints | None = None) -> Build:
    """Two losses on one forward pass, each with a backward pass of its own."""

    def backward(model: Model, tokens: Tensor) -> None:
        logits = model(tokens)
        next_token_loss(logits, tokens).backward(retain_graph=True)
        logits.square().mean().backward()

    return stepping(backward, asked)


def gradient_penalty(asked: Checkpoints | None = None) -> Build:
    """The gradient's own norm is part of the loss: ``create_graph`` through every checkpoint."""

    def backward(model: Model, tokens: Tensor) -> None:
        with math_attention():
            x: Tensor = model.embedding(tokens)
            logits = model.logits(model.stack(x))
            (slope,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
            (next_token_loss(logits, tokens) + slope.norm()).backward()

    return stepping(backward, asked)


def adversarial() -> Build:
    """Generator and discriminator, nothing checkpointed: several forwards, two updates."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        generator = Model(oracle, prefix="generator.").to(device)
        discriminator = Model(oracle, prefix="discriminator.").to(device)
        first = torch.optim.AdamW(generator.parameters())
        second = torch.optim.AdamW(discriminator.parameters())
        tokens = batch(device)

        def score(x: Tensor) -> Tensor:
            return discriminator.logits(discriminator.stack(x)).mean()

        def step() -> None:
            fake = generator.stack(generator.embedding(tokens))
            real = discriminator.embedding(tokens)
            F.softplus(score(fake.detach()) - score(real)).backward()
            second.step()
            second.zero_grad()
            F.softplus(-score(fake)).backward()
            first.step()
            first.zero_grad()

        return step

    return build


def frozen_teacher(asked: Checkpoints | None = None) -> Build:
    """A student learns from a frozen teacher that runs without gradients."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        student = Model(oracle, asked).to(device)
        teacher = Model(oracle, prefix="teacher.").to(device).eval()
        tokens = batch(device)

        def gradients() -> None:
            with torch.no_grad():
                wanted = teacher(tokens).softmax(-1)
            F.cross_entropy(student(tokens).flatten(0, 1), wanted.flatten(0, 1)).backward()

        return updated(student.parameters(), gradients)

    return build
