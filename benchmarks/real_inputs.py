"""What real training scripts are given here: a tiny Llama and BERT with a tokenizer, and texts.

    python benchmarks/real_inputs.py FOLDER

Nothing is fetched: weights are random, the tokenizer is trained on the texts, which are made.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Fast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.real_models import litgpt, torchtune

WORDS = (
    "the layer runs its forward pass again while a backward step waits for what was not kept and "
    "each model learns from few words of one small text"
).split()
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"

UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": [16, 32],
    "norm_num_groups": 8,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}


METRIC = """import datasets
import evaluate


class Accurate(evaluate.Metric):
    def _info(self):
        kind = datasets.Value("int32")
        features = datasets.Features(predictions=kind, references=kind)
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(map(int.__eq__, predictions, references)) / len(references)}
"""


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
    tokenizer = Fast(  # type: ignore[no-untyped-call]
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
    for name, model in (("llama", llama), ("bert", BertForMaskedLM(BertConfig(**sizes)))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        # As transformers before 5 name it too.
        described = folder / name / "tokenizer_config.json"
        kept = json.loads(described.read_text())
        kept |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
        described.write_text(json.dumps(kept))


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
    (folder / "metric" / "accurate.py").write_text(METRIC)
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
    (folder / "unet" / "config.json").write_text(json.dumps(UNET))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
