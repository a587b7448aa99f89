"""Heads of the embedded pair: hand conversations of the corpus to the trainer of `eagle-ray train`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from eagle_ray.config import load_train_config
from eagle_ray.core.start_log import configure_logging
from eagle_ray.training.job.train_head import train_head
from jobs.tiny_pair.corpus import Conversation

STEP_TOKENS = 3840
MAX_LENGTH = 384
TOKENS_PER_CONVERSATION = 80  # fewer than the mean, so that no conversation is read twice


def train_tiny_head(
    target: Path | str,
    directory: Path,
    conversations: Iterable[Conversation],
    *,
    method: str,
    num_steps: int,
    seed: int,
    settings: dict[str, object] | None = None,
) -> None:
    """Train a head for `target` on as many conversations as num_steps need, and publish it in `directory`.

    settings: further keys of the training configuration.
    """
    count = num_steps * STEP_TOKENS // TOKENS_PER_CONVERSATION + 50
    with tempfile.TemporaryDirectory() as temporary:
        chats = Path(temporary) / "chats.jsonl"
        chats.write_text("".join(_line(conversation) for conversation in islice(conversations, count)))
        overrides = {
            "name": f"tiny-{method}",
            "model.target": str(target),
            "model.device": "cpu",
            "model.dtype": "float32",
            "data.path": str(chats),
            "data.max_length": MAX_LENGTH,
            "data.feature_cache": "off",
            "head.method": method,
            "optimizer.kind": "muon",
            "training.steps": num_steps,
            "training.batch_tokens": STEP_TOKENS,
            "training.shard_tokens": STEP_TOKENS // 2,
            "training.seed": seed,
            "evaluation.every": 0,
            "evaluation.prompts": 8,
            "evaluation.max_tokens": 32,
            "output.path": str(directory),
            "output.if_exists": "overwrite",
        }
        config = load_train_config(None, env={}, overrides=overrides | (settings or {}))
        configure_logging("info")
        train_head(config, [str(chats)])


def _line(conversation: Conversation) -> str:
    return json.dumps({"messages": [{"role": turn.role, "content": turn.content} for turn in conversation]}) + "\n"
