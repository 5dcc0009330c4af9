"""Optimizers of its own: a subclass, a wrapper that is none, LBFGS with a closure."""

import torch
from tiny import STEPS, Trainer, say


class Signs(torch.optim.Optimizer):
    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.add_(weight.grad.sign(), alpha=-group["lr"])
        return "stepped"


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        return self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


trainer = Trainer(make=lambda weights: Wrapper(Signs(weights, lr=0.01)))
for number in range(STEPS):
    say(number, trainer.step())
    print(trainer.optimizer.step())
trainer = Trainer(make=lambda weights: torch.optim.LBFGS(weights, lr=0.1, max_iter=3))
for number in range(STEPS):

    def closure():
        trainer.optimizer.zero_grad()
        loss = trainer.loss()
        loss.backward()
        return loss

    say(number, trainer.optimizer.step(closure).item())
