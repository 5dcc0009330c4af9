"""Results as real runs give them, for the renderings to be tried on."""

from msgspec import structs

from recompute_scan.result import (
    Arm,
    Attention,
    Breakdown,
    Checked,
    Checkpoint,
    Cost,
    DeviceTime,
    Family,
    Finding,
    Fix,
    Flops,
    Hta,
    Losses,
    Memory,
    MemoryPlan,
    Proof,
    ProofLane,
    ProofOp,
    Rank,
    Region,
    RegionMemory,
    Result,
    Step,
    Verified,
    WithPlan,
)

OUTER = Checkpoint(
    depth=0,
    variant="non-reentrant",
    mechanism="fsdp-wrapper",
    call_site="train.py:31",
    source="apply_activation_checkpointing(model, checkpoint_wrapper_fn=non_reentrant_wrapper)",
)
INNER = Checkpoint(
    depth=1,
    variant="reentrant",
    mechanism="gradient-checkpointing-enable",
    call_site="train.py:24",
    source='model.gradient_checkpointing_enable({"use_reentrant": True})',
)

DIFF = "\n".join(
    (
        "--- a/train.py",
        "+++ b/train.py",
        "@@ -21,6 +21,6 @@",
        " model = LlamaForCausalLM(config)",
        " model.train()",
        " ",
        '-model.gradient_checkpointing_enable({"use_reentrant": True})',
        " ",
        " model = FullyShardedDataParallel(model, auto_wrap_policy=policy)",
        "+model.config.use_cache = False",
        "",
    )
)

# name, family, µs: one Llama decoder layer on a CPU, in order
LAYER_OPS = (
    ("aten::mean", "norm", 31.0),
    ("aten::mul", "elementwise", 42.0),
    ("aten::linear", "gemm", 410.0),
    ("aten::linear", "gemm", 155.0),
    ("aten::linear", "gemm", 152.0),
    ("aten::cat", "copy", 38.0),
    ("aten::scaled_dot_product_attention", "attention", 1270.0),
    ("aten::linear", "gemm", 405.0),
    ("aten::add", "elementwise", 24.0),
    ("aten::mean", "norm", 30.0),
    ("aten::mul", "elementwise", 40.0),
    ("aten::linear", "gemm", 1080.0),
    ("aten::silu", "activation", 210.0),
    ("aten::linear", "gemm", 1065.0),
    ("aten::mul", "elementwise", 118.0),
    ("aten::linear", "gemm", 1090.0),
    ("aten::add", "elementwise", 25.0),
)


def _ops(start: float, *, slower: float = 1.0, prefix: str = "") -> tuple[ProofOp, ...]:
    found, at = [], start
    for name, family, duration in LAYER_OPS:
        took = duration * slower
        found.append(ProofOp(prefix + name, family, at, took))
        at += took + 14.0
    return tuple(found)


def _lane(label: str, kind: str, start: float, **how: object) -> ProofLane:
    ops = _ops(start, **how)  # type: ignore[arg-type]
    length = ops[-1].start_us + ops[-1].duration_us - start
    return ProofLane(label, kind, start, length, ops)  # type: ignore[arg-type]


def proof(recomputes: int) -> Proof:
    """One layer of step 2: forward, as many recomputes as asked for, backward."""
    base = 1_700_000_598_213.4
    lanes = [_lane("forward", "forward", base)]
    for number in range(recomputes):
        kind = "recompute" if number == 0 else "redundant"
        lanes.append(_lane(f"recompute {number + 1}", kind, base + 91_000.0 + 7_300.0 * number))
    lanes.append(_lane("backward", "backward", base + 106_500.0, slower=1.9, prefix="grad "))
    return Proof(region=3, step=2, lanes=tuple(lanes))


def regions(number: int, recomputes: float, *checkpoints: Checkpoint) -> tuple[Region, ...]:
    """Llama decoder layers."""
    return tuple(
        Region(
            ordinal=ordinal,
            module=f"model.layers.{ordinal}",
            module_class="LlamaDecoderLayer",
            signature="aten::mean,aten::mul,aten::linear",
            forward_runs_per_step=1.0,
            recompute_runs_per_backward=recomputes,
            mean_recompute=max(0.0, recomputes - 0.03),
            forward_ms_per_step=6.17,
            recompute_ms_per_step=6.2 * recomputes,
            redundant_ms_per_step=6.2 * max(0.0, recomputes - 1),
            checkpoints=checkpoints,
        )
        for ordinal in range(number)
    )


def cost(forward: float, recompute: float, redundant: float, saved: float) -> Cost:
    """A step whose backward is twice its forward."""
    parts = Breakdown(forward, recompute, redundant, 2 * forward, 31.5, 12.2)
    step = forward + recompute + redundant + 2 * forward + 31.5 + 12.2
    return Cost(
        step_ms=step,
        step_source="timed",
        device="cpu",
        recompute_ms=recompute + redundant,
        redundant_recompute_ms=redundant,
        repeated_collectives_ms=None,
        predicted_step_ms=step - saved,
        predicted_low_ms=step - saved * 1.15,
        predicted_high_ms=step - saved * 0.8,
        saving_pct=100 * saved / step,
        breakdown=parts,
        method="Median duration of the redundant recomputes on the thread that limits the step.",
        assumptions=("The rest of the step takes as long without the redundant recomputes.",),
        step_low_ms=0.99 * step,
        step_high_ms=1.02 * step,
        steps=10,
    )


STEPS = tuple(
    Step(
        index=index,
        start_us=1_700_000_000_000.0 + 296_000.0 * index,
        duration_ms=295.0 + index,
        complete=index < 4,
        micro_batches=1,
        forward_ops=1360,
        recomputed_ops=2688,
    )
    for index in range(5)
)

FAMILIES = (
    Family("gemm", "gemm", 57.0, 112.0, 113.0, 72.4),
    Family("scaled_dot_product_attention", "attention", 8.0, 16.0, 8.0, 20.3),
    Family("elementwise", "pointwise", 120.0, 232.0, 118.5, 6.5),
)

FLOPS = Flops(
    forward_per_step=3.77e9,
    backward_per_step=7.68e9,
    recompute_per_step=7.01e9,
    redundant_per_step=3.51e9,
    hfu_over_mfu=1.612,
    mfu=0.238,
    hfu=0.384,
    peak_tflops=0.18,
    peak_source="as given",
    uncounted=("flash_attn::_flash_attn_varlen_forward",),
)

MEMORY = Memory(
    device="gpu",
    peak_allocated_bytes=41 << 30,
    peak_reserved_bytes=44 << 30,
    capacity_bytes=80 << 30,
    reserve_bytes=8 << 30,
    budget_bytes=69 << 30,
    regions=tuple(RegionMemory(place, 5 << 30) for place in range(8)),
    plans=(
        MemoryPlan((), 248.0, 41 << 30),
        MemoryPlan((3, 4, 5, 6, 7), 217.0, 66 << 30),
        MemoryPlan(tuple(range(8)), 199.0, 81 << 30),
    ),
    chosen=1,
)
HTA = Hta(
    281.4,
    12.5,
    71.3,
    16.2,
    38.1,
    {"computation": 84.0, "communication": 16.0},
    rank=1,
    own=DeviceTime(281.4, 12.6, 71.2, 16.3, 38.2),
)

FINDING = Finding(
    code="RS001",
    name="doubled-checkpoint",
    severity="error",
    confidence="high",
    title="Two checkpoints around the same 8 layers recompute each of them twice",
    detail=(
        "PyTorch's checkpoint_wrapper (train.py:31) stands around every decoder layer, and inside "
        "it Hugging Face's own checkpoint (train.py:24) stands around the same layer. The inner "
        "one is reentrant, so each recompute of the outer one recomputes the layer once more."
    ),
    evidence=(
        "8 of 8 decoder layers ran their forward pass 3 times: 1 original, 2 recomputes.",
        "Attention ran forward 8 times per step and again 16 times in the backward pass.",
    ),
    fix=Fix(
        summary="drop gradient_checkpointing_enable and keep the FSDP wrapper",
        disposition="safe",
        diff=DIFF,
        keep="apply_activation_checkpointing at train.py:31",
        remove="model.gradient_checkpointing_enable at train.py:24",
        docs="https://docs.pytorch.org/docs/stable/checkpoint.html",
        removes=INNER,
    ),
    saving_ms=48.2,
    saving_pct=16.4,
)

CHECKED = (
    Checked("RS001", "doubled-checkpoint", "found"),
    Checked("RS002", "nested-checkpoint", "clean", "no nesting that would double elsewhere"),
)

ENVIRONMENT = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "python": "3.11.2",
    "device": "cpu",
    "target": "examples/train.py",
}


def doubled() -> Result:
    """The reported case in small: 8 Llama layers, both checkpoints, 2 recomputes each."""
    return Result(
        tool_version="0.1.0",
        verdict="doubled",
        evidence_level="annotated",
        confidence="high",
        reason=None,
        headline=(
            "Doubled checkpointing: all 8 decoder layers run their forward pass 2 times again in "
            "the backward pass, where once is enough."
        ),
        recompute_per_backward=2.0,
        mean_recompute=1.97,
        recomputed_share=0.97,
        attention=Attention(8.0, 16.0, 8.0),
        steps=STEPS,
        families=FAMILIES,
        regions=regions(8, 2.0, OUTER, INNER),
        cost=cost(51.0, 49.6, 49.6, 48.2),
        findings=(FINDING,),
        checked=CHECKED,
        ranks=(
            Rank(0, "trace-rank0.json.gz", "doubled", 296.9),
            Rank(1, "trace-rank1.json.gz", "doubled", None),
        ),
        health={"steps_cut_short": 1, "events_without_duration": 0, "events": 48213},
        environment=ENVIRONMENT,
        warnings=("The last recorded step was cut short and left out of the counts.",),
        proof=proof(2),
        flops=FLOPS,
        memory=MEMORY,
        hta=HTA,
    )


def measurement() -> Verified:
    """What `run --verify` might have found of the doubled result."""
    before = Arm("measured", None, 2, 20, 296.1, 294.0, 299.5, None, None, 912_000_000)
    before = structs.replace(before, verdict="doubled", recompute_per_backward=2.0)
    after = Arm("measured", None, 2, 20, 246.9, 245.1, 248.8, None, None, 911_000_000)
    after = structs.replace(after, verdict="full", recompute_per_backward=1.0)
    planned = Arm("measured", None, 2, 20, 221.4, 219.0, 225.2, 65 << 30, 70 << 30, 913_000_000)
    return Verified(
        outcome="helps",
        removed=(INNER,),
        before_step_ms=296.1,
        after_step_ms=246.9,
        saving_ms=49.2,
        saving_low_ms=45.2,
        saving_high_ms=54.4,
        saving_pct=100 * 49.2 / 296.1,
        more_time_pct=100 * 49.2 / 246.9,
        before_peak_bytes=912_000_000,
        after_peak_bytes=911_000_000,
        losses_equal=True,
        losses=Losses("equal", 13, 0.0, 0.0, True),
        before=before,
        after=after,
        with_plan=WithPlan(("model.layers.3",), planned, Losses("equal", 13, 0.0, 0.0, True)),
    )


def verified() -> Result:
    """The doubled result with its fix measured."""
    return structs.replace(doubled(), verified=measurement())


def full() -> Result:
    """The repaired twin: every layer recomputed once."""
    return structs.replace(
        doubled(),
        verdict="full",
        headline="Ordinary checkpointing: all 8 decoder layers are recomputed exactly once.",
        recompute_per_backward=1.0,
        mean_recompute=0.98,
        regions=regions(8, 1.0, OUTER),
        attention=Attention(8.0, 8.0, 8.0),
        cost=cost(51.0, 49.6, 0.0, 0.0),
        findings=(),
        checked=tuple(structs.replace(rule, status="clean", why=None) for rule in CHECKED),
        ranks=(Rank(0, "trace-rank0.json.gz", "full", 247.1),),
        health={},
        warnings=(),
        proof=proof(1),
    )


def clean() -> Result:
    """No checkpoint at all."""
    return structs.replace(
        full(),
        verdict="none",
        headline="No forward work runs again in the backward pass.",
        recompute_per_backward=0.0,
        mean_recompute=0.0,
        recomputed_share=0.0,
        regions=regions(8, 0.0),
        attention=Attention(8.0, 0.0, 8.0),
        cost=cost(51.0, 0.0, 0.0, 0.0),
        proof=None,
    )


def partial() -> Result:
    """Every second layer checkpointed, in a trace of plain torch.profiler without modules."""
    blocks = tuple(
        structs.replace(
            region,
            module=None,
            module_class=None,
            recompute_runs_per_backward=float(region.ordinal % 2),
            recompute_ms_per_step=6.2 * (region.ordinal % 2),
            redundant_ms_per_step=0.0,
            checkpoints=(Checkpoint(0, None),) if region.ordinal % 2 else (),
        )
        for region in regions(8, 1.0)
    )
    return structs.replace(
        full(),
        verdict="partial",
        evidence_level="autograd",
        confidence="medium",
        headline="Selective checkpointing: 4 of 8 blocks are recomputed, once each.",
        mean_recompute=0.48,
        recomputed_share=0.48,
        regions=blocks,
        cost=cost(51.0, 24.8, 0.0, 0.0),
        proof=None,
        environment={},
    )


def inconclusive() -> Result:
    """A trace of forward passes only."""
    return Result(
        tool_version="0.1.0",
        verdict="inconclusive",
        evidence_level="autograd",
        confidence="low",
        reason="The trace holds no backward pass.",
        headline="No verdict: the trace holds no backward pass.",
        recompute_per_backward=None,
        mean_recompute=None,
        recomputed_share=None,
        attention=None,
        steps=(),
        families=(),
        regions=(),
        cost=None,
        findings=(),
        checked=(Checked("RS001", "doubled-checkpoint", "not-applicable", "no backward pass"),),
        ranks=(),
        health={},
        environment={},
        warnings=(),
    )


def many(number: int) -> Result:
    """A deep model whose last block differs from all others."""
    blocks = regions(number, 2.0, OUTER, INNER)
    last = structs.replace(blocks[-1], recompute_runs_per_backward=1.0, checkpoints=(OUTER,))
    return structs.replace(doubled(), regions=(*blocks[:-1], last))


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' autofocus onfocus='alert(1)",
    "</pre></code><a href=javascript:alert(1)>x",
    "]]><!-- --><svg/onload=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "\x1b[31mred\x1b[0m\x07\x9b2J",
    "evil\u202etxt.exe\u2066\u200b\u2028\r\nnext\tline",
    "```\n# heading\n@everyone see #1 http://example.org www.example.org",
    "`` ` ``|[x](http://example.org)![i](x)<b>*bold*_it_~~",
    "<b>bold</b><br><a href='http://example.org'>x</a> $x^2$ %{y} &lt;",
    "x" * 5000,
    "",
)


def hostile(name: str) -> Result:
    """The doubled result with ``name`` wherever a trace or a script could put one."""
    base = doubled()
    checkpoint = Checkpoint(0, "reentrant", name, name, name)
    fix = Fix(name, "review", f"-{name}\n+{name}", name, name, name)
    lanes = tuple(
        structs.replace(
            lane,
            label=name,
            ops=tuple(structs.replace(op, name=name, family=name) for op in lane.ops),
        )
        for lane in proof(2).lanes
    )
    assert base.cost is not None
    return structs.replace(
        base,
        tool_version=name,
        headline=name,
        reason=name,
        families=(Family(name, name, 1.0, 2.0, 1.0, 0.5),),
        regions=tuple(
            structs.replace(
                region, module=name, module_class=name, signature=name, checkpoints=(checkpoint,)
            )
            for region in base.regions
        ),
        cost=structs.replace(base.cost, method=name, assumptions=(name,)),
        findings=(
            Finding(name, name, "error", "high", name, name, (name,), fix, 1.0, 1.0),
            Finding(name, name, "info", "low", name, name, (name,), None, None, None),
        ),
        checked=(Checked(name, name, "error", name),),
        ranks=(Rank(0, name, "doubled", 1.0), Rank(1, name, "doubled", 1.0)),
        health={name: 3},
        environment={name: name, "target": f"{name}.py"},
        warnings=(name,),
        proof=Proof(region=3, step=2, lanes=lanes),
        verified=structs.replace(measurement(), removed=(checkpoint,)),
    )
