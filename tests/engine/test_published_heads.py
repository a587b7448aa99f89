"""From a directory in a published layout to tokens: whatever the head, they are plain decoding's."""

from __future__ import annotations

import pytest
import torch

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import check_models
from eagle_ray.config import ModelConfig, SpeculativeConfig
from tests.support.checkpoints import (
    E3,
    LLAMA3_ROPE,
    RAW,
    Tensors,
    eagle3_tensors,
    eagle_tensors,
    write,
)
from tests.support.engines import some_params, some_prompts
from tests.support.toy_models import llama, run

NARROW = E3 | {"hidden_size": 16, "target_hidden_size": 32}
EMBEDDING = {"embed_tokens.weight": torch.randn(97, 32, generator=torch.Generator().manual_seed(5))}
BIASED = RAW | {"qkv_bias": True, "rope_scaling": LLAMA3_ROPE}
PUBLISHED: dict[str, tuple[dict, Tensors, str]] = {
    "Vicuna's: fc bias, own embedding, bin": (RAW, eagle_tensors() | EMBEDDING, "bin"),
    "Qwen2's: biases of q, k and v, stretched positions, shards": (
        BIASED,
        eagle_tensors(BIASED),
        "sharded bin",
    ),
    "Llama-3's: no bias": (
        RAW | {"bias": False},
        eagle_tensors(RAW | {"bias": False}),
        "safetensors",
    ),
    "EAGLE-3, shards": (E3, eagle3_tensors(), "sharded safetensors"),
    "EAGLE-3, narrower than its target": (NARROW, eagle3_tensors(NARROW), "old bin"),
    "EAGLE-3, other layers": (
        E3 | {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
        eagle3_tensors(),
        "bin",
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("target")
    llama(num_hidden_layers=7).save_pretrained(path)
    return str(path)


def outputs(target: str, draft: str | None, method: str) -> tuple[list[list[int]], int]:
    """What comes of four prompts, greedy and sampled, and how many tokens were drafted."""
    model = ModelConfig(target=target, draft=draft, max_model_len=64)
    speculative = SpeculativeConfig(
        method=method, max_nodes=8, max_depth=3, top_k=4, budget="uniform"
    )
    check_models(model, speculative)
    sequences = run(
        build_engine_from_config(model, speculative, EngineArgs(4)).engine,
        some_prompts(4),
        some_params(4, max_tokens=8),
    )
    return [s.output_ids for s in sequences], sum(s.stats.num_draft_tokens for s in sequences)


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    return outputs(target, None, "none")[0]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_head_drafts_and_changes_no_token(target, plain, tmp_path, kind):
    raw, tensors, layout = PUBLISHED[kind]
    draft = str(write(tmp_path / "draft", tensors, raw, layout))
    produced, num_drafted = outputs(
        target, draft, "eagle3" if kind.startswith("EAGLE-3") else "eagle2"
    )
    assert produced == plain and num_drafted > 50
