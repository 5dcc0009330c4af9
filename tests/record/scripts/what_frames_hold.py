"""Keeps ``locals()`` as its settings, and sees a model freed that it has deleted."""

import weakref

import torch
from tiny import STEPS, Net, say
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)


def build(width=8, depth=2):
    config = locals()
    pretrained, model = Net(width), Net(width)
    model.load_state_dict(pretrained.state_dict())
    gone = weakref.ref(pretrained)
    apply_activation_checkpointing(model, check_fn=lambda one: isinstance(one, torch.nn.Linear))
    del pretrained
    say(gone() is None, sorted(config))
    return model


def build_quietly(width=8):
    pretrained, model = Net(width), Net(width)
    gone = weakref.ref(pretrained)
    apply_activation_checkpointing(model, check_fn=lambda one: isinstance(one, torch.nn.Linear))
    del pretrained
    say(gone() is None)
    return model


def main(rate=0.1, steps=STEPS):
    config = locals()
    generator, critic = build(), build_quietly()
    optimizers = [torch.optim.SGD(one.parameters(), lr=rate) for one in (generator, critic)]
    for _ in range(steps):
        for model, optimizer in zip((generator, critic), optimizers):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            say(loss.item())
    say(sorted(config.items()))


main()
