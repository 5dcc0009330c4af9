"""One optimizer for each weight, stepped in the backward pass, under ranges."""

import torch
from tiny import STEPS, Net, say
from torch.profiler import record_function

model = Net()
optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()}


def step(weight):
    with record_function("step in backward"):
        optimizers[weight].step()
        optimizers[weight].zero_grad()


for weight in optimizers:
    weight.register_post_accumulate_grad_hook(step)
for number in range(STEPS):
    with record_function("iteration"):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
    say(number, loss.item())
