"""One trace of many operators, to see what a GPU's libraries call their kernels.

    python -m tests.cases.operators FOLDER       writes names.json.gz

Each operator and its backward pass stand in a range of its name, which waits for the device. What
the device reaches in products of bf16 is printed as a line of JSON.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile, record_function


def record(folder: Path) -> None:
    """Record each operator once, on the GPU if there is one."""
    device, n = ("cuda", 1024) if torch.cuda.is_available() else ("cpu", 64)
    modules = {
        "linear": (lambda: nn.Linear(n, n), (n, n)),
        "convolution": (lambda: nn.Conv2d(32, 32, 3, padding=1), (8, 32, 32, 32)),
        "layer norm": (lambda: nn.LayerNorm(n), (n, n)),
        "gru": (lambda: nn.GRU(64, 64), (16, 8, 64)),
        "dropout": (lambda: nn.Dropout(0.1), (n, n)),
        "softmax": (lambda: nn.Softmax(-1), (n, n)),
    }
    calls: list[tuple[str, str, nn.Module, torch.Tensor]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, (make, shape) in modules.items():
            given = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
            calls.append((f"{name} {dtype}", "highest", make().to(device, dtype), given))
    calls.append(("linear tf32", "high", calls[0][2], calls[0][3]))
    rows = torch.arange(n, device=device) % 64
    calls.append(("embedding", "highest", nn.Embedding(64, 64, device=device), rows))
    for _ in range(2):  # the first time, libraries load
        with profile(record_shapes=True) as profiler:
            for name, precision, module, given in calls:
                torch.set_float32_matmul_precision(precision)
                with record_function(f"call: {name}"):
                    made = module(given)
                    (made[0] if isinstance(made, tuple) else made).sum().backward()
                    rows.sum().item()  # waits for the device
    profiler.export_chrome_trace(str(folder / "names.json.gz"))


def product_tflops(n: int, times: int) -> float:
    """TFLOP/s of a product of bf16, once the device is warm."""
    a = torch.randn(n, n, device="cuda" if n > 1024 else "cpu", dtype=torch.bfloat16)
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(times):
            made = a @ a
        made[0, 0].item()
    return 2e-12 * n**3 * times / (time.perf_counter() - began)


if __name__ == "__main__":
    size = (8192, 20) if torch.cuda.is_available() else (256, 2)
    print(json.dumps({"product_tflops": product_tflops(*size)}))
    record(Path(sys.argv[1]))
