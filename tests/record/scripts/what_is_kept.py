"""Looks at references, random numbers, signatures and copies: nothing is kept or changed."""

import copy
import gc
import hashlib
import inspect
import io
import random
import weakref

import torch
from tiny import STEPS, Trainer, say

gc.disable()
for reentrant in (False, True):
    trainer = Trainer(reentrant=reentrant)
    for number in range(STEPS):
        loss = trainer.loss()
        graph, kept = weakref.ref(loss), loss.item()
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        del loss
        say(number, kept)
        print(graph() is None)
        if number % 6 == 5:
            trainer.optimizer = copy.deepcopy(trainer.optimizer)
            trainer.model = copy.deepcopy(trainer.model)
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
            torch.save(trainer.model.state_dict(), io.BytesIO())
    model = weakref.ref(trainer.model)
    del trainer
    print(model() is None)
print(inspect.signature(torch.optim.SGD.step), torch.optim.SGD.step.__name__)
print(random.Random(1).random(), hashlib.sha256(torch.get_rng_state().numpy()).hexdigest())
