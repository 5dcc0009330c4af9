"""``torch.compile`` recomputing by itself, to stay within a memory budget.

``torch._functorch.config.activation_memory_budget``. No checkpoint is called: the recompute is part
of the compiled backward graph, and never more than one.
"""

from __future__ import annotations

from recompute_scan.frameworks.mechanism import Mechanism

MECHANISM = Mechanism(
    name="compile-memory-budget",
    title="torch.compile's activation_memory_budget",
    keep=95,
    why_keep="the compiler recomputes what is cheapest, and fuses it with the backward",
    remove="set torch._functorch.config.activation_memory_budget = 1.0",
    docs="https://docs.pytorch.org/docs/stable/torch.compiler.html",
    checked="ran here (torch 2.13.0): the setting is noted, recomputes are inside compiled code",
    variants=("torch >= 2.4: neither; part of the compiled backward",),
    caution=(
        "Every compiled function of the process goes by it. Below 1 gradients through dropout can "
        "be wrong (pytorch/pytorch issue 190758)."
    ),
)
