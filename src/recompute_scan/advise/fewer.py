"""How to checkpoint fewer layers, or less of each: the setting of the framework found."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.advise.choose import kept
from recompute_scan.advise.wording import UNKNOWN_RUN, RunFacts, title_of, worded
from recompute_scan.diagnose.gradients import NON_REENTRANT
from recompute_scan.frameworks.known import find_mechanism
from recompute_scan.frameworks.mechanism import FEWER, SELECTIVELY, Mechanism
from recompute_scan.result import Checkpoint, Fix

_GENERAL_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"
_SELECTIVE_DOCS = (
    "https://docs.pytorch.org/docs/stable/checkpoint.html"
    "#torch.utils.checkpoint.create_selective_checkpoint_contexts"
)


def advise_fewer(
    checkpoints: Sequence[Checkpoint], layers: str, whole: bool, run: RunFacts = UNKNOWN_RUN
) -> Fix:
    """What to change so that these layers are not checkpointed.

    Args:
        checkpoints: Those around each of the layers.
        layers: The layers, in words.
        whole: Whether no other layer is checkpointed.
        run: What else is known of the run.
    """
    checkpoint = kept(checkpoints, sharded=run.sharded)
    title = title_of(checkpoint)
    mechanism = find_mechanism(checkpoint.mechanism)
    if whole and mechanism is not None:
        setting = worded(mechanism.remove, mechanism, run)
    else:
        setting = _template(mechanism, run).format(layers=layers, title=title)
    where = f" ({checkpoint.call_site})" if checkpoint.call_site else ""
    return Fix(
        summary=f"Stop checkpointing {layers}: {setting}{where}.",
        disposition="review",
        diff=None,
        keep="no checkpoint at all" if whole else f"{title} for all other layers",
        remove=f"{title} for {layers}",
        docs=mechanism.docs if mechanism else _GENERAL_DOCS,
    )


def advise_selective(
    checkpoints: Sequence[Checkpoint], operators: Sequence[str], run: RunFacts = UNKNOWN_RUN
) -> Fix:
    """What to change so that the results of these operators are kept.

    Args:
        checkpoints: Those around each layer.
        operators: Names as the profiler has them, ``aten::_flash_attention_forward``.
        run: What else is known of the run.
    """
    checkpoint = kept(checkpoints, sharded=run.sharded)
    listed = ", ".join(f"torch.ops.{name.replace('::', '.')}.default" for name in operators)
    context = f"functools.partial(create_selective_checkpoint_contexts, [{listed}])"
    title = title_of(checkpoint)
    mechanism = find_mechanism(checkpoint.mechanism)
    template = mechanism.selectively if mechanism else SELECTIVELY
    return Fix(
        summary=template.format(title=title, context=context) + ".",
        disposition="review",
        diff=None,
        keep="everything else in the layers recomputed as it is; the checkpoint must be "
        "non-reentrant (torch 2.5 and newer)",
        remove="nothing",
        docs=_SELECTIVE_DOCS,
        reason=f"Where the checkpoint was reentrant: {NON_REENTRANT[0].lower()}{NON_REENTRANT[1:]}",
    )


def _template(mechanism: Mechanism | None, run: RunFacts) -> str:
    """How to leave out single layers, in the words for the installed version."""
    if mechanism is None:
        return FEWER
    old = (b for b in mechanism.fewer_before if run.has(b.package, b.version) is False)
    return next((before.words for before in old), mechanism.fewer)
