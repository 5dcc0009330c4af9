# accelerate#3897, !4172: every child of the layer is checkpointed, not the layer
from common import *
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

m = nn.Sequential(*[Block(256) for _ in range(4)])
for b in m:
    for k, c in list(b.named_children()):
        b.register_module(k, checkpoint_wrapper(c, preserve_rng_state=False))
train(m)
