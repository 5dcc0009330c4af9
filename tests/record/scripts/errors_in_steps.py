"""Steps fail inside the model, the backward pass and the optimizer; the script goes on."""

import sys
import traceback

import torch
from tiny import STEPS, Trainer, say
from torch.profiler import record_function

trainer = Trainer()
fails = {"now": None}


def forward_hook(module, args):
    if fails["now"] == "forward":
        raise ValueError("in forward")


def gradient_hook(gradient):
    if fails["now"] == "backward":
        raise ZeroDivisionError("in backward")
    return gradient


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        if fails["now"] == "optimizer":
            raise KeyError("in the optimizer")
        return super().step(closure)


trainer = Trainer(make=lambda weights: Optimizer(weights, lr=0.1))
trainer.model.layers[1].register_forward_pre_hook(forward_hook)
for number in range(2 * STEPS):
    fails["now"] = {3: "forward", 5: "backward", 6: "optimizer", 9: "backward"}.get(number)
    try:
        try:
            raise LookupError("before")
        except LookupError:
            with record_function("step"):
                loss = trainer.loss()
                loss.register_hook(gradient_hook)
                loss.backward()
                trainer.optimizer.step()
    except Exception as error:
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        print(number, type(error).__name__, error, type(error.__context__).__name__)
        if sys.version_info < (3, 11):  # there one frame of ours stays
            names = [name for name in names if name.endswith("_hook")]
        print(names)
    trainer.optimizer.zero_grad()
    say(number, loss.item())
