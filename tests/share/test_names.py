"""Which names stay, and what becomes of the others."""

import subprocess
import sys
from importlib.resources import files

import pytest

from recompute_scan.annotations import RegionAnnotation, parse_region, region_name
from recompute_scan.bundle.names import ATTENTION, Names, Places, names_of
from recompute_scan.bundle.redact import clean_environment, device_name
from recompute_scan.recompute.attention_kernels import FAMILIES, attention_role
from recompute_scan.recompute.regions import family_of_node
from recompute_scan.recompute.vocabulary import ENGINE, family_of
from recompute_scan.trace import Kind
from tests.share.operators import operators, words

STAY = [
    (Kind.OP, "aten::addmm"),
    (Kind.OP, "CheckpointFunction"),
    (Kind.OP, "torch::autograd::AccumulateGrad"),
    (Kind.OP, "MaxPool2DWithIndicesBackward0"),
    (Kind.OP, ENGINE + "AddmmBackward0"),
    (Kind.OP, "Torch-Compiled Region: 0/1"),
    (Kind.ANNOTATION, "ProfilerStep#12"),
    (Kind.ANNOTATION, "Optimizer.step#AdamW.step"),
    (Kind.ANNOTATION, "FullyShardedDataParallel._pre_forward"),
    (Kind.ANNOTATION, "nccl:all_reduce"),
    (Kind.RUNTIME, "cudaLaunchKernel"),
    (Kind.COPY, "Memcpy HtoD (Pinned -> Device)"),
    (Kind.COPY, "Memcpy DtoH"),
    (Kind.COPY, "Memcpy M2D (MEMORY(Unknown) -> DEVICE)"),
    (Kind.COPY, "CopyDeviceToHost"),
]
PRIVATE = [
    (Kind.OP, "/home/alice/op", "op"),
    (Kind.OP, "op with spaces", "op"),
    (Kind.ANNOTATION, "forward of customer 7", "range"),
    (Kind.ANNOTATION, "attention", "range"),
    (Kind.KERNEL, "/home/alice/kernel.cu", "kernel"),
    (Kind.KERNEL, "--password=alice", "kernel"),
    (Kind.KERNEL, "alice works here", "kernel"),
    (Kind.RUNTIME, "alice", "call"),
    (Kind.COPY, "Memcpy of alice", "call"),
    (Kind.COPY, "Memcpy HtoD of alice", "call"),
]
OWN = [
    (Kind.OP, "mine::flash_attn_forward"),
    (Kind.OP, "FlashAttnFunc"),
    (Kind.OP, "FlashAttnFuncBackward"),
    (Kind.OP, "FusedLayerNormAffineFunctionBackward"),
    (Kind.OP, "_LayerNorm"),
    (Kind.OP, "MyLossBackward"),
    (Kind.OP, "Mine"),
]


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize(("kind", "name"), STAY)
def test_names_of_frameworks_stay(kind: int, name: str, strict: bool) -> None:
    assert Names(strict).event(name, kind) == name


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::(anonymous namespace)::softmax<float const*, 4, unsigned long>(bool)",
        "triton_poi_fused_add_0",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int>(int)",
    ],
)
def test_names_of_kernels_stay_unless_strict(name: str) -> None:
    assert Names(strict=False).event(name, Kind.KERNEL) == name
    assert Names(strict=True).event(name, Kind.KERNEL).startswith("private_kernel_1")


@pytest.mark.parametrize(("kind", "name", "what"), PRIVATE)
def test_other_names_become_aliases(kind: int, name: str, what: str) -> None:
    names = Names(strict=False)
    assert names.event(name, kind).startswith((f"private_{what}_1", f"Private_{what}_1"))
    assert names.event(name, kind) == names.event(name, kind)


@pytest.mark.parametrize(("kind", "name"), OWN)
def test_own_names_become_aliases_of_the_same_family_when_strict(kind: int, name: str) -> None:
    assert Names(strict=False).event(name, kind) == name
    alias = Names(strict=True).event(name, kind)
    assert alias.lower().startswith("private_")
    assert family_of(alias) == family_of(name)
    assert family_of_node(ENGINE + alias) == family_of_node(ENGINE + name)
    if name.endswith("Backward"):
        assert alias.endswith("Backward")


def test_attention_kernels_stay_evidence_when_strict() -> None:
    assert set(ATTENTION) == {family.name for family in FAMILIES}
    for family, spellings in ATTENTION.items():
        for direction, spelling in zip(("forward", "backward"), spellings, strict=True):
            name = spelling.format("alice")
            assert attention_role(name) == (family, direction)
            alias = Names(strict=True).event(name, Kind.KERNEL)
            assert attention_role(alias) == (family, direction)
            assert "alice" not in alias


def test_a_node_and_its_range_keep_to_each_other() -> None:
    names = Names(strict=True)
    assert names.event(ENGINE + "MineBackward", Kind.OP) == ENGINE + names.event(
        "MineBackward", Kind.OP
    )


def test_a_mark_is_written_anew() -> None:
    annotation = RegionAnnotation(
        call=900, depth=0, variant="alice", module="net.3", module_class="Net", mechanism="alice",
        site="/home/alice/train.py:31",
    )  # fmt: skip
    name = region_name(annotation) + "&alice=1"
    plain = parse_region(Names(strict=False).event(name, Kind.ANNOTATION))
    assert plain == RegionAnnotation(1, 0, "", "net.3", "Net", "", "train.py:31")
    strict = parse_region(Names(strict=True).event(name, Kind.ANNOTATION))
    assert strict is not None
    assert strict.module == "private_module_1.3"
    assert strict.module_class == "private_class_1"
    assert strict.site == "private_file_1.py:31"


@pytest.mark.parametrize(
    ("site", "shown"),
    [
        ("/home/alice/project/train.py:31", "train.py:31"),
        ("C:\\Users\\alice\\train.py:31", "train.py:31"),
        ("../../alice/train.py:31", "train.py:31"),
        ("~alice/train.py:31", "train.py:31"),
        ("src/net/train.py:31", "src/net/train.py:31"),
        # Of a run that was started in the root.
        ("home/alice/project/train.py:31", "train.py:31"),
        ("Users/alice/train.py:31", "train.py:31"),
        ("./root/alice/train.py:31", "train.py:31"),
        ("mnt/c/Users/alice/train.py:31", "train.py:31"),
        ("tmp/alice/train.py:31", "train.py:31"),
        ("var/lib/jobs/alice-7/train.py:31", "train.py:31"),
        ("Volumes\\Alice\\train.py:31", "train.py:31"),
        ("scratch/alice/train.py:31", "train.py:31"),
        ("HOME/alice/train.py:31", "train.py:31"),
        ("home//alice/./train.py:31", "train.py:31"),
        ("home/alice/venv/lib/site-packages/trl/sft.py:7", "trl/sft.py:7"),
        ("homework/train.py:31", "homework/train.py:31"),
        ("/usr/lib/python3/dist-packages/trl/sft.py:7", "trl/sft.py:7"),
        ("/home/alice/venv/lib/site-packages/transformers/x.py:7", "transformers/x.py:7"),
        ("/home/alice/my secrets.py:7", "private_file_1.py:7"),
        ("train.py", ""),
        ("", ""),
    ],
)
def test_call_sites_are_relative_to_their_package(site: str, shown: str) -> None:
    assert Places(strict=False).site(site) == shown


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        ("layers.3", "private_module_1.3"),
        ("layers.127.mlp", "private_module_1.127.private_module_2"),
        ("experts.0", "private_module_1.0"),
        ("customer.8675309", "private_module_1.private_module_2"),
        ("4111111111111111", "private_module_1"),
        ("net.007", "private_module_1.private_module_2"),
        ("by_date.20261126", "private_module_1.private_module_2"),
        ("user.1000", "private_module_1.private_module_2"),
        ("net.\u0663", "private_module_1.private_module_2"),
    ],
)
def test_only_numbers_of_layers_stay_when_strict(module: str, shown: str) -> None:
    assert Names(strict=True).module(module) == shown


def test_versions_without_what_was_built_in() -> None:
    given = {
        "torch": "2.13.0+cu126",
        "transformers": "5.23.0+alice",
        "python": "3.11.7",
        "platform": "Linux alice",
        "target": "train.py",
        "threads": "8",
        "backend": "alice",
        "HOME": "/home/alice",
        "device_name": "NVIDIA A100-SXM4-80GB of alice",
    }
    assert clean_environment(given) == {
        "torch": "2.13.0+cu126",
        "transformers": "5.23.0",
        "python": "3.11.7",
        "threads": "8",
        "device_name": "NVIDIA A100 SXM4 80GB",
    }


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H100 80GB HBM3", "Tesla V100 SXM2 16GB", "AMD Instinct MI300X", "NVIDIA L40S",
     "NVIDIA GeForce RTX 2080 Ti", "NVIDIA GH200 480GB", "NVIDIA B200"],
)  # fmt: skip
def test_names_of_gpus_stay(name: str) -> None:
    assert device_name(name) == name


def test_the_list_of_operators_is_that_of_this_torch() -> None:
    text = files("recompute_scan.bundle").joinpath("operators.txt").read_text(encoding="ascii")
    # In a process of its own: what other tests import registers more.
    command = [sys.executable, "-m", "tests.share.operators"]
    assert text == subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_words_of_the_list_stand_for_every_operator_and_no_other() -> None:
    for names in operators().values():
        assert {one for word in words(names) for one in names_of(word)} == set(names)


@pytest.mark.parametrize(
    ("name", "plain", "strict"),
    [
        ("cudaLaunchKernel", True, True),
        ("cuLaunchKernelEx", True, True),
        ("hipGetDevicePropertiesR0600", True, True),
        ("cudaStreamIsCapturing_v10000", True, True),
        ("cudaProjectTigerSync", True, False),
        ("ncclAcmeGather", True, False),
        ("cudaLaunchKernel of tiger", False, False),
    ],
)
def test_a_runtime_call_stays_whole_under_strict_only_where_the_vendor_named_it(
    name: str, plain: bool, strict: bool
) -> None:
    assert (Names(strict=False).event(name, Kind.RUNTIME) == name) is plain
    assert (Names(strict=True).event(name, Kind.RUNTIME) == name) is strict


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Kind.OP, "aten::add.alice"),
        (Kind.OP, "AddmmBackward738291645"),
        (Kind.OP, "private_op_1_alice"),
        (Kind.KERNEL, "private_alice_1"),
        (Kind.ANNOTATION, "nccl:alice"),
        (Kind.ANNOTATION, "FSDP::post_alice"),
        (Kind.ANNOTATION, "FullyShardedDataParallel._pre_alice"),
        (Kind.ANNOTATION, "DistributedDataParallel.alice"),
        (Kind.ANNOTATION, "recompute_scan.region?call=1&depth=0&site=torch/alice.py:3"),
        (Kind.ANNOTATION, "recompute_scan.region?call=1&depth=0&module=private_module_1_alice"),
    ],
)
def test_nothing_passes_strict_in_the_shape_of_a_known_name(kind: int, name: str) -> None:
    shown = Names(strict=True).event(name, kind)
    assert "alice" not in shown
    assert "738291645" not in shown
    assert Names(strict=True).event(shown, kind) == shown  # a bundle of a bundle
    if kind == Kind.ANNOTATION:
        assert "alice" not in Names(strict=False).event(name, kind) or "region?" in name


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize(
    "name",
    [
        "FSDP::post_backward_rs_wait",
        "FSDP::all_gather_copy_out",
        "FSDP::root_post_backward_callback",
        "FullyShardedDataParallel._post_backward_hook_reshard_only",
        "FullyShardedDataParallel.rate_limiter",
        "DistributedDataParallel.forward",
        "nccl:_reduce_scatter_base",
        "gloo:recvAnySource",
        "gloo:sparse_all_reduce",
    ],
)
def test_ranges_of_torchs_own_code_stay(name: str, strict: bool) -> None:
    assert Names(strict=strict).event(name, Kind.ANNOTATION) == name
