"""Shapes of the layers of published targets, as their config.json files on the hub state them."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from eagle_ray.parallel.shard import fitting_sizes, shard_config

_LLAMA_3 = {"num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128}
_QWEN_3 = {"num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128}
TARGETS: dict[str, PreTrainedConfig] = {
    "Llama-3.1-8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, **_LLAMA_3
    ),
    "Llama-3.3-70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_attention_heads=64, **_LLAMA_3
    ),
    "Llama-3.1-405B": LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_attention_heads=128, **_LLAMA_3
    ),
    "Llama-3.2-3B": LlamaConfig(
        hidden_size=3072, intermediate_size=8192, num_attention_heads=24, **_LLAMA_3
    ),
    "Qwen2.5-7B": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    ),
    "Qwen2.5-72B": Qwen2Config(
        hidden_size=8192,
        intermediate_size=29568,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=152064,
    ),
    "Qwen3-0.6B": Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, **_QWEN_3
    ),
    "Qwen3-8B": Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, **_QWEN_3
    ),
    "Qwen3-14B": Qwen3Config(
        hidden_size=5120, intermediate_size=17408, num_attention_heads=40, **_QWEN_3
    ),
    "Qwen3-32B": Qwen3Config(
        hidden_size=5120, intermediate_size=25600, num_attention_heads=64, **_QWEN_3
    ),
}


def layer_shapes(target: str, group_size: int | None = None) -> Iterator[tuple[int, str, int, int]]:
    """Yield the ranks, the name, the outputs and the inputs of each product of a target's layer, for 1 to 8 ranks.

    group_size: inputs that share a scale of its weights, in which ranks may have to divide.
    """
    config = TARGETS[target]
    for num_ranks in fitting_sizes(config, group_size):
        if num_ranks > 8:
            return
        own = shard_config(config, num_ranks)
        heads = own.num_attention_heads * own.head_dim
        keys = own.num_key_value_heads * own.head_dim
        yield num_ranks, "qkv", heads + 2 * keys, own.hidden_size
        yield num_ranks, "o", own.hidden_size, heads
        yield num_ranks, "gate_up", 2 * own.intermediate_size, own.hidden_size
        yield num_ranks, "down", own.hidden_size, own.intermediate_size
