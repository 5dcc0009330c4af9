"""What real training scripts are given here: texts, pictures, and tiny models of random weights.

    python tests/real/inputs.py FOLDER

Nothing is fetched: the tokenizer is trained on the texts, which are made. Weights are renamed by
what litgpt says of its models; torchtune gets a recipe, open_clip and diffusers get theirs where
diffusers is installed.
"""

import copy
import importlib.util
import json
import pickle
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import transformers
import yaml
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = (
    "the layer runs its forward pass again while a backward step waits for what was not kept and "
    "each model learns from few words of one small text"
).split()
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"

GIVEN = yaml.safe_load(Path(__file__).with_name("inputs.yaml").read_text(encoding="utf-8"))


def _lines(count: int) -> list[str]:
    chosen = random.Random(7)
    return [" ".join(chosen.choices(WORDS, k=24)) + " ." for _ in range(count)]


def _rows(
    folder: Path, rows: list[dict[str, object]], parts: Sequence[str] = ("train", "test")
) -> None:
    folder.mkdir(parents=True)
    for part in parts:
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _models(folder: Path, lines: list[str]) -> None:
    special = ["<unk>", "<s>", "</s>", "<pad>", "<mask>"]
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=special))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        mask_token="<mask>",
        model_max_length=64,
        chat_template=TEMPLATE,
    )
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=3, bos_token_id=1, eos_token_id=2))
    for name, model in (
        ("llama", llama),
        ("bert", transformers.BertForMaskedLM(transformers.BertConfig(**sizes))),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        # As transformers before 5 name it too.
        described = folder / name / "tokenizer_config.json"
        kept = json.loads(described.read_text())
        kept |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
        described.write_text(json.dumps(kept))


def litgpt(llama: Path, folder: Path) -> None:
    """The model as litgpt keeps one, with the tokenizer."""
    shutil.copytree(llama, folder)
    model = LlamaForCausalLM.from_pretrained(llama)
    config: Any = model.config
    theirs = model.state_dict()
    ours = {f"{name}.weight": theirs[f"{old}.weight"] for name, old in GIVEN["outside"].items()}
    for number in range(config.num_hidden_layers):
        new, old = f"transformer.h.{number}.", f"model.layers.{number}."
        for name, their in GIVEN["layer"].items():
            ours[f"{new}{name}.weight"] = theirs[f"{old}{their}.weight"]
        parts = [theirs[f"{old}self_attn.{part}_proj.weight"] for part in "qkv"]
        ours[f"{new}attn.qkv.weight"] = torch.cat(parts)
    torch.save({name: weight.clone() for name, weight in ours.items()}, folder / "lit_model.pth")
    described = GIVEN["litgpt"] | {
        "block_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_query_groups": config.num_attention_heads,
        "n_embd": config.hidden_size,
        "intermediate_size": config.intermediate_size,
    }
    (folder / "model_config.yaml").write_text(json.dumps(described))


def torchtune(llama: Path, texts: Path, lines: list[str], file: Path) -> None:
    """A configuration of torchtune's full finetuning on one device, for this model, with a
    tokenizer of SentencePiece's.
    """
    config: Any = LlamaConfig.from_pretrained(llama)
    pieces = file.with_name("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(pieces),
        vocab_size=config.vocab_size,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    recipe = copy.deepcopy(GIVEN["torchtune"])
    recipe["model"] |= {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "embed_dim": config.hidden_size,
        "max_seq_len": config.max_position_embeddings,
        "intermediate_dim": config.intermediate_size,
    }
    recipe["tokenizer"]["path"] = str(pieces.with_suffix(".model"))
    recipe["tokenizer"]["max_seq_len"] = config.max_position_embeddings
    recipe["checkpointer"]["checkpoint_dir"] = str(llama)
    recipe["dataset"]["data_files"] = str(texts)
    file.write_text(json.dumps(recipe, indent=1))


def clip(folder: Path) -> None:
    """The description of a model, as open_clip keeps it."""
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps(GIVEN["clip"]))


def stable(folder: Path) -> None:
    """A text-to-image pipeline with all its parts."""
    import diffusers  # noqa: PLC0415

    folder.mkdir()
    letters = [chr(number) for number in range(33, 127)]
    known = [*letters, *(f"{one}</w>" for one in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({one: n for n, one in enumerate(known)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77
    )
    reading = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            **GIVEN["stable"]["reading"],
            bos_token_id=known.index("<|startoftext|>"),
            eos_token_id=known.index("<|endoftext|>"),
        )
    )
    unet = diffusers.UNet2DConditionModel(**GIVEN["stable"]["unet"])
    coder = diffusers.AutoencoderKL(**GIVEN["stable"]["coder"])
    diffusers.StableDiffusionPipeline(
        vae=coder,
        text_encoder=reading,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=diffusers.DDPMScheduler(num_train_timesteps=100),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "whole")
    for part in (folder / "whole").iterdir():
        part.rename(folder / part.name)
    (folder / "whole").rmdir()


def captioned(pictures: Path, lines: list[str], folder: Path) -> None:
    """Pictures with a line of text each."""
    folder.mkdir()
    told: list[dict[str, str]] = []
    for picture, line in zip(sorted(pictures.rglob("*.png")), lines, strict=False):
        name = f"{len(told)}.png"
        shutil.copy(picture, folder / name)
        told.append({"file_name": name, "text": line[:40]})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))


def make(folder: Path) -> None:
    """Texts, data sets and models below the folder."""
    folder.mkdir(parents=True)
    lines = _lines(400)
    # minGPT's character model is asked to go on from "O God, O God!".
    (folder / "text.txt").write_text("\n".join(lines) + "\nO God, O God!\n")
    _rows(folder / "lm", [{"text": line} for line in lines])
    half = [{"prompt": a, "completion": b} for a, b in zip(lines[::2], lines[1::2], strict=True)]
    _rows(folder / "pairs", [dict(row) for row in half])
    _rows(
        folder / "preferences",
        [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "no ."} for r in half],
    )
    pairs = zip(lines[::2], lines[1::2], strict=True)
    judged = [
        {"sentence1": a, "sentence2": b, "label": number % 2, "idx": number}
        for number, (a, b) in enumerate(pairs)
    ]
    _rows(folder / "sentences", judged[:64], ("train", "validation"))
    (folder / "metric").mkdir()
    (folder / "metric" / "accurate.py").write_text(GIVEN["metric"])
    (folder / "alpaca").mkdir()
    tasks = [{"instruction": r["prompt"], "input": "", "output": r["completion"]} for r in half]
    (folder / "alpaca" / "data.json").write_text(json.dumps(tasks))
    known = {"tasks": {"file_name": "data.json"}}
    (folder / "alpaca" / "dataset_info.json").write_text(json.dumps(known))
    corpus = folder / "corpus"
    corpus.mkdir()
    for part, count in (("train", 40), ("valid", 4), ("test", 4)):
        (corpus / f"{part}.txt").write_text("\n".join(lines[:count]) + "\n")
    characters = "".join(lines).encode()
    tokens = np.frombuffer(characters, dtype=np.uint8).astype(np.uint16) % 65
    shakespeare = folder / "shakespeare_char"
    shakespeare.mkdir()
    for part in ("train", "val"):
        tokens.tofile(shakespeare / f"{part}.bin")
    # As nanoGPT's own preparation writes it. Without it the model has 50,304 words, and its output
    # layer takes nearly all of a step.
    (shakespeare / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
    noise = np.random.default_rng(7)
    for part in ("train", "validation"):
        for kind in ("a", "b"):
            pictures = folder / "pictures" / part / kind
            pictures.mkdir(parents=True)
            for number in range(24):
                pixels = noise.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(pictures / f"{number}.png")
    _models(folder, lines)
    litgpt(folder / "llama", folder / "litgpt")
    torchtune(folder / "llama", folder / "lm" / "train.jsonl", lines, folder / "tune.yaml")
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text(json.dumps(GIVEN["unet"]))
    if importlib.util.find_spec("diffusers") is not None:
        clip(folder / "clip")
        stable(folder / "stable")
        texts = (folder / "text.txt").read_text().splitlines()
        captioned(folder / "pictures" / "train", texts, folder / "captioned")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
