"""Families whose layers are not Llama's on two ranks with drafts: the tokens of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from tests.support.checkpoints import RAW, eagle_tensors, write
from tests.support.engines import RandomPlanner, some_params, some_prompts
from tests.support.families import FAMILIES, random_model
from tests.support.ranks import with_ranks
from tests.support.toy_models import run

# Of Llama's form are those that test_lockstep.py and test_mixtures.py have.
OTHER_FORMS = [
    name
    for name, config in FAMILIES.items()
    if config.model_type
    not in ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
]
OFTEN = [("gemma3_text", "eagle2"), ("gpt_oss", "suffix")]
CASES = [
    pytest.param(name, method, marks=[] if (name, method) in OFTEN else pytest.mark.slow)
    for name in OTHER_FORMS
    for method in ("suffix", "eagle2")
]
ARGS = EngineArgs(6, kv_tokens=None)
NUM = 12
TREES = dict(budget="uniform", max_nodes=12, max_depth=5, top_k=4)


@pytest.mark.parametrize("name, method", CASES)
def test_trees_have_the_tokens_of_one_process(tmp_path: Path, name: str, method: str) -> None:
    path = tmp_path / "target"
    random_model(FAMILIES[name]).save_pretrained(path)
    draft = str(write(tmp_path / "head", eagle_tensors(), RAW)) if method == "eagle2" else None
    plain = ModelConfig(
        target=str(path), draft=None, device="cpu", dtype="float32", max_model_len=128
    )
    prompts = [prompt * 2 for prompt in some_prompts(NUM)]
    params = some_params(NUM, 16)
    one = build_engine_from_config(plain, SpeculativeConfig(method="none"), ARGS).engine
    expected = [sequence.output_ids for sequence in run(one, prompts, params)]

    def work(engine):
        engine.planner = RandomPlanner(seed=3)
        return [sequence.output_ids for sequence in run(engine, prompts, params)]

    model = plain.model_copy(update={"draft": draft})
    speculative = SpeculativeConfig(**TREES, method=method)
    outputs, engines = with_ranks(2, tmp_path, model, speculative, ARGS, work)
    assert outputs == expected
    counters = [
        (e.counters.num_steps, e.counters.num_verify_rows, e.counters.num_output_tokens)
        for e in engines
    ]
    assert counters[0] == counters[1], "each step was checked, and had as many rows"
    assert counters[0][1] > counters[0][2], "trees were verified"
