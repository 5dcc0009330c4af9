"""A sentence is printed where it is true: each has a condition, and none appears without it."""

import html
import re
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from msgspec import structs

from recompute_scan.bundle.pack import issue_text
from recompute_scan.report import words
from recompute_scan.report.render import (
    render_answer,
    render_comparison_answer,
    render_comparison_html,
    render_comparison_text,
    render_html,
    render_markdown,
    render_text,
)
from recompute_scan.report.words import Said
from recompute_scan.result import (
    Attention,
    ByDesign,
    CompiledCode,
    CompiledGraph,
    CompiledRecompute,
    CrossCheck,
    Gradients,
    MemorySnapshot,
    PlainCount,
    Region,
    Result,
)
from recompute_scan.result.compare import Comparison, compare
from tests.present import present
from tests.report import sample_results as samples
from tests.report import sentences
from tests.report.pages import ranks, recorded

# A rendering of a page takes longest: so many of the results that contradict a sentence have one.
_PAGES = 3


def compiled(why: str) -> CompiledCode:
    """A compiled graph that runs operators again."""
    again = CompiledRecompute("aten.mm", None, None, 2, 1, why, False, False)  # type: ignore[arg-type]
    return CompiledCode((CompiledGraph("0/0", 1.0, 40, 2, 0, 0, None, (), (again,)),), (), ())


DESIGN = (ByDesign("Own", ("Other",), 4.0, 4.0, 0.0, 1.0),)
OWN_DESIGN = (ByDesign("Own", ("Own",), 4.0, 4.0, 0.0, 1.0, with_gradients=True),)
SNAPSHOT = MemorySnapshot("s.pickle", 0, 1 << 30, 0, 2 << 30, 9, 0, {"other": 1 << 30}, ())


def several_passes() -> tuple[Region, ...]:
    """Blocks with two backward passes through each forward pass."""
    regions = samples.regions(4, 1.0, samples.OUTER)
    return tuple(structs.replace(one, backward_passes=2.0) for one in regions)


def in_parts() -> tuple[Region, ...]:
    """Blocks of a function that runs them again part by part."""
    own = structs.replace(samples.OUTER, options=("in-parts",), function="Own")
    return samples.regions(4, 1.0, own)


def not_applied() -> Result:
    """A fix that could not be applied, from a version that kept what it compared all the same."""
    equal = Gradients("equal", 12)
    measured = structs.replace(
        samples.measurement(), outcome="not-applied", after=None, gradients_with_fix=equal
    )
    return structs.replace(samples.doubled(), verified=measured)


def unlike_lanes(cut: int) -> Result:
    """The doubled result whose recomputes end before the last operators, as with early stop."""
    proof = samples.proof(2)
    lanes = [
        lane if lane.kind == "forward" else structs.replace(lane, ops=lane.ops[:-cut])
        for lane in proof.lanes
    ]
    return structs.replace(samples.doubled(), proof=structs.replace(proof, lanes=tuple(lanes)))


@cache
def results() -> tuple[Result, ...]:
    """Results of all kinds, and such as no analysis gives: what one part says, another denies."""
    found = [
        *(recorded(name) for name in ("partial", "planned", "crashed", "hung")),
        *(samples.verified(), samples.many(70), unlike_lanes(3), not_applied()),
        structs.replace(samples.inconclusive(), snapshots=(SNAPSHOT,)),
        structs.replace(samples.clean(), regions=samples.regions(8, 0.0, samples.OUTER)),
        structs.replace(samples.full(), findings=samples.doubled().findings),
        structs.replace(samples.full(), regions=several_passes()),
        structs.replace(samples.partial(), regions=in_parts(), by_design=OWN_DESIGN),
        structs.replace(samples.doubled(), cost=samples.cost(51.0, 49.6, 49.6, 0.0)),
        *(
            structs.replace(one, evidence_level="hooks", cost=None, regions=())
            for one in (samples.doubled(), samples.full())
        ),
    ]
    plan = present(recorded("planned").plan)
    for outcome in ("helps", "no-gain", "slower", "unclear", "does-not-fit", "failed", "not-tried"):
        proof = structs.replace(plan.proof, outcome=outcome)
        found.append(structs.replace(recorded("planned"), plan=structs.replace(plan, proof=proof)))
    doubled = samples.verified()
    for outcome in (
        "helps",
        "unclear",
        "no-gain",
        "slower",
        "failed",
        "losses-differ",
        "not-tried",
    ):
        verified = structs.replace(present(doubled.verified), outcome=outcome)
        found.append(structs.replace(doubled, verified=verified))
    bases = (
        *(samples.doubled(), samples.full(), samples.clean(), samples.partial()),
        samples.inconclusive(),
    )
    kinds = (
        ("annotated", None, ()),
        ("autograd", None, DESIGN),
        ("autograd", compiled("compiler"), ()),
        ("graphs", compiled("compiler"), ()),
        ("graphs", compiled("checkpoint"), ()),
        ("kernels", None, ()),
    )
    for base, (level, code, design) in product(bases, kinds):
        one = structs.replace(base, evidence_level=level, compiled=code, by_design=design)
        found += [one, structs.replace(one, findings=())]
        found.append(structs.replace(one, regions=(), findings=(), confidence="low"))
        found.append(structs.replace(one, cost=None, regions=tuple(map(bare, one.regions))))
        if base.recompute_per_backward:
            found.append(structs.replace(one, recompute_per_backward=0.5))
    return tuple(found)


def bare(region: object) -> object:
    """A block whose checkpoints are not known."""
    return structs.replace(region, checkpoints=())  # type: ignore[type-var]


@cache
def printed(number: int) -> str:
    """What terminal and Markdown say of a result."""
    one = results()[number]
    texts = render_text(one, color=False), render_answer(one, color=False), render_markdown(one)
    return plain("\n".join(texts))


@cache
def page(number: int) -> str:
    """What the page and the issue say, without the Markdown and the JSON that the page carries."""
    one = results()[number]
    shown = re.sub(r"<(pre|script|style|dialog)\b.*?</\1>", " ", render_html(one), flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]*>", "", shown))
    return plain(f"{text}\n{issue_text(one, (), ())}")


def plain(text: str) -> str:
    """One line without what Markdown escapes and marks."""
    return " ".join(re.sub(r"[\\`*]", "", html.unescape(text)).split())


def effective(said: Said) -> list[bool]:
    """Of which results it is said: of alternatives, the first that is true."""
    for group in words.FIRST_TRUE:
        if said in group:
            before = group[: group.index(said)]
            return [
                said.true(one) and not any(other.true(one) for other in before) for one in results()
            ]
    return [said.true(one) for one in results()]


def occurs(said: Said, text: str) -> bool:
    """Whether it is there, and not as a part of a longer one."""
    if plain(said.text) not in text:
        return False
    for other in words.FIXED:
        if other is not said and said.text in other.text and other.text != said.text:
            text = text.replace(plain(other.text), "")
    return plain(said.text) in text


@pytest.mark.parametrize("said", words.FIXED, ids=lambda said: said.text[:40])
def test_a_fixed_sentence_is_printed_only_where_it_is_true(said: Said) -> None:
    true = effective(said)
    assert any(true), "no result for which it is true: add one"
    assert not all(true), "no result for which it is false: add one"
    elsewhere = [number for number, holds in enumerate(true) if not holds]
    same = [one for one in words.FIXED if one.text == said.text]  # said of several numbers
    if len(same) == 1:
        assert not [number for number in elsewhere if occurs(said, printed(number))]
        step = max(1, len(elsewhere) // _PAGES)
        assert not [number for number in elsewhere[::step] if occurs(said, page(number))]
    there = [number for number, holds in enumerate(true) if holds]
    assert any(occurs(said, printed(number)) or occurs(said, page(number)) for number in there)


def test_the_other_sentences_are_printed_only_where_they_are_true() -> None:
    patterns = {
        phrase: re.compile(re.escape(plain(phrase)).replace(r"\{\}", r"[^.]{1,80}?"))
        for phrase in sentences.CONDITIONS
        if len(phrase.replace("{}", "").split()) > 2
    }
    untrue = set()
    for number, one in enumerate(results()):
        text = printed(number) + (page(number) if number % 20 == 0 or number < 24 else "")
        for phrase, pattern in patterns.items():
            if pattern.search(text) and not holds(phrase, one):
                untrue.add((phrase, one.verdict, one.evidence_level, number))
    assert not untrue


def holds(phrase: str, result: Result) -> bool:
    """Whether the condition does; what it asks about may not be there at all."""
    try:
        return bool(sentences.CONDITIONS[phrase](result))
    except AttributeError:
        return False


def comparisons() -> Iterator[Comparison]:
    """Results beside others: of other verdicts, timed, measured, of few steps, of none."""
    several = [samples.clean(), samples.full(), samples.doubled(), samples.inconclusive()]
    bare = structs.replace(samples.clean(), regions=(), findings=())
    measured = structs.replace(samples.doubled(), verified=samples.measurement())
    for one, other in product((*several, bare, measured), repeat=2):
        made = compare(one, other)
        yield made
        if (one, other) != (several[0], several[2]):
            continue
        elsewhere = [
            structs.replace(result, environment={"device": "cpu", "processor": name})
            for result, name in ((one, "EPYC"), (other, "Xeon"))
        ]
        yield compare(elsewhere[0], elsewhere[1])
        for factor, width, steps in product((1.0004, 1.1, 3.0), (0.001, 0.4), (2, 9)):
            found = [
                _timed(result, 100.0 * by, width, steps)
                for result, by in ((one, 1.0), (other, factor))
            ]
            yield compare(found[0], found[1])


def _timed(result: Result, step_ms: float, width: float, steps: int) -> Result:
    cost = structs.replace(
        present(result.cost),
        step_ms=step_ms,
        step_low_ms=step_ms * (1 - width),
        step_high_ms=step_ms * (1 + width),
        steps=steps,
    )
    return structs.replace(result, cost=cost, verified=None)


def test_a_comparison_says_what_is_true() -> None:
    patterns = {
        phrase: re.compile(re.escape(phrase).replace(r"\{\}", r"[^:]{1,80}?"))
        for phrase in sentences.COMPARED
        if len(phrase.replace("{}", "").split()) > 2
    }
    said, denied, untrue = set(), set(), set()
    for number, one in enumerate(comparisons()):
        shown = html.unescape(re.sub(r"<[^>]*>", "", render_comparison_html(one)))
        text = plain(render_comparison_text(one) + render_comparison_answer(one) + shown)
        for phrase, pattern in patterns.items():
            try:
                true = bool(sentences.COMPARED[phrase](one))
            except TypeError:  # what it asks for is not known
                true = False
            found = bool(pattern.search(text))
            said |= {phrase} if found else set()
            denied |= set() if true else {phrase}
            untrue |= {(phrase, number)} if found and not true else set()
    assert not untrue
    assert said == set(patterns), set(patterns) - said
    always = {"The table below holds the numbers", "Written by recompute-scan"}
    assert denied == set(patterns) - always, set(patterns) - always - denied


def test_every_sentence_of_a_comparison_has_a_condition() -> None:
    said = list(sentences.of_comparisons())
    assert not [one for one in said if not any(phrase in one for phrase in sentences.COMPARED)]


def test_every_sentence_has_a_condition() -> None:
    assert not [(file, said) for file, said in sentences.sentences() if not sentences.known(said)]


def test_every_condition_is_of_a_sentence() -> None:
    there = set(sentences.all_strings())
    phrases = (*sentences.CONDITIONS, *sentences.GENERAL)
    assert not [phrase for phrase in phrases if not any(phrase in text for text in there)]


def contradicted() -> Iterator[tuple[str, Result, str]]:
    """What was printed once of a result that denies it."""
    clean, full, doubled = samples.clean(), samples.full(), samples.doubled()
    yield "lanes", unlike_lanes(3), "The same operators run in every lane"
    yield "gradients", not_applied(), "With the fix the gradients"
    code = structs.replace(
        samples.partial(), regions=samples.regions(4, 0.0), compiled=compiled("compiler")
    )
    yield "compiled", code, "what ordinary checkpointing needs"
    yield "compiled-selective", code, "selective checkpointing trades"
    check = CrossCheck(True, (PlainCount("aten::mm", 4, 0, 0, 0),))
    unknown = structs.replace(samples.inconclusive(), cross_check=check)
    yield "plain-count", unknown, "Plain count agrees"
    yield "plain-count-page", unknown, "Plain count: agrees"
    attention = structs.replace(full, attention=Attention(4.0, 4.0, 0.0))
    yield "attention", attention, "0 times"
    levels = structs.replace(
        doubled,
        regions=samples.regions(
            8, 2.0, structs.replace(samples.OUTER, around="several"), samples.INNER
        ),
    )
    yield "two-levels", levels, "after the first take time, and around the same block"
    yield "two-levels-note", levels, "every further one is redundant"
    yield "ranks", ranks(8), "Checkpointing is doubled: every block"
    yield "waste", structs.replace(full, findings=doubled.findings), "No recompute is redundant"
    yield "nothing", structs.replace(clean, findings=doubled.findings), "nothing to change"
    yield (
        "idle",
        structs.replace(clean, regions=samples.regions(8, 0.0, samples.OUTER)),
        ("no activation checkpoint was at work"),
    )
    memory = structs.replace(samples.inconclusive(), snapshots=(SNAPSHOT,))
    yield "memory", memory, "inconclusive"
    plan = present(recorded("planned").plan)
    for outcome in ("unclear", "slower", "no-gain", "does-not-fit", "failed"):
        proof = structs.replace(plan.proof, outcome=outcome)
        taken = structs.replace(recorded("planned"), plan=structs.replace(plan, proof=proof))
        yield f"plan-{outcome}", taken, "Setting to"


@pytest.mark.parametrize(
    ("result", "said"),
    [pytest.param(result, said, id=name) for name, result, said in contradicted()],
)
def test_what_the_result_denies_is_not_said(result: Result, said: str) -> None:
    shown = re.sub(
        r"<(pre|script|style|dialog)\b.*?</\1>", " ", render_html(result), flags=re.DOTALL
    )
    renderings = (
        render_text(result, color=False),
        render_answer(result, color=False),
        render_markdown(result),
        html.unescape(re.sub(r"<[^>]*>", "", shown)),
        issue_text(result, (), ()) if result.verdict != "inconclusive" else "",
    )
    for text in renderings:
        assert said not in plain(text)
