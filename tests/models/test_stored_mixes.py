"""Targets of random mixes of stored types: drafts and company change no bit of what plain decoding gives.

Inputs of quantised layers are rounded to 8 bits, so one last bit that depends on a row's company
becomes another token.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file

from eagle_ray import LLM, SamplingParams
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.load_models import load_target, planned_dtype
from eagle_ray.assembly.model_memory import weight_bytes
from eagle_ray.assembly.stored_bytes import target_bytes_of
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.gguf.blocks import DENSE, READERS
from eagle_ray.gguf.gguf_target import tensor_names
from eagle_ray.kernels import cpu_ops
from eagle_ray.models.loader import read_model_config
from eagle_ray.models.packed_products import can_pack
from tests.support.engines import mostly_slow
from tests.support.quantised_files import FP16_AT, gptq_layer, random_blocks
from tests.support.ranks import with_ranks
from tests.support.toy_models import llama, run

pytestmark = pytest.mark.skipif(
    cpu_ops.quantized_path() == 0 or not can_pack("cpu", torch.float32),
    reason="no kernels of this CPU are built",
)
SPREAD = {
    **{"Q2_K": 4e-3, "Q3_K": 1e-3, "IQ4_NL": 8e-4, "IQ4_XS": 5e-5, "IQ3_XXS": 4e-4, "IQ3_S": 4e-4},
    **{"IQ2_XXS": 1e-3, "IQ2_XS": 1e-3, "IQ2_S": 1e-3},
    "Q4_K": 1e-4,
    "Q5_K": 5e-5,
    "Q6_K": 1e-4,
}  # of block scales, so that weights are about 0.05
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 272,
}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=4)


def write_gguf_mix(directory: Path, rng: random.Random, *kinds: str) -> Path:
    """Write a GGUF target, each matrix of a type that is drawn."""
    model = llama(rng.randrange(1000), **SHAPE)
    model.config.save_pretrained(directory)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer = GGUFWriter(directory / "model.gguf", "llama")
    for source, name in tensor_names(model.config.to_dict()):
        values = state[name]
        kind = GGMLQuantizationType["F32" if values.ndim == 1 else rng.choice(kinds)]
        if kind.name in SPREAD:
            data = small_blocks(kind.name, *values.shape, seed=rng.randrange(1000))
        else:
            data = quantize(values * (1 if values.ndim == 1 else 4), kind)
        writer.add_tensor(source, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory


def small_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    blocks = columns // GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    data = random_blocks(kind, rows, blocks, seed).reshape(rows, blocks, -1)
    for at in FP16_AT.get(kind, [208]):
        scales = (
            np.random.default_rng(seed)
            .normal(0, SPREAD[kind], (rows, blocks, 1))
            .astype(np.float16)
        )
        data[:, :, at : at + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)


def write_gptq_mix(directory: Path, rng: random.Random) -> Path:
    """Write a GPTQ target whose layers have 4 or 8 bits, or are plain, by what is drawn."""
    model = llama(rng.randrange(1000), **SHAPE)
    dynamic: dict[str, Any] = {}
    tensors = {}
    for name, values in model.state_dict().items():
        layer = name.removesuffix(".weight")
        bits = rng.choice([4, 8, None]) if "_proj" in name else None
        if bits is None:
            tensors[name] = values.half() if values.ndim == 2 else values
            dynamic[f"-:{layer}"] = {}
            continue
        dynamic[f"+:{layer}"] = {"bits": bits}
        packed = gptq_layer(bits, len(values), [i // 32 for i in range(values.shape[1])], 1).tensors
        packed["scales"] = packed["scales"] / 2**bits
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in packed.items()}
    model.config.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "dynamic": dynamic,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


def prompts_of(rng: random.Random) -> list[list[int]]:
    """Return prompts that repeat themselves, so that look-ups draft."""
    texts = [[rng.randrange(3, 272) for _ in range(rng.randrange(2, 9))] for _ in range(6)]
    return [text * rng.randrange(1, 4) for text in texts]


def bits_of(
    target: Path, prompts: list[list[int]], method: str, slots: int, dtype: str
) -> list[Any]:
    """Return all tokens with their log-probabilities."""
    threads = 1 if slots == 1 else 2
    with LLM(str(target), method=method, slots=slots, threads=threads, dtype=dtype) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, PARAMS)]
    return [
        [(token, one.logprob) for here in output.logprobs for token, one in here.items()]
        for output in outputs
    ]


MIXES = {
    "any types": [*DENSE, *READERS],
    "plain and one other": ["F16", "F32", "Q4_K"],
    "none that is plain": list(READERS),
}


FAST = [
    ("any types", "auto"),
    ("plain and one other", "float16"),
    ("none that is plain", "bfloat16"),
]


@pytest.mark.parametrize(
    ("mix", "dtype"), mostly_slow(FAST, MIXES, ["auto", "float16", "bfloat16"])
)
def test_no_mix_of_stored_types_depends_on_company(mix, dtype, tmp_path):
    rng = random.Random(f"{mix} {dtype}")
    target = write_gguf_mix(tmp_path, rng, *MIXES[mix])
    prompts = prompts_of(rng)
    plain = bits_of(target, prompts, "none", 1, dtype)
    slots = rng.choice([3, 5, 8])
    assert bits_of(target, prompts, rng.choice(["suffix", "ngram"]), slots, dtype) == plain
    assert bits_of(target, prompts, "none", 8, dtype) == plain


def test_no_mix_of_bits_in_a_gptq_target_depends_on_company(tmp_path):
    rng = random.Random(2)
    target = write_gptq_mix(tmp_path, rng)
    prompts = prompts_of(rng)
    assert bits_of(target, prompts, "suffix", 5, "auto") == bits_of(
        target, prompts, "none", 1, "auto"
    )


@pytest.mark.parametrize(
    "write", [lambda path, rng: write_gguf_mix(path, rng, *DENSE, *READERS), write_gptq_mix]
)
@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_a_mix_is_planned_as_it_is_loaded(write, dtype, tmp_path):
    target = write(tmp_path, random.Random(3))
    model, shape = (
        ModelConfig(target=str(target), dtype=dtype, device="cpu"),
        read_model_config(target),
    )
    planned = planned_dtype(model, "cpu", target, shape)
    loaded = load_target(model)
    assert loaded.dtype is planned is torch.float32
    assert target_bytes_of(target, shape, planned, "cpu", model) == pytest.approx(
        weight_bytes(loaded), rel=0.03
    )


def test_drafts_on_two_ranks_give_the_bits_of_two_ranks(tmp_path):
    """One process adds the parts of a row in another order than ranks do, and may give other tokens."""
    rng = random.Random(4)
    target = write_gguf_mix(tmp_path, rng, "F16", "Q4_0", "Q8_0", "Q4_K")
    prompts = prompts_of(rng)
    model = ModelConfig(target=str(target), device="cpu", max_model_len=128)

    def decoded(method: str, slots: int) -> list[Any]:
        speculative = SpeculativeConfig(method=method, budget="uniform", max_nodes=8, max_depth=4)
        args = EngineArgs(slots, prefill_tokens=16)

        def work(engine: Any) -> list[Any]:
            return [
                (x.output_ids, x.output_logprobs)
                for x in run(engine, prompts, [PARAMS] * len(prompts))
            ]

        (tmp_path / f"{method}{slots}").mkdir()
        return with_ranks(2, tmp_path / f"{method}{slots}", model, speculative, args, work)[0]

    assert decoded("suffix", 5) == decoded("none", 1)
