"""Checkpoint functions of its own that do more with what they are given than call it."""

import torch
from tiny import STEPS, say
from torch import nn


class OfModule(torch.autograd.Function):
    """Trains the module, and asks for its parameters."""

    @staticmethod
    def forward(ctx, module, x, *weights):
        ctx.module, ctx.same = module, module is LAYER
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module.train(module.training)(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        assert ctx.same
        return (None, *torch.autograd.grad(y, [x, *ctx.module.parameters()], grad))


class OfMethod(torch.autograd.Function):
    """Finds the layer by its method."""

    @staticmethod
    def forward(ctx, method, x, *weights):
        ctx.method, ctx.layer = method, method.__self__
        ctx.name = method.__name__, method.__func__ is type(ctx.layer).forward
        ctx.save_for_backward(x)
        with torch.no_grad():
            return method(x)

    @staticmethod
    def backward(ctx, grad):
        assert ctx.name == ("forward", True)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.method(x)
        return (None, *torch.autograd.grad(y, [x, *ctx.layer.parameters()], grad))


class OfList(torch.autograd.Function):
    """Goes through a list of modules, which can itself be called."""

    @staticmethod
    def forward(ctx, x, layers, *weights):
        ctx.layers = layers
        ctx.save_for_backward(x)
        with torch.no_grad():
            for layer in layers:
                x = layer(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x
            for layer in ctx.layers:
                y = layer(y)
        found = torch.autograd.grad(y, [x, *ctx.layers.parameters()], grad)
        return (found[0], None, *found[1:])


torch.manual_seed(0)
LAYER = nn.Linear(8, 8)
layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
optimizer = torch.optim.SGD([*LAYER.parameters(), *layers.parameters()], lr=0.1)
for _ in range(STEPS):
    x = torch.randn(4, 8, requires_grad=True)
    x = OfModule.apply(LAYER, x, *LAYER.parameters()).relu()
    x = OfMethod.apply(layers[0].forward, x, *layers[0].parameters()).relu()
    loss = OfList.apply(x, layers, *layers.parameters()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say(loss.item())
