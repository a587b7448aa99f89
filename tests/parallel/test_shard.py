"""Shards: each rank's part of a target computes with the others what the whole computes, by as few sums as possible."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from eagle_ray.assembly import tensor_parallel
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.gguf_targets import gguf_directory
from eagle_ray.assembly.model_memory import weight_bytes
from eagle_ray.assembly.stored_bytes import target_bytes_of
from eagle_ray.assembly.tensor_parallel import num_ranks
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError, EngineError, RankError
from eagle_ray.models.gpu_linears import fp8_weight
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.packed_linear import pack_linears
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.parallel.shard import fitting_sizes
from tests.support.gguf import toy_metadata, toy_tensors, write_gguf
from tests.support.quantised_files import PackedLayer, gptq_layer, integer_layer
from tests.support.ranks import on_ranks

SHAPE = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    initializer_range=0.1,
)
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "mistral, window": MistralConfig(**SHAPE, sliding_window=7, head_dim=16),
    "qwen2, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "gemma3_text": Gemma3TextConfig(
        **SHAPE,
        head_dim=8,
        sliding_window=7,
        layer_types=WINDOWS,
    ),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8, sliding_window=7),
    "granite": GraniteConfig(**SHAPE, residual_multiplier=0.5, embedding_multiplier=2.0),
    "ernie4_5": Ernie4_5Config(**SHAPE, head_dim=8),
    "phi3": Phi3Config(**SHAPE, sliding_window=7, pad_token_id=0),
    "glm": GlmConfig(**SHAPE, head_dim=8, pad_token_id=0),
    "glm4": Glm4Config(**SHAPE, head_dim=8, attention_bias=True, pad_token_id=0),
    "olmo2": Olmo2Config(**SHAPE),
    "olmo3": Olmo3Config(**SHAPE, sliding_window=7, layer_types=WINDOWS),
    "phi3, two key/value heads": Phi3Config(**SHAPE | dict(num_key_value_heads=2), pad_token_id=0),
    "olmo2, two key/value heads": Olmo2Config(**SHAPE | dict(num_key_value_heads=2)),
    "qwen2, two key/value heads": Qwen2Config(**SHAPE | dict(num_key_value_heads=2)),
    "llama, one key/value head": LlamaConfig(
        **SHAPE | dict(num_key_value_heads=1), attention_bias=True
    ),
}
FOR_GROUPS = dict(
    hidden_size=64, intermediate_size=128, head_dim=16, num_attention_heads=4, num_key_value_heads=2
)
CONFIGS_OF_QUANTISED = {"llama, for groups": LlamaConfig(**SHAPE | FOR_GROUPS)}
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
MIXTURES = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=3, sliding_window=7),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=40),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, norm_topk_prob=True),
    "qwen3_moe, experts in two layers of three": Qwen3MoeConfig(
        **SHAPE, **EXPERTS, head_dim=8, mlp_only_layers=[1], tie_word_embeddings=True
    ),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(
        **SHAPE,
        num_local_experts=6,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=7,
        layer_types=WINDOWS,
    ),
    "llama4_text": Llama4TextConfig(
        **SHAPE,
        num_local_experts=6,
        head_dim=8,
        moe_layers=[0, 2],
        intermediate_size_mlp=56,
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=7,
        floor_scale=4,
        attn_scale=0.5,
    ),
}
CONFIGS |= MIXTURES
PLAIN = SpeculativeConfig(method="none")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
PROMPTS = [list(range(5, 45)), [7, 3, 9]]
SOME = [5, 100, 7, 26, 51, 52]


@pytest.fixture
def checkpoint(tmp_path):
    def write(name: str):
        from transformers import AutoModelForCausalLM

        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config((CONFIGS | CONFIGS_OF_QUANTISED)[name])
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("bias"):
                    parameter.normal_()
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return write


def prefill_logits(
    path, ranks: RankGroup | None = None, packs: bool = False, dequantize: bool = False
):
    """Return the logits of a pass over the prompts, those of some tokens alone, and the collectives that it took."""
    model = load_causal_lm(path, torch.float32, "cpu", dequantize, ranks=ranks)
    if packs:
        pack_linears(model, 1)
    with torch.inference_mode():
        target = TargetModel(model, 2, 64)
        for slot, prompt in enumerate(PROMPTS):
            target.cache.blocks.reserve(slot, len(prompt))
        before = (ranks.num_reduces, ranks.num_gathers) if ranks else (0, 0)
        output = target.prefill(PromptBatch.of([0, 1], PROMPTS))
        after = (ranks.num_reduces, ranks.num_gathers) if ranks else (0, 0)
        some = target.logits_over(torch.tensor(SOME))(output.hidden)
    return output.logits, some, [b - a for a, b in zip(before, after, strict=True)]


def error(own: torch.Tensor, whole: torch.Tensor) -> float:
    """Return the largest difference, as a part of the largest logit."""
    return float((own - whole).abs().max() / whole.abs().max())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_compute_what_one_process_computes(checkpoint, tmp_path, name, size):
    path = checkpoint(name)
    whole, some, _ = prefill_logits(path)
    parts = on_ranks(size, tmp_path, lambda ranks: prefill_logits(path, ranks, packs=size == 4))
    for logits, some_logits, counts in parts:
        per_layer = 4 if name.startswith("olmo") else 2  # with sums for norms of queries and keys
        assert counts == [per_layer * SHAPE["num_hidden_layers"], 1], (
            "two collectives a layer and one for the logits"
        )
        assert logits.shape == whole.shape and error(logits, whole) < 1e-5
        assert error(some_logits, some) < 1e-5
        assert torch.equal(logits, parts[0][0]), "all ranks have the same bits"


@pytest.mark.parametrize("stored", ["both", "lm_head"])
def test_a_stored_lm_head_counts_under_a_tied_config_on_ranks(checkpoint, tmp_path, stored):
    path = checkpoint("llama, tied")
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = (
        embedding.flip(0).contiguous() if stored == "both" else embedding.clone()
    )
    if stored == "lm_head":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    whole, some, _ = prefill_logits(path)
    for logits, some_logits, _ in on_ranks(2, tmp_path, lambda ranks: prefill_logits(path, ranks)):
        assert error(logits, whole) < 1e-5 and error(some_logits, some) < 1e-5


def test_an_embedding_stands_for_no_lm_head_of_its_own(checkpoint, tmp_path):
    path = checkpoint("llama")
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"not whole: missing lm_head\.weight"):
        on_ranks(2, tmp_path, lambda ranks: prefill_logits(path, ranks))


@pytest.mark.parametrize("dequantize, most", [(True, 1e-5), (False, 1e-2)])
def test_quantised_projections_are_shared(tmp_path, dequantize, most):
    """With their own kernels inputs are rounded to 8 bits, so that a last bit of a sum may become a step of those."""
    metadata = toy_metadata(**{"llama.embedding_length": 128, "llama.feed_forward_length": 192})
    write_gguf(tmp_path / "model.gguf", metadata, toy_tensors(metadata))
    path = gguf_directory(tmp_path / "model.gguf")
    whole, some, _ = prefill_logits(path, dequantize=dequantize)
    for logits, some_logits, counts in on_ranks(
        2, tmp_path, lambda ranks: prefill_logits(path, ranks, dequantize=dequantize)
    ):
        assert counts == [4, 1]
        assert error(logits, whole) < most and error(some_logits, some) < most


CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
INTEGERS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNELS}},
    "ignore": ["lm_head"],
}
ONE_GROUP = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}


@pytest.mark.parametrize(
    "make, quantization",
    [
        (lambda out, num_in: integer_layer(out, num_in, symmetric=False), INTEGERS),
        (lambda out, num_in: gptq_layer(4, out, [0] * num_in, 1), ONE_GROUP),
    ],
    ids=["int8", "gptq"],
)
def test_a_scale_for_all_inputs_is_that_of_each_part(checkpoint, tmp_path, make, quantization):
    path = checkpoint("llama, for groups")
    quantise(path, make, quantization)
    whole, some, _ = prefill_logits(path, dequantize=True)
    assert (
        num_ranks(ModelConfig(target=str(path), device="cpu"), PLAIN, EngineArgs(tensor_parallel=2))
        == 2
    )
    for logits, some_logits, counts in on_ranks(
        2, tmp_path, lambda ranks: prefill_logits(path, ranks, dequantize=True)
    ):
        assert counts == [6, 1]
        assert error(logits, whole) < 1e-5 and error(some_logits, some) < 1e-5


def quantise(path: Path, make: Callable[[int, int], PackedLayer], quantization: dict) -> None:
    """Put other projections, which are quantised, into a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        layer = make(*tensors.pop(name).shape)
        tensors |= {
            f"{name.removesuffix('weight')}{suffix}": tensor
            for suffix, tensor in layer.tensors.items()
        }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def test_ranks_share_a_head_of_keys_if_there_are_more_of_them(checkpoint, tmp_path):
    """Four ranks and two heads: each pair of ranks, which has its half of the queries, has the same keys."""
    path = checkpoint("qwen2, two key/value heads")
    stored = load_file(path / "model.safetensors")
    keys = on_ranks(
        4, tmp_path, lambda ranks: load_causal_lm(path, torch.float32, "cpu", ranks=ranks)
    )
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight"):
        key = f"model.layers.1.self_attn.{name}"
        assert torch.equal(
            torch.stack([model.get_parameter(key) for model in keys]),
            torch.stack([half for half in stored[key].chunk(2) for _ in range(2)]),
        )
    assert keys[3].config.num_key_value_heads == 1 and keys[3].config.num_attention_heads == 2


def test_plain_weights_are_rounded_as_they_are_read(checkpoint, tmp_path):
    """An output has a scale of its own on each rank: those of a whole layer if it is split by outputs."""
    path = checkpoint("llama")
    stored = load_file(path / "model.safetensors")

    def work(ranks: RankGroup):
        layer = load_causal_lm(
            path, torch.bfloat16, "cpu", ranks=ranks, rounds=True
        ).base_model.layers[1]
        return layer.mlp.up_proj.weight, layer.mlp.down_proj.weight

    ups, downs = zip(*on_ranks(2, tmp_path, work), strict=True)
    up, down = (
        stored[f"model.layers.1.mlp.{name}_proj.weight"].bfloat16() for name in ("up", "down")
    )
    assert torch.equal(torch.cat(ups), fp8_weight(up).dequantize().bfloat16())
    for part, own in zip(down.chunk(2, 1), downs, strict=True):
        assert torch.equal(own, fp8_weight(part).dequantize().bfloat16()) and not torch.equal(
            own, part
        )


def test_a_row_has_the_same_bits_in_any_batch(checkpoint, tmp_path):
    path = checkpoint("llama")

    def work(ranks: RankGroup):
        layer = (
            load_causal_lm(path, torch.float32, "cpu", ranks=ranks)
            .base_model.layers[0]
            .mlp.down_proj
        )
        pack_linears(layer, 1)
        random = torch.Generator().manual_seed(ranks.rank)
        rows = torch.randn(9, layer.in_features, generator=random, dtype=torch.float32)
        return all(torch.equal(layer(rows)[i : i + 1], layer(rows[i : i + 1])) for i in range(9))

    assert on_ranks(2, tmp_path, work) == [True, True]


WHOLE = (
    "norm",
    "embed_tokens",
    "mlp.gate.",
    "part.gate.",
    "expert_gate.",
)  # embeddings, norms and routers


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_rank_holds_its_part_and_no_more(checkpoint, tmp_path, name):
    path = checkpoint(name)
    stored = {
        name: p.numel() for name, p in load_causal_lm(path, torch.float32, "cpu").named_parameters()
    }
    shared = {name: size for name, size in stored.items() if any(part in name for part in WHOLE)}
    numel = sum(stored.values()) - sum(shared.values())
    padded = (SHAPE["vocab_size"] % 2) * SHAPE[
        "hidden_size"
    ]  # a row of zeros in the last rank's lm_head

    def work(ranks: RankGroup) -> dict[str, int]:
        model = load_causal_lm(path, torch.float32, "cpu", ranks=ranks)
        return {name: parameter.numel() for name, parameter in model.named_parameters()}

    for sizes in on_ranks(2, tmp_path, work):
        own = {
            name: size for name, size in sizes.items() if not any(part in name for part in WHOLE)
        }
        assert 2 * sum(own.values()) == numel + padded
        assert sum(sizes.values()) - sum(own.values()) == sum(shared.values())


def test_whoever_reads_stops_once_a_rank_is_lost(checkpoint, tmp_path):
    ranks = RankGroup(0, 2, str(tmp_path / "meeting"))
    reasons = iter([None] * 5)
    ranks.why_lost = lambda seconds: next(reasons, "rank 1 was ended by signal 9")
    with pytest.raises(RankError, match="rank 0 of 2: rank 1 was ended by signal 9"):
        load_causal_lm(checkpoint("llama"), torch.float32, "cpu", ranks=ranks)


LAYER = "model.layers.1.mlp"


@pytest.mark.parametrize(
    "name, shape, wanted",
    [
        (f"{LAYER}.up_proj.weight", (73, 48), (72, 48)),
        (f"{LAYER}.down_proj.weight", (48, 73), (48, 72)),
        (f"{LAYER}.up_proj.bias", (73,), (72,)),
        ("model.layers.0.self_attn.k_proj.weight", (25, 48), (24, 48)),
        ("lm_head.weight", (103, 48), (101, 48)),
        ("model.layers.2.mlp.experts.3.gate_proj.weight", (25, 48), (24, 48)),
    ],
)
def test_a_tensor_that_is_wider_than_its_config_is_not_cut(
    checkpoint, tmp_path, name, shape, wanted
):
    """Halves of 73 rows would be 36 each, as those of 72 are."""
    path = checkpoint("qwen3_moe" if "experts" in name else "llama, biases")
    tensors = load_file(path / "model.safetensors")
    assert tensors[name].shape == wanted
    save_file(tensors | {name: torch.zeros(shape)}, path / "model.safetensors", {"format": "pt"})
    said = re.escape(f"the target's {name} is {shape}, and its config wants {wanted}")
    with pytest.raises(EngineError, match=said):
        load_causal_lm(path, torch.float32, "cpu", ranks=RankGroup(0, 2, str(tmp_path / "meeting")))


def test_quantized_tensor_wider_than_its_config_is_refused(checkpoint, tmp_path):
    path = checkpoint("llama, for groups")
    quantise(
        path,
        lambda out, num_in: integer_layer(out + (out == 128), num_in, symmetric=False),
        INTEGERS,
    )
    with pytest.raises(
        EngineError, match=r"mlp.gate_proj.weight is \(129, 64\), and its config wants \(128, 64\)"
    ):
        load_causal_lm(path, torch.float32, "cpu", ranks=RankGroup(0, 2, str(tmp_path / "meeting")))


@pytest.mark.parametrize(
    "size, changes, words",
    [
        (
            4,
            {"num_key_value_heads": 3, "num_attention_heads": 12},
            "3 key/value heads. Set it to one of 1, 3, 6, 12",
        ),
        (3, {}, "2 key/value heads and its 4 heads. Set it to one of 1, 2, 4"),
        (2, {"intermediate_size": 385}, "MLP of 385"),
        (2, {"model_type": "smollm3"}, "'smollm3'"),
        (2, {"model_type": "mixtral", "intermediate_size": 385}, "MLP of 385. Set it to 1, "),
        (
            2,
            {"model_type": "qwen3_moe", "moe_intermediate_size": 25},
            "moe_intermediate_size of 25. Set it to 1, ",
        ),
        (
            2,
            {
                "model_type": "qwen2_moe",
                "moe_intermediate_size": 25,
                "shared_expert_intermediate_size": 41,
            },
            "moe_intermediate_size of 25 and its shared_expert_intermediate_size of 41",
        ),
        (
            2,
            {"model_type": "qwen3_moe", "mlp_only_layers": [0], "intermediate_size": 385},
            "MLP of 385",
        ),
    ],
)
def test_indivisible_target_is_refused_before_loading(tmp_path, size, changes, words):
    config = dict(
        SHAPE, num_key_value_heads=2, num_attention_heads=4, model_type="llama", architectures=["X"]
    )
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    model = ModelConfig(target=str(tmp_path), device="cpu")
    with pytest.raises(ConfigError, match=f"(?s)^tensor_parallel: {size}.*{words}"):
        num_ranks(model, PLAIN, EngineArgs(tensor_parallel=size))


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_8bit": True}
BY_ACTIVATIONS = {
    "actorder": "group",
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
SHUFFLED = PACKED | {
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": BY_ACTIVATIONS}}
}
FILE = "model.safetensors"


@pytest.mark.parametrize(
    "changes, file, fp8, words",
    [
        (
            {"quantization_config": BITSANDBYTES},
            FILE,
            False,
            "quantised by 'bitsandbytes', which ranks do not read",
        ),
        (
            {"quantization_config": GPTQ | {"desc_act": True}},
            FILE,
            False,
            r"apart \(desc_act or actorder\)",
        ),
        ({"quantization_config": SHUFFLED}, FILE, False, r"apart \(desc_act or actorder\)"),
        (
            {},
            "pytorch_model-00001-of-2.bin",
            False,
            "in pytorch_model-00001-of-2.bin, and ranks read parts of safe",
        ),
        ({"quantization_config": GPTQ}, FILE, True, "fp8 is for plain weights"),
    ],
    ids=["quantiser", "desc_act", "actorder", "pickle", "fp8"],
)
def test_what_ranks_do_not_read_is_refused_before_they_start(
    tmp_path, monkeypatch, caplog, changes, file, fp8, words
):
    """With auto, layers are placed in turn, and the log says why."""
    config = dict(
        SHAPE, model_type="llama", architectures=["X"], intermediate_size=128, head_dim=16
    )
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / file).write_bytes(b"never read")
    model = ModelConfig(target=str(tmp_path), device="cpu", quantization="fp8" if fp8 else "none")
    monkeypatch.setattr(
        tensor_parallel, "read_model_config", AutoConfig.from_pretrained
    )  # bitsandbytes need not be installed
    with pytest.raises(
        ConfigError, match=f"^tensor_parallel: 2, and .*{words}.*, or set tensor_parallel to 1.$"
    ):
        num_ranks(model, PLAIN, EngineArgs(tensor_parallel=2))
    see_gpus(monkeypatch, ["H100", "H100"])
    with caplog.at_level("INFO", "eagle_ray"):
        assert num_ranks(model, PLAIN, EngineArgs(tensor_parallel="auto", num_gpus=2)) == 1
    assert re.search(f"placed on 2 GPUs in turn.*{words}", caplog.text)


@pytest.mark.parametrize(
    "order", [{}, {"desc_act": True, "static_groups": True}, {"desc_act": True, "group_size": -1}]
)
def test_groups_in_the_order_of_inputs_are_split(tmp_path, order):
    config = dict(
        SHAPE, model_type="llama", architectures=["X"], intermediate_size=128, head_dim=16
    )
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": GPTQ | order})
    )
    (tmp_path / FILE).write_bytes(b"never read")
    assert (
        num_ranks(
            ModelConfig(target=str(tmp_path), device="cpu"), PLAIN, EngineArgs(tensor_parallel=2)
        )
        == 2
    )


def see_gpus(monkeypatch, kinds: list[str], room: int = 10**9) -> None:
    """Let the machine have GPUs of these kinds."""
    monkeypatch.setattr(tensor_parallel, "device_type", lambda model: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: kinds[device])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=room)
    )


@pytest.mark.parametrize(
    "num_gpus, ranks, words",
    [
        (4, 2, "has 4 GPUs, one for each rank. Set it to one of 1, 4, or give the engine 2 GPUs"),
        (
            3,
            2,
            "has 3 GPUs, one for each rank. Set it to 1, the only one that does, or give the engine 2 GPUs",
        ),
        (
            1,
            8,
            "has 4 GPUs, one for each rank. Set it to one of 1, 2, 4, or give the engine 8 GPUs",
        ),
        (0.5, 2, "Set it to 1, the only one that does, or give the engine 2 GPUs"),
    ],
)
def test_numbers_that_the_gpus_allow_are_named(checkpoint, monkeypatch, num_gpus, ranks, words):
    """An engine with one GPU by its settings, an LLM's, takes all that the machine has."""
    see_gpus(monkeypatch, ["H100"] * 4)
    model = ModelConfig(target=str(checkpoint("llama")), dtype="bfloat16")
    with pytest.raises(ConfigError, match=f"^tensor_parallel: {ranks}, and the engine .*{words}"):
        num_ranks(model, PLAIN, EngineArgs(tensor_parallel=ranks, num_gpus=num_gpus))


def test_ranks_that_draft_with_a_model_have_gpus_of_one_kind(checkpoint, monkeypatch):
    """Each computes the draft's logits, whose last bits decide trees."""
    see_gpus(monkeypatch, ["H100", "H200"])
    model = ModelConfig(target=str(checkpoint("llama")), draft="a/head", dtype="bfloat16")
    eagle, args = SpeculativeConfig(method="eagle3"), EngineArgs(tensor_parallel=2, num_gpus=2)
    with pytest.raises(
        ConfigError, match=r"several kinds \(H100, H200\), on which ranks could draft other trees"
    ):
        num_ranks(model, eagle, args)
    assert num_ranks(model, eagle, replace(args, tensor_parallel="auto")) == 1
    assert num_ranks(model, SpeculativeConfig(method="suffix"), args) == 2
    see_gpus(monkeypatch, ["H100", "H100"])
    assert num_ranks(model, eagle, args) == 2


def test_the_sizes_that_would_do_are_named():
    sizes = dict(
        hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672
    )  # a 70B's
    config = LlamaConfig(**SHAPE | sizes)
    assert fitting_sizes(config) == [1, 2, 4, 8, 16, 32, 64]
    assert fitting_sizes(config, group_size=128) == [1, 2, 4, 8, 16, 32]
    assert fitting_sizes(config, group_size=8192) == [1]
    assert fitting_sizes(Phi3Config(**SHAPE, pad_token_id=0)) == [1, 2, 4, 8]
    assert fitting_sizes(SmolLM3Config(**SHAPE)) == [1]


def test_the_sizes_of_mixtures_are_named():
    """Those of Qwen3-235B-A22B, whose intermediate_size no layer has, of Mixtral-8x22B and of Qwen1.5-MoE-A2.7B."""
    heads = dict(num_attention_heads=64, num_key_value_heads=4)
    qwen3 = Qwen3MoeConfig(
        **SHAPE | heads | dict(moe_intermediate_size=1536, intermediate_size=12289)
    )
    assert fitting_sizes(qwen3) == [1, 2, 4, 8, 16, 32, 64]
    assert fitting_sizes(qwen3, group_size=32) == [1]
    heads = dict(num_attention_heads=48, num_key_value_heads=8)
    assert fitting_sizes(MixtralConfig(**SHAPE | heads | dict(intermediate_size=16384))) == [
        1,
        2,
        4,
        8,
        16,
    ]
    heads = dict(num_attention_heads=16, num_key_value_heads=16)
    widths = dict(moe_intermediate_size=1408, shared_expert_intermediate_size=5632)
    assert fitting_sizes(Qwen2MoeConfig(**SHAPE | heads | widths)) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    "family, words", [("llama", "MLP of 72 in groups of 16"), ("mixtral", "experts of 'mixtral'")]
)
def test_products_in_fp8_are_checked_before_anything_is_loaded(tmp_path, family, words):
    config = dict(
        SHAPE, intermediate_size=72, num_key_value_heads=2, model_type=family, architectures=["X"]
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    model = ModelConfig(target=str(tmp_path), device="cpu", quantization="fp8")
    with pytest.raises(ConfigError, match=words):
        num_ranks(model, PLAIN, EngineArgs(tensor_parallel=2))


@pytest.mark.parametrize("room, num_seen, size", [(10**9, 2, 2), (10**4, 2, 1), (10**9, 1, 1)])
def test_auto_places_layers_in_turn_if_a_rank_has_no_room(
    checkpoint, monkeypatch, room, num_seen, size
):
    path = checkpoint("llama")
    see_gpus(monkeypatch, ["H100"] * num_seen, room)
    model = ModelConfig(target=str(path), dtype="bfloat16")
    assert num_ranks(model, PLAIN, EngineArgs(tensor_parallel="auto", num_gpus=2)) == size


def test_ranks_of_a_mixture_have_gpus_of_one_kind(checkpoint, monkeypatch):
    """Each chooses experts by a product of its own, and no checksum would see that two chose differently."""
    see_gpus(monkeypatch, ["H100", "H100"])
    args, auto = (
        EngineArgs(tensor_parallel=2, num_gpus=2),
        EngineArgs(tensor_parallel="auto", num_gpus=2),
    )
    model = ModelConfig(target=str(checkpoint("qwen3_moe")), dtype="bfloat16")
    assert num_ranks(model, PLAIN, args) == num_ranks(model, PLAIN, auto) == 2
    see_gpus(monkeypatch, ["H100", "H200"])
    with pytest.raises(ConfigError, match=r"several kinds \(H100, H200\)"):
        num_ranks(model, PLAIN, args)
    assert num_ranks(model, PLAIN, auto) == 1
    assert (
        num_ranks(ModelConfig(target=str(checkpoint("llama")), dtype="bfloat16"), PLAIN, args) == 2
    )


@pytest.mark.parametrize(
    "name, size", [*((name, 2) for name in CONFIGS), ("qwen2, two key/value heads", 4)]
)
def test_the_bytes_of_a_rank_are_planned(checkpoint, tmp_path, name, size):
    """Routers, norms and key/value heads of several ranks are not divided."""
    path = checkpoint(name)
    planned = target_bytes_of(
        path, CONFIGS[name], torch.float32, "cpu", ModelConfig(target=str(path)), size
    )
    sizes = on_ranks(
        size,
        tmp_path,
        lambda ranks: weight_bytes(load_causal_lm(path, torch.float32, "cpu", ranks=ranks)),
    )
    assert planned == pytest.approx(max(sizes), abs=1)


def test_one_rank_is_the_default_on_a_cpu():
    model = ModelConfig(device="cpu")
    assert num_ranks(model, PLAIN, EngineArgs(tensor_parallel="auto")) == 1
    assert num_ranks(model, PLAIN, EngineArgs(tensor_parallel=2)) == 2
