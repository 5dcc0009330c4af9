"""Which scripts ``real_scripts.py`` runs, from where, with what, and what was changed in them.

Nothing of them is kept here; licences are those of the repositories.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """A public repository at a commit."""

    name: str
    owner: str
    commit: str
    licence: str


class Row(NamedTuple):
    """One training.

    Attributes:
        name: In the table.
        command: ``{in}`` stands for the inputs, ``{out}`` for a folder of this run's own.
        source: Without one the script comes from an installed package.
        paths: What is taken from it.
        where: The folder below the source that the script runs in.
        data: Puts data where the script looks for them.
        change: Changes the script; ``None`` where it runs as it is.
        ranks: Processes, under torchrun where there are several.
        packages: Which environment.
        variables: Set for the script.
        python_path: Folders below the source to import from.
        mended: The command with the fix, where that is one to the command line: no diff says it.
        copied: An installed package that is copied beside the script, to be changed there.
    """

    name: str
    command: tuple[str, ...]
    source: Source | None = None
    paths: tuple[str, ...] = ()
    where: str = "."
    data: Callable[[Path, Path], None] | None = None
    change: Callable[[Path, Path], None] | None = None
    ranks: int = 1
    packages: str = "newest"
    variables: tuple[tuple[str, str], ...] = ()
    python_path: tuple[str, ...] = ()
    copied: str = ""
    mended: tuple[str, ...] = ()


PYTHON = "3.11"
PACKAGES = {
    "newest": (
        *("torch==2.13.0", "torchvision==0.28.0", "transformers==5.23.0", "accelerate==1.15.0"),
        *("peft==0.21.2", "trl==1.16.0", "datasets==5.2.0", "diffusers==0.42.1", "timm==1.0.31"),
        *("evaluate==0.4.6", "scikit-learn==1.9.1", "sentencepiece==0.2.3", "torchtitan==0.2.2"),
        *(
            "hydra-core==1.3.8",
            "torchao==0.18.0",
            "boto3",
            "triton==3.9.0",
            "torchdata==0.11.0",
            "tiktoken",
        ),
        *("blobfile", "kagglehub", "tyro", "einops==0.8.2", "protobuf", "tensorboard==2.21.0"),
        *("torch-geometric==2.8.1", "gymnasium==1.4.0", "fire==0.7.1", "ftfy==6.3.1"),
        *("mpi4py==4.1.2", "mpich==5.0.2", "webdataset==1.0.2", "braceexpand==0.1.7"),
    ),
    "older": (
        *("torch==2.13.0", "torchvision==0.28.0", "torchaudio==2.11.0", "transformers==4.57.6"),
        *(
            "accelerate==1.11.0",
            "peft==0.18.1",
            "trl==0.24.0",
            "datasets==4.0.0",
            "lightning==2.6.6",
        ),
        *("jsonargparse[signatures]==4.41.0", "fire==0.7.1", "termcolor", "loralib==0.1.2"),
        *("einops==0.8.2", "av==18.1.0", "modelscope==1.40.2", "omegaconf==2.3.0", "tyro==0.8.14"),
        *("matplotlib", "scipy", "pandas", "sentencepiece==0.2.3", "tiktoken", "rouge-chinese"),
        *("jieba", "nltk", "openai==0.28.1"),
    ),
}

_NANO = Source("nanoGPT", "karpathy", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "MIT")
_MIN = Source("minGPT", "karpathy", "37baab71b9abea1b76ab957409a1cc2fbfba8a26", "MIT")
_EXAMPLES = Source(
    "examples", "pytorch", "77f55b912142e11fcfdf5b530231fb9c52f181e8", "BSD-3-Clause"
)
_PEFT = Source("peft", "huggingface", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40", "Apache-2.0")
_TIMM = Source(
    "pytorch-image-models", "huggingface", "aa4b5850c1543fa488abf260f18390eda46cf85d", "Apache-2.0"
)
_DIFFUSERS = Source(
    "diffusers", "huggingface", "58eb52c0803ea9af3abec60841c2a093bdf1f951", "Apache-2.0"
)
# A fork whose run_clm.py and run_mlm.py are those of transformers 4.57, the first with additions.
_TRANSFORMERS = Source(
    "transformers-qwen3", "macorisd", "4a42c1b083066a4ae212edd4bd8d28ff713c0088", "Apache-2.0"
)
_ACCELERATE = Source(
    "accelerate", "huggingface", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83", "Apache-2.0"
)
_COOKBOOK = Source(
    "llama-cookbook", "meta-llama", "0e0033518623d03ac5c1654bf04b7e480f7d5e5a", "Llama 2"
)
_FACTORY = Source(
    "LLaMA-Factory", "hiyouga", "ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30", "Apache-2.0"
)
_LITGPT = Source("litgpt", "Lightning-AI", "26857050fe3ff627cd714fe92f5838f51a3d5efa", "Apache-2.0")
_TORCHTUNE = Source(
    "torchtune", "pytorch", "bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1", "BSD-3-Clause"
)
_NANO_ARGS = (
    *("train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False"),
    *("--eval_iters=1", "--eval_interval=1000", "--batch_size=4", "--block_size=64", "--n_layer=4"),
    *("--n_head=2", "--n_embd=64", "--max_iters=30", "--log_interval=1", "--out_dir={out}/nano"),
)
_TRAINER_ARGS = (
    *("--output_dir", "{out}/model", "--max_steps", "12", "--per_device_train_batch_size", "4"),
    *("--report_to", "none", "--save_strategy", "no", "--use_cpu", "true", "--logging_steps", "1"),
)
_TRL_ARGS = (
    *("--model_name_or_path", "{in}/llama", *_TRAINER_ARGS, "--bf16", "false"),
    *("--eval_strategy", "no"),
)
_SFT = ("-m", "trl.scripts.sft", "--dataset_name", "{in}/lm", *_TRL_ARGS)
_TIMM_ARGS = (
    *("train.py", "--data-dir", "{in}/pictures", "--model", "vit_tiny_patch16_224", "--device"),
    *("cpu", "--img-size", "32", "--model-kwargs", "img_size=32", "depth=4", "--num-classes"),
    *("2", "-b", "4", "-vb", "4", "-j", "1", "--epochs", "2", "--warmup-epochs", "0"),
    *("--output", "{out}/timm", "--no-prefetcher", "--log-interval", "1"),
)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if old not in text:
        raise ValueError(f"{path.name} is not the version that this row is for")
    path.write_text(text.replace(old, new, 1))


def _shakespeare(folder: Path, inputs: Path) -> None:
    shutil.copytree(
        inputs / "shakespeare_char", folder / "data/shakespeare_char", dirs_exist_ok=True
    )


def _text(folder: Path, inputs: Path) -> None:
    shutil.copy(inputs / "text.txt", folder / "input.txt")


def _nano_once(folder: Path, _: Path) -> None:
    """nanoGPT with torch's checkpoint around each block."""
    _replace(folder / "model.py", "            x = block(x)", _NANO_LOOP)


_NANO_LOOP = (
    "            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True) "
    "if self.training else block(x)"
)


def _nano_doubled(folder: Path, inputs: Path) -> None:
    """The same, with torch's wrapper around each block as well."""
    _nano_once(folder, inputs)
    _replace(
        folder / "train.py",
        "model.to(device)\n",
        "model.to(device)\n"
        "from model import Block\n"
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (\n"
        "    apply_activation_checkpointing)\n"
        "apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))\n",
    )


def _peft_doubled(folder: Path, _: Path) -> None:
    """PEFT's SFT script with FSDP's wrapper around the layers, as its plugin puts it there."""
    _replace(
        folder / "train.py",
        "    # train\n",
        "    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (\n"
        "        apply_activation_checkpointing)\n"
        "    from transformers.models.llama.modeling_llama import LlamaDecoderLayer\n"
        "    apply_activation_checkpointing(\n"
        "        trainer.model, check_fn=lambda m: isinstance(m, LlamaDecoderLayer))\n"
        "    # train\n",
    )


_PEFT_ARGS = (
    *("train.py", "--dataset_name", "{in}/lm", "--dataset_text_field", "text", "--splits"),
    *("train,test", *_TRL_ARGS, "--use_peft_lora", "true", "--lora_r", "4"),
    *("--lora_target_modules", "q_proj,v_proj", "--gradient_checkpointing", "true"),
)
_REENTRANT = ("--gradient_checkpointing_kwargs", '{"use_reentrant": true}')
_LM = "examples/pytorch/language-modeling"


def _nano(name: str, change: Callable[[Path, Path], None] | None = None) -> Row:
    return Row(name, _NANO_ARGS, _NANO, (".",), data=_shakespeare, change=change)


def _min(project: str, data: Callable[[Path, Path], None] | None = None) -> Row:
    arguments = ("--trainer.max_iters=12", "--model.model_type=gpt-nano")
    given = (f"{project}.py", *arguments, "--system.work_dir='{out}/min'")
    where = f"projects/{project}"
    return Row(f"minGPT {project}", given, _MIN, (where, "mingpt"), where, data, python_path=(".",))


def _language_model(name: str, script: str, model: str, *more: str, corpus: str = "text") -> Row:
    """A script of transformers' examples."""
    texts = ("--train_file", "{in}/text.txt", "--do_train", "--block_size", "32")
    if script == "run_mlm":
        texts = ("--train_file", "{in}/text.txt", "--do_train", "--max_seq_length", "32")
    given = (f"{script}.py", "--model_name_or_path", f"{{in}}/{model}", *texts, *_TRAINER_ARGS)
    return Row(name, (*given, *more), _TRANSFORMERS, (_LM,), _LM)


_TUNE_ARGS = (
    *("recipes/full_finetune_single_device.py", "--config", "{in}/tune.yaml"),
    "output_dir={out}/tune",
)
_LITGPT_ARGS = (
    *("-m", "litgpt", "finetune_full", "{in}/litgpt", "--out_dir", "{out}/litgpt", "--devices"),
    *("1", "--precision", "32-true", "--data", "JSON", "--data.json_path"),
    *("{in}/alpaca/data.json", "--data.val_split_fraction", "0.1", "--data.num_workers", "0"),
    *("--train.max_steps", "12", "--train.global_batch_size", "4", "--train.micro_batch_size"),
    *("4", "--train.log_interval", "1", "--train.lr_warmup_steps", "1"),
    *("--train.max_seq_length", "64", "--eval.initial_validation", "false"),
    *("--eval.final_validation", "false", "--eval.interval", "1000", "--eval.max_iters", "1"),
)

_COOKBOOK_ARGS = (
    *("-m", "llama_cookbook.finetuning", "--model_name", "{in}/llama", "--dataset"),
    *("alpaca_dataset", "--data_path", "{in}/alpaca/data.json", "--context_length", "64"),
    *("--num_epochs", "1", "--batch_size_training", "4", "--max_train_step", "10"),
    *("--run_validation", "False", "--save_model", "False", "--output_dir", "{out}/model"),
)
_FSDP_ARGS = (
    *("--enable_fsdp", "True", "--fsdp_activation_checkpointing", "True"),
    *("--mixed_precision", "False", "--num_workers_dataloader", "0"),
)
_FACTORY_ARGS = (
    *("src/train.py", "--stage", "sft", "--do_train", "true", "--model_name_or_path"),
    *("{in}/llama", "--dataset_dir", "{in}/alpaca", "--dataset", "tasks", "--template", "default"),
    *("--cutoff_len", "64", "--overwrite_output_dir", "true", *_TRAINER_ARGS),
)


def _on_cpu(folder: Path, _: Path) -> None:
    """FSDP over gloo on the processor instead of over NCCL on GPUs."""
    tool = folder / "src/llama_cookbook"
    _replace(tool / "utils/train_utils.py", '"nccl"', '"gloo"')
    _replace(tool / "finetuning.py", "        device_id = 0\n", _CPU)
    for _step in range(2):
        _replace(tool / "utils/train_utils.py", ".to(local_rank)", '.to("cpu")')


_CPU = '        device_id = torch.device("cpu")\n'


def _ddp_on_cpu(folder: Path, _: Path) -> None:
    """DDP over gloo on the processor, which the script refuses to run on."""
    main, trainer = folder / "main.py", folder / "trainer.py"
    _replace(main, "    if not verify_min_gpu_count(", "    if 0 and verify_min_gpu_count(")
    _replace(main, "    acc = torch.accelerator.current_accelerator()\n", "    acc = 'cpu'\n")
    _replace(main, "    torch.accelerator.set_device_index(rank)\n", "")
    _replace(trainer, "torch.accelerator.current_accelerator()", "'cpu'")
    _replace(trainer, ", device_ids=[self.local_rank]", "")
    for _step in range(3):
        _replace(trainer, ".to(self.local_rank)", ".to('cpu')")


_TITAN_AC = ("--activation_checkpoint.selective_ac_option", "op", "--activation_checkpoint.mode")
_TITAN_TOML = """[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "tokenizer"

[optimizer]
lr = 8e-4

[training]
local_batch_size = 2
seq_len = 64
steps = 8
dataset = "c4_test"

[debug]
seed = 7

[metrics]
log_freq = 1
"""
_TITAN_DEVICE = """class _Processor:
    def __getattr__(self, name):
        from collections import Counter
        from types import SimpleNamespace
        known = {"get_device_name": "cpu", "memory_stats": Counter(), "device_count": 1}
        known["get_device_properties"] = SimpleNamespace(total_memory=1, name="cpu")
        return lambda *_, **__: known.get(name)


def get_device_info("""


def _titan_data(folder: Path, inputs: Path) -> None:
    """Where the debug model's own configuration has them."""
    (folder / "debug.toml").write_text(_TITAN_TOML)
    shutil.copytree(inputs / "llama", folder / "tokenizer")
    texts = folder / "tests/assets/c4_test"
    texts.mkdir(parents=True)
    shutil.copy(inputs / "lm/train.jsonl", texts / "data.json")


def _titan_on_cpu(folder: Path, _: Path) -> None:
    """It asks its device for names and memory, which a processor does not tell."""
    tools = folder / "torchtitan/tools/utils.py"
    _replace(tools, "def get_device_info(", _TITAN_DEVICE)
    _replace(tools, '_get_available_device_type() or "cuda"', '"cpu"')
    _replace(tools, "_get_device_module(device_type)", "_Processor()")
    barrier = "barrier(device_ids=[device_module.current_device()])"
    _replace(folder / "torchtitan/distributed/utils.py", barrier, "barrier()")


def _cookbook(name: str, *more: str, ranks: int = 1) -> Row:
    return Row(
        name,
        (*_COOKBOOK_ARGS, *more),
        _COOKBOOK,
        ("src/llama_cookbook",),
        change=_on_cpu if ranks > 1 else None,
        ranks=ranks,
        packages="older",
        python_path=("src",),
    )


def _factory(name: str, *more: str) -> Row:
    given = (*_FACTORY_ARGS, *more)
    return Row(name, given, _FACTORY, ("src",), packages="older", python_path=("src",))


def _names_of_accelerate(script: str) -> Callable[[Path, Path], None]:
    """The model, the data set and the metric are local folders instead of names in a hub."""

    def change(folder: Path, inputs: Path) -> None:
        path = folder / script
        for old, new in (
            ('"bert-base-cased"', f'"{inputs}/bert"'),
            ('"nyu-mll/glue", "mrpc"', f'"{inputs}/sentences"'),
            ('"glue", "mrpc"', f'"{inputs}/metric/accurate.py"'),
        ):
            if old in path.read_text():
                path.write_text(path.read_text().replace(old, new))

    return change


def _accelerate(script: str, *more: str, where: str = "by_feature", ranks: int = 1) -> Row:
    folder = f"examples/{where}".rstrip("/")
    return Row(
        f"accelerate {script.removesuffix('.py')}{', checkpoints' * bool(more[2:])}",
        (script, *more),
        _ACCELERATE,
        (f"{folder}/{script}",),
        folder,
        change=_names_of_accelerate(script),
        ranks=ranks,
    )


ROWS = (
    _nano("nanoGPT"),
    _nano("nanoGPT, checkpoints", _nano_once),
    _nano("nanoGPT, doubled", _nano_doubled),
    _min("adder"),
    _min("chargpt", _text),
    *(
        Row(
            f"word_language_model, {kind}",
            (
                *("main.py", "--data", "{in}/corpus", "--model", kind, "--emsize", "32", "--nhid"),
                *("32", "--nlayers", "2", "--nhead", "2", "--batch_size", "4", "--bptt", "8"),
                *("--lr", "0.001", "--epochs", "1", "--save", "{out}/lm.pt", "--use-optimizer"),
                *("--log-interval", "1"),
            ),
            _EXAMPLES,
            tuple(f"word_language_model/{name}.py" for name in ("main", "data", "model")),
            "word_language_model",
        )
        for kind in ("LSTM", "Transformer")
    ),
    _language_model("run_clm", "run_clm", "llama"),
    _language_model("run_clm, checkpoints", "run_clm", "llama", "--gradient_checkpointing", "true"),
    _language_model("run_mlm", "run_mlm", "bert"),
    _language_model("run_mlm, checkpoints", "run_mlm", "bert", "--gradient_checkpointing", "true"),
    Row("TRL SFT", _SFT),
    Row("TRL SFT, off", (*_SFT, "--gradient_checkpointing", "false")),
    Row("TRL SFT, reentrant", (*_SFT, *_REENTRANT)),
    Row("TRL SFT, LoRA", (*_SFT, "--use_peft", "true", "--lora_r", "4")),
    Row("TRL DPO", ("-m", "trl.scripts.dpo", "--dataset_name", "{in}/preferences", *_TRL_ARGS)),
    Row("PEFT LoRA", _PEFT_ARGS, _PEFT, ("examples/sft",), "examples/sft"),
    *(
        Row(
            f"PEFT LoRA, wrapped by FSDP's too, {packages} packages",
            (*_PEFT_ARGS, "--use_reentrant", "true"),
            _PEFT,
            ("examples/sft",),
            "examples/sft",
            change=_peft_doubled,
            packages=packages,
            mended=(*_PEFT_ARGS, "--use_reentrant", "true", "--gradient_checkpointing", "false"),
        )
        for packages in ("newest", "older")
    ),
    Row("timm", _TIMM_ARGS, _TIMM, ("train.py", "timm")),
    Row("timm, checkpoints", (*_TIMM_ARGS, "--grad-checkpointing"), _TIMM, ("train.py", "timm")),
    Row(
        "diffusers unconditional",
        (
            *("train_unconditional.py", "--train_data_dir", "{in}/pictures/train"),
            *("--model_config_name_or_path", "{in}/unet", "--output_dir", "{out}/unet"),
            *("--resolution", "16", "--train_batch_size", "4", "--num_epochs", "2"),
            *("--save_images_epochs", "9", "--save_model_epochs", "9", "--mixed_precision", "no"),
            *("--ddpm_num_inference_steps", "2"),
        ),
        _DIFFUSERS,
        ("examples/unconditional_image_generation",),
        "examples/unconditional_image_generation",
    ),
    _accelerate("nlp_example.py", "--cpu", where=""),
    _accelerate("gradient_accumulation.py", "--cpu", "--gradient_accumulation_steps=2"),
    _cookbook("llama-cookbook"),
    _cookbook("llama-cookbook, FSDP and its checkpoints", *_FSDP_ARGS, ranks=2),
    _factory("LLaMA-Factory", "--finetuning_type", "full"),
    _factory(
        "LLaMA-Factory, off",
        *("--finetuning_type", "full", "--disable_gradient_checkpointing"),
        "true",
    ),
    _factory("LLaMA-Factory, LoRA", "--finetuning_type", "lora", "--lora_rank", "4"),
    Row(
        "litgpt",
        _LITGPT_ARGS,
        _LITGPT,
        ("litgpt", "pyproject.toml"),
        packages="older",
    ),
    *(
        Row(
            f"torchtune{name}",
            (*_TUNE_ARGS, *more),
            _TORCHTUNE,
            ("recipes", "torchtune"),
            python_path=(".",),
        )
        for name, more in (
            ("", ()),
            (", checkpoints", ("enable_activation_checkpointing=True",)),
        )
    ),
    Row(
        "minGPT-ddp",
        (
            *("main.py", "data_config.path={in}/text.txt", "data_config.truncate=1"),
            *("gpt_config.n_layer=3", "gpt_config.n_head=2", "gpt_config.n_embd=32"),
            *("data_config.block_size=32", "trainer_config.max_epochs=1"),
            *("trainer_config.batch_size=256", "trainer_config.data_loader_workers=0"),
            *("trainer_config.use_amp=false", "trainer_config.snapshot_path={out}/snapshot.pt"),
        ),
        _EXAMPLES,
        ("distributed/minGPT-ddp/mingpt",),
        "distributed/minGPT-ddp/mingpt",
        change=_ddp_on_cpu,
        ranks=2,
    ),
    *(
        Row(
            f"torchtitan debug model, {mode}",
            ("-m", "torchtitan.train", "--job.config_file", "debug.toml", *_TITAN_AC, mode),
            copied="torchtitan",
            data=_titan_data,
            change=_titan_on_cpu,
            variables=(
                *(("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")),
                *(("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29771")),
            ),
        )
        for mode in ("none", "selective", "full")
    ),
)
