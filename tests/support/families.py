"""Small random models of every family, and how a Target's trees are held equal to transformers' own forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.tree.draft_tree import DraftTree
from tests.support.toy_models import LLAMA, best_nodes, random_tree

WINDOW = 7
MIXED_WINDOWS = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
CAPPED = dict(attn_logit_softcapping=0.5)  # so low that a cap that is left out changes logits
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
}
MULTIPLIED = dict(
    logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.2
)
SLOTS = [3, 0, 4]
PROMPTS = [[5, 9, 23, 40, 11, 7, 31], list(range(3, 23)), [88]]  # the second is well past WINDOW
CHUNKS = [3, 12, 1]  # tokens of each prompt that a first chunk brings, where prompts come in two


def config_of(family: str, **own: Any) -> PreTrainedConfig:
    """A small config of a model_type; own: what this one has beside the common shape."""
    return AutoConfig.for_model(family, **{**LLAMA, **own})


# The first layer is chunked, rotated and normed; the second has experts, and temperatures of its own.
LLAMA4 = dict(
    MOE,
    head_dim=16,
    num_experts_per_tok=2,
    no_rope_layers=[1, 0],
    moe_layers=[1],
    attention_chunk_size=WINDOW,
    intermediate_size_mlp=56,
    floor_scale=4,
    attn_scale=0.5,
)
# The architectures of issue 5: every test run holds them.
FAMILIES = {
    "llama and vicuna": config_of("llama"),
    "deepseek distilled llama": config_of("llama", rope_parameters=LLAMA3_ROPE, head_dim=16),
    "mistral": config_of("mistral", sliding_window=WINDOW),
    "mixtral": config_of("mixtral", **MOE, sliding_window=WINDOW),
    "qwen2": config_of(
        "qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "deepseek distilled qwen": config_of("qwen2", rope_parameters=YARN_ROPE),
    "qwen2_moe": config_of("qwen2_moe", **MOE, shared_expert_intermediate_size=24),
    "qwen3": config_of("qwen3", head_dim=16),
    "qwen3_moe": config_of("qwen3_moe", **MOE, head_dim=16),
    "phi3": config_of("phi3", partial_rotary_factor=0.5, sliding_window=WINDOW),
    "gemma2": config_of(
        "gemma2", **CAPPED, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=24
    ),
    "gemma3_text": config_of("gemma3_text", **MIXED_WINDOWS, head_dim=16, query_pre_attn_scalar=24),
    "gemma": config_of("gemma", head_dim=16),
    "vaultgemma": config_of("vaultgemma", **MIXED_WINDOWS, **CAPPED, head_dim=16),
    "olmo2": config_of("olmo2"),
    "olmo3": config_of("olmo3", **MIXED_WINDOWS),
    "granite": config_of("granite", **MULTIPLIED),
    "glm": config_of("glm", head_dim=16),
    "glm4": config_of("glm4", head_dim=16, attention_bias=True),
    "ministral": config_of("ministral", **MIXED_WINDOWS, head_dim=16),
    "seed_oss": config_of("seed_oss", head_dim=16),
    "cwm": config_of("cwm", **MIXED_WINDOWS),
    "ernie4_5": config_of("ernie4_5"),
    "llama4_text": config_of("llama4_text", **LLAMA4),
    "gpt_oss": config_of(
        "gpt_oss", **MOE, head_dim=16, sliding_window=WINDOW, rope_parameters=YARN_ROPE
    ),
}
ROUTED = dict(
    n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1
)
LATENT = dict(
    MOE,
    **ROUTED,
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=12,
)
# The other model types of eagle_ray/families.py: the slow tests hold them.
OTHERS = {
    "afmoe": dict(MOE, **MIXED_WINDOWS, num_dense_layers=1, head_dim=16),
    "apertus": {},
    "arcee": {},
    "cohere": dict(logit_scale=0.3, use_qk_norm=True),
    "cohere2": dict(MIXED_WINDOWS, logit_scale=0.3),
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": dict(MOE, **MIXED_WINDOWS, **ROUTED),
    "ernie4_5_moe": dict(MOE, moe_num_experts=4, moe_k=2, moe_layer_start_index=1),
    "exaone4": dict(MIXED_WINDOWS),
    "flex_olmo": MOE,
    "gemma3n_text": dict(
        MIXED_WINDOWS,
        head_dim=16,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
        laurel_rank=4,
    ),
    "glm4_moe": dict(MOE, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1),
    "glm4_moe_lite": LATENT,
    "gpt2": dict(num_key_value_heads=None),
    "gpt_neox": dict(num_key_value_heads=None),
    "granite_swa": dict(MULTIPLIED, **MIXED_WINDOWS),
    "granitemoe": dict(MULTIPLIED, **MOE),
    "granitemoeshared": dict(MULTIPLIED, **MOE, shared_intermediate_size=24),
    "hunyuan_v1_dense": dict(head_dim=16),
    "hunyuan_v1_moe": dict(MOE, moe_topk=2, head_dim=16),
    "jais2": {},
    "minimax_m2": dict(MOE, head_dim=16),
    "ministral3": dict(
        head_dim=16,
        rope_parameters=dict(
            YARN_ROPE, original_max_position_embeddings=4, llama_4_scaling_beta=0.5
        ),
    ),
    "nanochat": dict(final_logit_softcapping=0.5),
    "olmo": dict(clip_qkv=1.0),
    "olmoe": MOE,
    "phi": dict(partial_rotary_factor=0.5),
    "phimoe": MOE,
    "smollm3": dict(no_rope_layers=[1, 0]),
    "solar_open": dict(
        MOE, n_routed_experts=4, n_group=2, topk_group=1, n_shared_experts=1, head_dim=16
    ),
    "starcoder2": dict(sliding_window=WINDOW),
    "youtu": LATENT,
}


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Weights large enough that every part of the model shows in its logits."""
    torch.manual_seed(seed)
    model = (
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    )
    for parameter in model.parameters():
        parameter.mul_(8) if parameter.ndim > 1 else parameter.add_(
            torch.randn_like(parameter) * 0.2
        )
    return model


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with transformers' eager attention and its own masks."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    return plain


def target_of(model: PreTrainedModel, **how: Any) -> TargetModel:
    """Five slots, of which SLOTS are ready to be written."""
    target = TargetModel(model, num_slots=5, capacity=64, **how)
    for slot in SLOTS:
        target.cache.blocks.reserve(slot, 64)
    return target


def prefill(target: TargetModel, chunks: list[int] | None) -> Tensor:
    """PROMPTS in the target's slots; the logits after each. chunks: where each is cut in two."""
    if chunks is None:
        return target.prefill(PromptBatch.of(SLOTS, PROMPTS, target.device)).logits
    heads = [ids[:n] for ids, n in zip(PROMPTS, chunks, strict=True)]
    first = target.prefill(PromptBatch.of(SLOTS, heads, target.device)).logits
    rest = [b for b, ids in enumerate(PROMPTS) if len(ids) > chunks[b]]
    later = target.prefill(
        PromptBatch.of(
            [SLOTS[b] for b in rest],
            [PROMPTS[b][chunks[b] :] for b in rest],
            target.device,
            starts=[chunks[b] for b in rest],
        )
    ).logits
    return first.index_copy(0, torch.tensor(rest, device=target.device), later)


def random_trees(budgets: list[int], vocab: int = 97) -> DraftTree:
    """One random tree for each prompt, of budgets[b] nodes."""
    trees = [
        random_tree(torch.Generator().manual_seed(b), max(budgets), vocab)
        for b in range(len(budgets))
    ]
    return best_nodes(
        DraftTree(*(torch.cat([getattr(t, f) for t in trees]) for f in DraftTree.__slots__)),
        budgets,
    )


def path_to(tree: DraftTree, b: int, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[b, node])
    return path


# Of the largest logit: what fp32 may differ by. Where logits reach 51 (youtu), transformers' own are 1.8e-6 of that
# from its fp64.
ROUNDING = 4e-6


def assert_trees_equal(
    plain: PreTrainedModel,
    target: TargetModel,
    chunks: list[int] | None = None,
    atol: float = 1e-4,
    budgets: Sequence[int] = (9, 2, 6),
    padding: int = 3,
) -> None:
    """After the prompts and after every node of packed trees: the logits of a plain forward of that path."""

    def check(logits: Tensor, ids: list[int]) -> None:
        own = plain(torch.tensor([ids], device=target.device), use_cache=False).logits[0, -1]
        allowed = max(atol, ROUNDING * float(own.abs().max()))
        torch.testing.assert_close(logits, own, atol=allowed, rtol=0)

    budgets = list(budgets)
    logits = prefill(target, chunks)
    for b, ids in enumerate(PROMPTS):
        check(logits[b], ids)
    tree = random_trees(budgets).to(target.device)
    batch = DecodeSlots.of(SLOTS, [len(ids) for ids in PROMPTS], target.device)
    rows = tree.pack(batch.lengths, sum(budgets) + padding)
    logits = target.verify(tree, rows, batch, max_depth=8).logits
    for b, budget in enumerate(budgets):
        for node in range(budget):
            ids = PROMPTS[b] + tree.tokens[b, path_to(tree, b, node)].tolist()
            check(logits[rows.row_of[b, node]], ids)


def fake_to(module: nn.Module, device: str) -> nn.Module:
    """Module.to, which swaps tensors in place; fake ones cannot be swapped."""
    for part in module.modules():
        for key, weight in part._parameters.items():
            part._parameters[key] = (
                None if weight is None else nn.Parameter(weight.to(device), requires_grad=False)
            )
        for key, buffer in part._buffers.items():
            part._buffers[key] = None if buffer is None else buffer.to(device)
    return module


def fake_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A cache's memory, not mapped from the machine's own."""
    return torch.zeros(shape, dtype=dtype, device=device)


# What our own forward computes, without experts and with them.
OF_OTHER_FORMS = [
    "gemma",
    "gemma2",
    "gemma3_text",
    "vaultgemma",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "glm",
    "glm4",
    "ministral",
    "seed_oss",
    "cwm",
    "ernie4_5",
]
DENSE = {
    "llama": config_of("llama", attention_bias=True, mlp_bias=True),
    "llama3 rope": config_of(
        "llama", rope_parameters=LLAMA3_ROPE, head_dim=16, tie_word_embeddings=True
    ),
    "mistral": FAMILIES["mistral"],
    "qwen2": FAMILIES["qwen2"],
    "qwen2 yarn": FAMILIES["deepseek distilled qwen"],
    "qwen3": FAMILIES["qwen3"],
    **{name: FAMILIES[name] for name in OF_OTHER_FORMS},
    "olmo3 yarn in full layers": config_of(
        "olmo3",
        **MIXED_WINDOWS,
        rope_parameters={
            "sliding_attention": dict(rope_type="default", rope_theta=1e4),
            "full_attention": YARN_ROPE,
        },
    ),
    "phi3, all rotated": config_of("phi3", head_dim=16),
    "one kv head": config_of("qwen3", num_attention_heads=3, num_key_value_heads=1, head_dim=24),
}
MIXED = {
    "mixtral": FAMILIES["mixtral"],
    "qwen2_moe": FAMILIES["qwen2_moe"],
    "qwen3_moe": FAMILIES["qwen3_moe"],
    "one of five experts": config_of(
        "qwen3_moe", **(MOE | dict(num_experts=5, num_experts_per_tok=1)), head_dim=16
    ),
    "seven experts not normalized": config_of(
        "qwen3_moe",
        **(MOE | dict(num_experts=7, num_experts_per_tok=3)),
        norm_topk_prob=False,
        num_key_value_heads=1,
    ),
    "one of three experts": config_of(
        "mixtral", **(MOE | dict(num_local_experts=3, num_experts_per_tok=1))
    ),
    "olmoe": config_of("olmoe", **MOE),
    "olmoe with keys of one head": config_of("olmoe", **MOE, num_key_value_heads=1),
    "llama4_text": FAMILIES["llama4_text"],
    "llama4, one expert, chunks in all layers": config_of(
        "llama4_text",
        **(LLAMA4 | dict(num_experts_per_tok=1, moe_layers=[0, 1], use_qk_norm=False)),
        layer_types=["chunked_attention"] * 2,
        attn_temperature_tuning=False,
    ),
    "experts in one layer of two": config_of("qwen3_moe", **MOE, mlp_only_layers=[0]),
}
COVERED = DENSE | MIXED | {"gpt_oss": FAMILIES["gpt_oss"]}
