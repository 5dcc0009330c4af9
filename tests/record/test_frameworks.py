"""Real frameworks switch checkpointing on; annotations name the mechanism and the line to change.

Each script is run as it stands, on the CPU, with one process. The diff that the advice gives for
the named line is applied to a copy, and the copy run too: then that checkpoint is gone.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from recompute_scan.advise.choice import take_out
from recompute_scan.annotations import RegionAnnotation
from recompute_scan.frameworks.registry import find_mechanism
from recompute_scan.result import Checkpoint
from recompute_scan.result.patch import apply
from recompute_scan.result.patch import changed as patched
from tests.record.runs import Recorded, record_script, record_target
from tests.report.sample_results import doubled

pytestmark = pytest.mark.slow

LLAMA = """\
import functools, os, sys, warnings
warnings.simplefilter("ignore")
os.environ["TQDM_DISABLE"] = "1"
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, Trainer, set_seed
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, use_cache=False,
))
tokens = torch.randint(0, 32, (2, 8))

def train(model, parameters, prepare=lambda *both: both, backward=torch.Tensor.backward):
    model, optimizer = prepare(model, torch.optim.SGD(parameters, 1e-3))
    model.train()
    for step in range(9):
        backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()

def join():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

TRAINER = (
    LLAMA
    + """\
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(  # SWITCH
    "out-trainer", use_cpu=True, max_steps=9, report_to=[], logging_strategy="no",
    save_strategy="no", disable_tqdm=True, activation_checkpointing=True,
)
Trainer(model, arguments, train_dataset=data).train()
"""
)

KBIT = (
    LLAMA
    + """\
from peft import prepare_model_for_kbit_training
model.is_loaded_in_8bit = True  # what quantisation would set; it needs a GPU
model = prepare_model_for_kbit_training(model)  # SWITCH
model.lm_head.weight.requires_grad_(True)
train(model, [model.lm_head.weight])
"""
)

ACCELERATE = (
    LLAMA
    + """\
join()
from accelerate import Accelerator, FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin(  # SWITCH
    fsdp_version=VERSION,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    activation_checkpointing=True,
    use_orig_params=None if VERSION == 2 else True,
    state_dict_type="SHARDED_STATE_DICT",
)
accelerator = Accelerator(cpu=True)
accelerator.state.fsdp_plugin = plugin
accelerator.state.distributed_type = accelerator.state._shared_state["distributed_type"] = "FSDP"
train(model, model.parameters(), accelerator.prepare, accelerator.backward)
"""
)

NATIVE = (
    LLAMA
    + """\
model.activation_checkpointing_enable()  # SWITCH
train(model, model.parameters())
"""
)

SELECTIVE = """\
import functools, torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
optimizer = torch.optim.SGD(layer.parameters(), 1e-3)
for step in range(9):
    x = torch.randn(4, 8)
    x = checkpoint(layer, x, use_reentrant=False, context_fn=keep)  # SWITCH
    x.sum().backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Framework:
    name: str
    script: str
    variant: str
    module_class: str = "LlamaDecoderLayer"
    options: str = ""


FRAMEWORKS = [
    Framework("hf-gradient-checkpointing", NATIVE, "non-reentrant"),
    Framework("hf-trainer", TRAINER, "non-reentrant"),
    # It passes on an empty dictionary, and so torch's default and not that of transformers.
    Framework("peft-kbit", KBIT, "reentrant"),
    Framework("accelerate-fsdp", ACCELERATE.replace("VERSION", "1"), "non-reentrant"),
    Framework(
        "accelerate-fsdp",
        ACCELERATE.replace("VERSION", "2"),
        "non-reentrant",
        options="random-state-not-kept",  # fsdp2_apply_ac passes preserve_rng_state=False
    ),
    Framework("selective-checkpoint", SELECTIVE, "non-reentrant", "Sequential", "selective"),
]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_the_mechanism_is_named_and_its_diff_takes_it_out(
    tmp_path: Path, framework: Framework
) -> None:
    recorded = record_script(tmp_path, framework.script, steps=1)
    assert recorded.status == 0, recorded.stderr
    annotations = recorded.trace().regions
    line = next(
        n for n, text in enumerate(framework.script.splitlines(), 1) if text.endswith("# SWITCH")
    )
    site = f"train.py:{line}"
    assert {describe(annotation) for annotation in annotations} == {
        (framework.name, framework.variant, site, framework.module_class, framework.options)
    }
    assert changed(tmp_path, recorded, annotations[0]).trace().regions == []


def describe(annotation: RegionAnnotation) -> tuple[str, ...]:
    said = (annotation.mechanism, annotation.variant, annotation.site)
    return (*said, annotation.module_class, annotation.options)


def changed(folder: Path, recorded: Recorded, annotation: RegionAnnotation) -> Recorded:
    """The same script once more, with the advised diff applied."""
    mechanism = find_mechanism(annotation.mechanism)
    assert mechanism is not None
    dropped = Checkpoint(0, None, annotation.mechanism, annotation.site)
    fix = take_out(dropped, mechanism, recorded.info.sources)
    assert fix.diff is not None
    (finding,) = doubled().findings
    result = replace(doubled(), findings=(replace(finding, fix=fix),), regions=())
    apply(patched(result, folder), folder)
    again = record_target(folder, "train.py", steps=1, warmup=2, timing_steps=0)
    assert again.status == 0, again.stderr
    return again
