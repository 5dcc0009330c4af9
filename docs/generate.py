"""Write the generated pages: commands, the result's fields, the Python interface, the schemas,
the findings and their table, the packages in the design, the reports in ``pages``, the badges.

``python docs/generate.py`` writes them (``make fix`` does), and a test checks that they are true.
"""

from __future__ import annotations

import html
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from click import unstyle
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs.badges import badges
from docs.failures import causes_of, failure_page
from docs.rooms import rooms
from tests.diagnose.public import OUTCOMES, public_logs, scores, written_logs

from recompute_scan.api import EVENTS, FAMILIES, MEMORY, REGIONS, WORK, Events, Scan
from recompute_scan.cli import NAMES, cli
from recompute_scan.diagnose.outcome import HANGS, IN_RUNS, SIGNATURES, lines_of, read_log
from recompute_scan.events import event_schema
from recompute_scan.frameworks.detect import NAMES as FAILURES
from recompute_scan.frameworks.detect import Signature
from recompute_scan.record.recording import Recording, record
from recompute_scan.report.render import render_html
from recompute_scan.report.summary import recorded_into
from recompute_scan.result import from_json, json_schema
from recompute_scan.result.compare import json_schema as comparison_schema

DOCS = Path(__file__).parent
LOGS = DOCS.parent / "tests" / "diagnose" / "corpus" / "known"
_WIDTH = 80
_EXAMPLE_LINES = 2
_EXAMPLE_WIDTH = 110
_RESULT = re.compile(r'<pre [^>]*id="raw-json"[^>]*><code>(.*?)</code></pre>', re.DOTALL)

_HOUSE, _END_OF_HOUSE = "<!-- house -->", "<!-- end of house -->"

_COMMANDS = """\
# Commands

The output of `--help`.
"""

_FINDINGS = """\
# Findings

Search this table for an error text or a symptom. `recompute-scan explain RS001` prints a page.
Codes RS0xx are about time, RS1xx crashes, RS2xx saving and hangs, RS3xx memory and needless work,
RS4xx gradients, RS5xx policies, and RS6xx come from `lint`.

| finding | symptom, error text |
| --- | --- |
"""
_ERROR_WORDS = 6

_FIELDS = """\
# The result's fields

Every class of `result.json`, which `analyze --format json` prints too, as `field`: type. `?` is
`null` if unknown, `[]` a list, `{}` an object; unknown is never 0. JSON Schemas:
[result](schemas/result.json), and [comparison](schemas/comparison.json) of `compare --format json`.
"""

_PYTHON = """\
# Python interface

```python
import recompute_scan as rs

scan = rs.analyze("traces/doubled_llama_fsdp")  # a trace, a folder of one per rank, or s3://…
print(scan.verdict, scan.recompute_per_backward)
print(scan.regions[["module", "recompute_runs_per_backward", "redundant_ms_per_step"]])
for finding in scan.findings:
    print(finding.code, finding.title)
events = scan.trace.events
print(events[events["kind"] == "op"]["name"].value_counts().head(3))
```

The package loads torch, numpy and pandas only when needed.

## In a notebook

```text
%load_ext recompute_scan
```

```text
%%recompute before --steps 3
model, optimizer = build()
for batch in batches:
    train_step(model, optimizer, batch)
```

The cell runs as usual, then shows the scan, kept in `before`. Build the model in the cell to get
call sites. `%%recompute?` has the options ([notebooks](../notebooks/README.md)).

## Recording a loop

```python
import torch
from torch.utils.checkpoint import checkpoint

layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
optimizer = torch.optim.SGD(layers.parameters(), 0.1)


def forward(x, layer):
    return checkpoint(layer, x, use_reentrant=True)


with rs.record(steps=2, warmup=2, timing_steps=3) as recording:
    while not recording.done:
        x = torch.randn(4, 16, requires_grad=True)
        for layer in layers:
            x = checkpoint(forward, x, layer, use_reentrant=True)  # twice around each layer
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        recording.step()

print(recording.scan.verdict)
```

After its steps (`rs.record` below) recompute-scan leaves the process
([cost](how-well-it-works.md#recording)). An exception passes through, and `recording.scan` names a
known cause. One recording runs at a time.

Enter the block before the model is made to get call sites. `folder=` keeps what `run` writes; give
all ranks the same folder. If you run your own profiler, recording waits for it to end.

## Callbacks

Callbacks take `rs.record`'s arguments and [`trackers`](ci.md#trackers), and have a `scan` after
training.

```python
from recompute_scan.integrations import RecomputeScanCallback
from transformers import Trainer

callback = RecomputeScanCallback(steps=2, warmup=2, timing_steps=0)
Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
print(callback.scan.verdict)
```

```python
from lightning.pytorch import Trainer
from recompute_scan.integrations import RecomputeScanLightningCallback

callback = RecomputeScanLightningCallback(steps=2, warmup=2, timing_steps=0, folder="out/lightning")
Trainer(max_steps=6, callbacks=[callback]).fit(module, loader)
print(callback.scan.verdict)
```

With accelerate, use a tracker and log once at the end of each step.

```python
from accelerate import Accelerator
from recompute_scan.integrations import RecomputeScanTracker

tracker = RecomputeScanTracker(steps=2, warmup=2, timing_steps=0)
accelerator = Accelerator(log_with=[tracker])
accelerator.init_trackers("training")
for step in range(6):
    loss = layers[0](torch.randn(4, 16)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.log({"loss": loss.item()}, step=step)
accelerator.end_training()
print(tracker.scan.verdict)
```
"""


_TABLES = """\
pandas tables, a new one at each call. Unknown values are missing (`NaN`, `<NA>`), never 0.
"""
_COLUMNS = {
    "Scan.regions, one row a block in forward order, index `ordinal`": REGIONS,
    "Scan.families, one row a family of operators, index `family`": FAMILIES,
    "Scan.work, one row a group of operators that the step could do without, index `place`": WORK,
    "Scan.memory, one row a group of memory kept too long, index `place`": MEMORY,
    "Events.events, one row an event in the order of the file, index `event`": EVENTS,
}

_DIAGNOSES = """\
# Diagnoses: how they were checked

[The guide](../../docs/diagnoses.md) says how failures are recognized. Generated:
`python docs/generate.py`.

## How this was checked

`python -m benchmarks diagnoses` runs every script that fails (`tests/diagnose/scripts`) under
`recompute-scan run` and prints the expected and the found code. RS201 needs lightning 2.2.1 or
older; it was run with 2.2.1 in a separate environment, and its log is among the logs. RS101's log
is from transformers 4.57.3; the script in the tests raises the same error with a small model.
RS101, RS117, RS202 and RS204 have two more forms each in `scripts/forms`, under DDP and FSDP, with
and without a barrier. Each form has a repaired twin, which gets no diagnosis. `python -m benchmarks
diagnoses --reported` runs these with the versions of the reports, and with torch 2.4.1 ([every
row](live-failures.md)). Where rank 0 waits inside a saving function of the script, the answer is
RS210 with both places: a function's name is no evidence.

The logs are in `tests/diagnose/corpus`. `known` and `unrelated` are ours: one or more for each
known failure, and 55 others, with near misses among them. Those of a known failure come from our
scripts, or follow public reports where it could not be reproduced.

`public` has excerpts of logs from public threads, each with its repository, its number and the
cause that the thread established, or torch's message where that states the cause. They were labeled
before the rules were written. A hash of the thread's name halved them: the rules were built on one
half, and the other was kept aside until they were ready. The later parts below measure the first
answer: the one given before any rule was changed for that part, counted over "ours" unless stated
otherwise.

- **`later`:** public logs, collected after the rules. First answer: 14 of 20 right, 0 wrong. Then:
  three wordings added.
- **`newest`:** public logs, collected and labeled by someone who had not written the rules. First
  answer: 24 of 30 right; 6 of all 62 wrong, at medium confidence: a state copied for saving taken
  for a gathered one (4), a full /dev/shm for a crash in native code, an unknown weight for a
  sharded one. Then: those rules changed; of 13 further logs, the 3 of "ours" right and none wrong.
- **`written`:** 101 logs, written after public ones by someone who knew the rules, labeled by what
  their text proves before the program saw them. First answer: 28 of 29 right, 1 wrong: an inference
  engine that loads weights, taken for one that generates. Then: rules fixed on this half.
- **`written`, aside:** the other half, looked at once after that. First answer: 31 of 31 right; 1
  of all 49 wrong, at high confidence: feature maps of a convolution, twice as high, taken for a
  key-value cache. Then: that rule changed.
- **`threads`:** logs about checkpointing alone, labeled before the program saw them. With
  `threads-kept` 85: 68 named after new public threads, with the threads' error lines below invented
  stacks, and 17 unrelated errors. First answer: 15 of 29 right, 1 wrong, at high confidence: a
  torch too old to know use_reentrant. Then: rules fixed on these: 29 of 29.
- **`threads-kept`:** the other half. First answer: 6 of 21 right, 0 wrong; no log without a cause
  got one. Then: 16 of 21.
- **`recent`, second file:** 62 logs, split by the same hash. First answer: 11 of 13 and 10 of 12
  right, 0 wrong. Then: a shell's wording for a crash and an older DeepSpeed's for a gradient
  reduced twice, learned from one half: 12 of 13 and 11 of 12.
- **`recent`, third file:** 64 logs, chosen for other devices, launchers and servers. First answer:
  7 of 8 and 14 of 19 right, 0 wrong. Then: wordings added (memory of Apple's and other devices,
  crash handlers, lines of an `ExceptionGroup`, ZeRO-3's optimizer step): 8 of 8 and 18 of 19. Their
  author had labeled both halves, so neither is unseen now.
- **`recent`, fourth file:** 14 logs. First answer: 8 of 9 right, 0 wrong. Then: a message of torch
  from 2017 added. One written log, labeled "less is true" as Apple's wording was unknown, is now
  "ours".
- **`last`:** three batches, labeled and committed before the program saw them. First answer: first
  batch 11 of 21 and, in the half aside, 17 of 21; then 14 of 21 and 17 of 21. 1 of all 192 was
  counted wrong: a true cause that the label lacked by mistake. Then: most missing
  wordings added: Ray's monitor, shells, the kernel, Kubernetes, schedulers, gdb and Windows for an
  ended process; Lightning for unused parameters; older vLLM; tracebacks that begin in a log record;
  steps and evaluations in functions of other names.
- **`unseen`:** 48 logs, labeled and committed after that, scored once. First answer: 23 of 25
  right, 0 wrong. Then: nobody has looked at single answers; `python -m benchmarks diagnoses` says
  whether the rules have changed since.
- **`limits`:** 54 logs on RS130 to RS133, compiled recomputes and look-alikes, labeled before those
  rules were written. First answer: half aside, scored once: 13 of 13 right, 0 of 25 wrong. Then:
  rules fixed on the other half: 10 of 11. Their author had read both halves.

In `last`, labels of a dead loader worker were aligned with the older parts before the second half
was scored; with the earlier labels it was 11 of 27. The author of the labels of `last` and `unseen`
had read the rules and took what a search found, in excerpts of some 1,500 characters: memory that
runs out and launchers' messages are more frequent there. Eight logs of older parts, four of them in
`unseen`, got a code with RS130 to RS133 and were labeled again from their threads before they were
scored: that makes `unseen` 27 of 29.

"Ours": the excerpt shows a cause of the last table. "Not shown": the thread established such a
cause, and the excerpt does not show it. "None": no diagnosis, or one that is true and says less.

PUBLIC

A test checks that no log gets a wrong cause, that nine of ten of "ours" get theirs, and that every
diagnosis names its lines. `tests/diagnose/test_adversarial.py` has 82 misleading logs: interleaved
ranks, colors and timestamps before every line, logs cut short, chained exceptions, a warning about
saving before a crash. None gets a wrong cause. `tests/diagnose/test_forms.py` has 39 forms that
clusters, terminals and loggers give to known failures and look-alikes: of the first 28, 24 were
right at once, and none was wrong. JSON is read where one field holds the
printed text, as in the logs of Docker and Kaggle. No public log was found for
point-to-point calls, desync reports and the flight recorder: these were checked with our logs and
scripts only.

| code and cause | how it was checked |
| --- | --- |
"""

_WITHOUT_A_SIGN = """\

Two known failures are not recognized, as their logs look like others: memory that grows with
reentrant checkpoints under FSDP2 until it runs out ([pytorch
169349](https://github.com/pytorch/pytorch/issues/169349); RS120 says so), and saving a compiled
FSDP model through its wrapper ([pytorch 119980](https://github.com/pytorch/pytorch/issues/119980);
save the inner module)."""


def commands_page() -> str:
    """The help of every command, as Markdown."""
    asked = [[], *([name] for name in sorted(NAMES))]
    return _COMMANDS + "".join(map(_help, asked))


def _help(command: list[str]) -> str:
    environment = {"NO_COLOR": None, "FORCE_COLOR": "1", "COLUMNS": f"{_WIDTH}"}
    printed = CliRunner(env=environment).invoke(
        cli, [*command, "--help"], prog_name="recompute-scan"
    )
    title = " ".join(["recompute-scan", *command])
    text = re.sub(r" +$", "", unstyle(printed.output).rstrip(), flags=re.MULTILINE)
    return f"\n## {title}\n\n```text\n{text}\n```\n"


def fields_page() -> str:
    """Every class of the result with its fields and their types, as Markdown."""
    definitions = json_schema()["$defs"]
    first = ["Result", *sorted(name for name in definitions if name != "Result")]
    return _FIELDS + "".join(_section(name, definitions[name]) for name in first)


def _section(name: str, definition: Mapping[str, Any]) -> str:
    fields = [f"`{field}`: {_type(schema)}" for field, schema in definition["properties"].items()]
    shown = textwrap.wrap(", ".join(fields), 100, break_long_words=False, break_on_hyphens=False)
    return f"\n## {name}\n\n" + "\n".join(shown) + "\n"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        kinds = [one for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(map(_type, kinds)) + "?" * (len(kinds) < len(schema["anyOf"]))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return "/".join(f"`{value}`" if value else '`""`' for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"{_type(schema.get('items', {}))}[]"
    if kind == "object":
        return f"{_type(schema.get('additionalProperties') or {})}{{}}"
    return str(kind)


def python_page() -> str:
    """The Python interface: its functions and classes, and the columns of its tables."""
    parts = [_PYTHON, "\n## Functions\n"]
    parts += [_function(name) for name in ("analyze", "record", "compare", "load_result")]
    parts += ["\n## Scan\n", _class(Scan), "\n## Events\n", _class(Events)]
    parts += ["\n## Recording\n", _class(Recording), "\n## Tables\n\n", _TABLES]
    for title, columns in _COLUMNS.items():
        rows = [
            f"- `{c.name}` ({c.dtype}{f', {c.unit}' * bool(c.unit)}): {c.about}\n" for c in columns
        ]
        parts.append(f"\n### {title}\n\n{''.join(rows)}")
    return "".join(parts)


def _function(name: str) -> str:
    function = getattr(importlib.import_module("recompute_scan.api"), name, record)
    shown = f"rs.{name}{_signature(function)}"
    return f"\n### rs.{name}\n\n```text\n{_broken(shown)}\n```\n\n{_docstring(function)}"


def _class(kind: type) -> str:
    rows = []
    for name, member in vars(kind).items():
        if name.startswith("_") or not getattr(member, "__doc__", None):
            continue
        if isinstance(member, (property, cached_property)):
            getter = member.fget if isinstance(member, property) else member.func
            shown = f"`.{name}` | {_marked(inspect.signature(getter).return_annotation)}"
        elif callable(member):
            taken = re.sub(r"self(, )?", "", _signature(member)).partition(" -> ")[0]
            shown = f"`.{name}{taken}`"
            shown += f" | {_marked(inspect.signature(member).return_annotation)}"
        else:
            continue
        first = " ".join(inspect.cleandoc(member.__doc__).partition("\n\n")[0].split())
        rows.append(f"| {shown} | {_plain(first)} |\n".replace(" | None", " or None"))
    return f"\n{_docstring(kind)}\n| | | |\n| --- | --- | --- |\n{''.join(rows)}"


def _signature(function: Callable[..., object]) -> str:
    """As it is written: annotations are text already, and would be quoted."""
    return re.sub(r"(: |-> )(['\"])(.*?)\2(?=[,)]| =|$)", r"\1\3", str(inspect.signature(function)))


def _docstring(thing: object) -> str:
    """A docstring as Markdown: what is under a heading becomes a list."""
    lines = []
    listed = False
    for line in inspect.cleandoc(thing.__doc__ or "").splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns):", line):
            listed = True
            lines.append(f"{line[:-1]}:\n")
        elif listed and (item := re.fullmatch(r"    ([\w.]+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            lines.append(f"  {line.strip()}" if listed and line else line)
    return _plain("\n".join(lines)).rstrip() + "\n"


def _plain(text: str) -> str:
    """Without the roles of reStructuredText."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def _marked(annotation: str) -> str:
    return f"`{annotation}`" if annotation != "None" else ""


def _broken(signature: str) -> str:
    """One argument a line where it is too long for one."""
    if len(signature) <= _WIDTH:
        return signature
    opening, _, rest = signature.partition("(")
    arguments, _, result = rest.rpartition(") -> ")
    parts = re.split(r", (?![^\[]*\])", arguments)
    return f"{opening}(\n" + "".join(f"    {part},\n" for part in parts) + f") -> {result}"


def diagnoses_page() -> str:
    """Every known failure with how it was checked, as Markdown."""
    rows = [
        f"| [{one.code}](../../docs/findings/{one.code}.md) {one.cause_name} | {_checked(one)} |\n"
        for one in sorted((*SIGNATURES, *IN_RUNS, *HANGS), key=lambda one: one.code)
    ]
    return _DIAGNOSES.replace("PUBLIC\n", _public()) + "".join(rows) + _WITHOUT_A_SIGN


def _public() -> str:
    """How the logs of public threads, and the written ones, are answered."""
    rows = [
        "| part | shows | logs | right | none | wrong |\n| --- | --- | --- | --- | --- | --- |\n"
    ]
    for one in scores([*public_logs(), *written_logs()]):
        figures = " | ".join(str(one.outcomes[name]) for name in OUTCOMES)
        rows.append(f"| {one.half} | {one.group} | {one.logs} | {figures} |\n")
    return "".join(rows)


def _checked(one: Signature) -> str:
    return "reproduced by a script, on CPU" if one.checked == "reproduced" else "by logs only"


def failure_pages() -> dict[str, str]:
    """The page of every known failure, by its name below ``docs``."""
    return {
        f"findings/{code}.md": failure_page(code, [_example(one) for one in causes_of(code)])
        for code in FAILURES
    }


def findings_page() -> str:
    """Every finding with its error text or symptom, as Markdown."""
    rows = []
    for path in sorted((DOCS / "findings").glob("RS*.md")):
        text = path.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        symptom = re.search(r"^\| Symptom \| (.*) \|$", text, re.MULTILINE)
        logs = re.findall(r"^```text\n(.*?)$", text, re.MULTILINE)
        errors = filter(None, map(_error, logs))
        shown = next((f" `{error}`" for error in errors), "")
        rows.append(f"| [{title}]({path.name}) | {symptom[1] if symptom else ''}.{shown} |\n")
    return _FINDINGS + "".join(rows)


def _error(line: str) -> str:
    """The words of a log's line that a reader would search for."""
    logged = (
        r"^(?:\[[^\]]*\]:? ?)+ *(?:[\d-]+ [\d:,]+ >> )?|^/\S+:\d+: |^[\w.]*(?:Error|Exception): "
    )
    text = re.sub(logged, "", line.rstrip("… "))
    text = re.sub(r"^torch\.utils\.checkpoint: ", "", text).replace("|", "").replace("`", "")
    words = text.split()
    return " ".join(words[:_ERROR_WORDS])


def _example(one: Signature) -> str | None:
    """What a log of this failure says, from the tests' logs."""
    path = LOGS / f"{one.code}-{one.cause_name}.log"
    if not path.exists():
        return None
    with path.open("rb") as file:
        log = read_log(lines_of(file))
    text = path.read_text(encoding="utf-8").splitlines()
    lines = [line for line in text if one.message.search(line)]
    said = [
        # read_log takes a last backtick for Markdown's.
        f"{raised.type}: {raised.message}{'`' * (raised.message.count('`') % 2)}"
        for failure in log.failures
        for raised in failure.errors
        if one.message.search(raised.message) and not log.timeouts
    ]
    if log.timeouts:
        ended = (text[timeout.line - 1] for timeout in log.timeouts)
        # Without the source file in front, a cut line still shows the collective's type.
        said = ["\n".join(re.sub(r"^.*? (?=\[)", "", line) for line in ended)]
    shown = next(iter((*said, *lines)), None)
    if shown is None:
        return None
    lines = [_cut(line) for line in shown.splitlines()]
    lines = lines[:_EXAMPLE_LINES]
    while len(lines) > 1 and lines[-1].endswith(":"):
        lines.pop()
    return "\n".join(lines).rstrip()


def _cut(line: str) -> str:
    """A long line up to a sentence's end, or else a word's, and an ellipsis."""
    line = re.sub(r"^/\S+:\d+: (?=\w+Warning: )|\[enforce fail at \S+\] err == 0\. ", "", line)
    if len(line) <= _EXAMPLE_WIDTH:
        return line
    start = line[:_EXAMPLE_WIDTH]
    end = start.rfind(". ") + 1
    return f"{start[: end or start.rfind(' ')]} …"


def design_page() -> str:
    """The design, with the house as it is."""
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(_HOUSE)
    _, _, after = rest.partition(_END_OF_HOUSE)
    return f"{before}{_HOUSE}\n\n{rooms()}\n{_END_OF_HOUSE}{after}"


def report_page(path: Path) -> str:
    """A report made again from the result that it holds.

    One more is made with ``recompute-scan report RESULT --html docs/pages/NAME.html``.
    """
    held = _RESULT.search(path.read_text(encoding="utf-8"))
    if held is None:
        raise ValueError(f"{path} holds no result")
    result = from_json(html.unescape(held[1]))
    return render_html(result, folder=recorded_into(result))


PAGES = {
    "commands.md": commands_page,
    "design.md": design_page,
    "python-api.md": python_page,
    "../benchmarks/results/diagnoses.md": diagnoses_page,
    "findings/index.md": findings_page,
    "result-fields.md": fields_page,
} | {name: (lambda text=text: text) for name, text in failure_pages().items()}
PAGES |= {
    f"pages/{path.name}": (lambda path=path: report_page(path))
    for path in sorted((DOCS / "pages").glob("*.html"))
}
PAGES |= {name: (lambda svg=svg: svg) for name, svg in badges().items()}


if __name__ == "__main__":
    for kind, schema in {
        "result": json_schema,
        "comparison": comparison_schema,
        "event": event_schema,
    }.items():
        path = DOCS / "schemas" / f"{kind}.json"
        path.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
    for page, write in PAGES.items():
        (DOCS / page).write_text(write(), encoding="utf-8")
