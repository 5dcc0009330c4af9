"""The recorded cases by group, as ``python -m benchmarks accuracy`` names them."""

from collections.abc import Iterable

from tests.cases.architectures import ARCHITECTURES
from tests.cases.bystanders import BYSTANDERS
from tests.cases.case import Case
from tests.cases.compiled import COMPILED
from tests.cases.discarded import DISCARDED
from tests.cases.distributed import DISTRIBUTED
from tests.cases.equal import EQUAL
from tests.cases.frameworks import INSTALLED
from tests.cases.functions import FUNCTIONS
from tests.cases.functions_more import MORE_FUNCTIONS
from tests.cases.functions_others import OTHERS
from tests.cases.gpu_matrix import GPU
from tests.cases.hooks import HOOKS
from tests.cases.huggingface import HUGGING_FACE
from tests.cases.kinds import KINDS
from tests.cases.kinds_short import KINDS_SHORT
from tests.cases.nesting import CASES
from tests.cases.places import PLACES
from tests.cases.schedules import SCHEDULES
from tests.cases.stacks import STACKS
from tests.cases.truth import Truth

GROUPS: dict[str, tuple[Case, ...]] = {
    "core": CASES,
    "huggingface": HUGGING_FACE,
    "architectures": ARCHITECTURES,
    "bystanders": BYSTANDERS + HOOKS,
    "schedules": SCHEDULES,
    "places": PLACES + STACKS + DISCARDED,
    "equal": EQUAL,
    "kinds": (*KINDS, *KINDS_SHORT),
    "distributed": DISTRIBUTED,
    "compiled": COMPILED,
    "functions": FUNCTIONS + MORE_FUNCTIONS,
    "others": OTHERS,
    "frameworks": INSTALLED,
}
# The last needs a GPU.
ALL_GROUPS = {**GROUPS, **GPU}

# Open to the answer that the compiler hides it.
HIDDEN = frozenset(case.name for case in COMPILED if case.verdict is None)


def chosen(groups: Iterable[str], names: Iterable[str] = ()) -> list[Case]:
    """The cases of these groups; with names, those of them alone."""
    wanted = set(names)
    return [
        case for group in groups for case in ALL_GROUPS[group] if not wanted or case.name in wanted
    ]


def highest(truth: Truth) -> float:
    """The highest multiplicity of any part."""
    return max(max(layer) for layer in truth.multiplicity())


def expected(truth: Truth) -> str:
    """The truth in two words: verdict and highest multiplicity."""
    verdict = truth.verdict or ("compiled" if truth.name in HIDDEN else "open")
    return f"{verdict} {highest(truth):g}"
