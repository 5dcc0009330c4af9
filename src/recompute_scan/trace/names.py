"""What names of torch's own events say, for formats that have no categories."""

from __future__ import annotations

import re

# Ranges that torch itself opens and that are no operators.
RANGE = re.compile(r"ProfilerStep#|Optimizer\.|nccl:|gloo:|mpi:|recompute_scan\.|enumerate\(")
# Operators, of other libraries too, nodes, and what compiled code runs as: where it is torch that
# wrote the event.
OPERATOR = re.compile(
    r"[A-Za-z_]\w*(::[A-Za-z_]\w*)+(\.\w+)?$|autograd::engine::|\w+Backward\d*$|record_param_comms$"
    r"|Torch-Compiled Region|CompiledFunction|TorchDynamo |AOTDispatcher |Pregraph bytecode|triton_"
)
