"""Failures while saving."""

from __future__ import annotations

import re

from recompute_scan.frameworks.signature import Signature, innermost, some

_TORCH = "https://github.com/pytorch/pytorch/issues/"
_OPTIMIZER_STATE = r"_optim_utils\.py:|:_?optim_state_dict$|:get_state_dict$"

SIGNATURES = (
    Signature(
        code="RS202",
        name="optimizer-state-dtype-mismatch",
        cause_name="assertion",
        error="AssertionError",
        message=re.compile(r"^(?:Expected dtype == info\.dtype, got .*)?$", re.DOTALL),
        where=innermost(r"_optim_utils\.py:_convert_all_state_info$"),
        needs_frames=True,
        title="FSDP cannot gather optimizer state of different dtypes",
        cause=(
            "State tensors of one kind have different dtypes, on different ranks or for "
            "different pieces of one flat parameter. Optimizers with 8-bit or 16-bit state, and "
            "an optimizer built before FSDP changed the parameters, do so."
        ),
        fix=(
            "Cast the state to float32 before saving (never down: the optimizer goes on with it); "
            "build the optimizer after wrapping, on float32 parameters; no 8-bit optimizer with "
            "FSDP1's gathered state."
        ),
        versions="FSDP1. The assertion has no text up to torch 2.9.",
        sources=(
            "https://github.com/hiyouga/EasyR1/issues/226",
            f"{_TORCH}156166",
            "https://github.com/unslothai/unsloth/issues/2767",
        ),
        checked="reproduced",
    ),
    Signature(
        code="RS202",
        name="optimizer-state-dtype-mismatch",
        cause_name="gather",
        error="RuntimeError|TypeError|ValueError|DistBackendError",
        message=re.compile(r"output tensor must have the same type as input tensor"),
        where=some(_OPTIMIZER_STATE),
        needs_frames=True,
        title="FSDP cannot gather optimizer state of different dtypes",
        cause=(
            "The gathering collective was given a piece of state of another dtype than it had "
            "made room for: exp_avg and exp_avg_sq differ, or the ranks do."
        ),
        fix=(
            "Cast the state to float32 before saving (never down: the optimizer goes on with it); "
            "build the optimizer after wrapping, on float32 parameters; no 8-bit optimizer with "
            "FSDP1's gathered state."
        ),
        versions="FSDP1 on NCCL.",
        sources=("https://github.com/hiyouga/EasyR1/issues/226", f"{_TORCH}112717"),
    ),
    Signature(
        code="RS203",
        name="sharded-padding-assert",
        cause_name="padding",
        error="AssertionError",
        message=re.compile(r"Manually calculated _sharded_numel_padded is incorrect"),
        title="FSDP's pieces of optimizer state do not add up to its shard",
        cause=(
            "A parameter counts as trainable and has no optimizer state: typically a vision "
            "tower that was frozen around or after the wrapping. The exact condition is narrower "
            "than that; we could not make it happen with torch 2.9 and 2.13."
        ),
        fix=(
            "Freeze before wrapping, wrap the frozen tower as an FSDP unit of its own, pass "
            "use_orig_params=True, and StateDictOptions(strict=False) when saving. That leaves out "
            "what does not fit and says nothing: look that the state of all that trains is there."
        ),
        versions="The message exists from torch 2.2 on; EasyR1 changed its own code in April 2025.",
        sources=(
            "https://github.com/hiyouga/EasyR1/issues/226",
            "https://github.com/hiyouga/EasyR1/issues/244",
        ),
    ),
    Signature(
        code="RS205",
        name="optimizer-lacks-parameter",
        cause_name="subset",
        error="RuntimeError",
        message=re.compile(r"is not in the optimizer state\. The FSDPParamInfo has the param keys"),
        title="The optimizer does not hold every trainable parameter of an FSDP unit",
        cause=(
            "The optimizer was given some parameters of a unit only, or requires_grad was "
            "changed after it was built."
        ),
        fix=(
            "Set requires_grad=False, before wrapping, for what is not to be trained, or wrap it "
            "in units of its own; give the optimizer all the rest. Build it anew after "
            "(un)freezing, which begins its state anew."
        ),
        versions="FSDP1; seen with torch 2.13.",
        sources=("https://docs.pytorch.org/docs/stable/fsdp.html",),
        checked="reproduced",
    ),
)
