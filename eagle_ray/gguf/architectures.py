"""One record per GGUF architecture: its keys and tensors, with their names in transformers.

    record = ARCHITECTURES["gemma3"]          # by general.architecture
    record.layer_tensors["ffn_norm.weight"]   # "pre_feedforward_layernorm.weight"
    OF_MODEL_TYPE["gemma3_text"] is record    # by the model_type of a config.json

Keys that all architectures share (sizes, heads, the rotary base) are read by `gguf_target`; a
record's `config` adds its family's own. A key of the file that neither reads, and that UNUSED_KEYS
does not list, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle_ray.gguf.blocks import GGUFError
from eagle_ray.gguf.gguf_file import GGUFFile

Array = np.ndarray
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
GGUF_LM_HEAD = "output.weight"  # missing if the lm_head is tied to the embedding
FACTORS_LONG = "rope_factors_long.weight"
FACTORS_SHORT = "rope_factors_short.weight"
DEFAULT_THETA = 10000.0  # base of rotary embeddings in files that name none
SLIDING_LAYER = "sliding_attention"
FULL_LAYER = "full_attention"
# Keys that change nothing: copies of other keys, and what only llama.cpp's own programs read.
UNUSED_KEYS = frozenset(
    ("vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "pooling_type")
)
NOTHING = (None, 0, False, "none")  # values of a key that say that it has no effect


class MetadataKeys:
    """The keys of an architecture in a file's metadata. It records which keys have been read.

    Args:
        architecture: name of the architecture, the prefix of its keys.
    """

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        prefix = f"{architecture}."
        self.values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self.architecture = architecture
        self.read: set[str] = set(UNUSED_KEYS)

    def require(self, key: str) -> Any:
        """Return the value of a key. Raises KeyError with the full key if it is missing."""
        if key not in self.values:
            raise KeyError(f"{self.architecture}.{key}")
        return self.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default. An fp32 number is returned as its shortest decimal."""
        self.read.add(key)
        value = self.values.get(key, default)
        return shortest(value) if isinstance(value, float) else value

    def unread(self) -> list[str]:
        """Return the full names of keys that were not read although their value has an effect."""
        names = sorted(self.values.keys() - self.read)
        return [f"{self.architecture}.{key}" for key in names if self.values[key] not in NOTHING]


ConfigOf = Callable[[MetadataKeys, GGUFFile, dict[str, Any]], dict[str, Any]]


def _nothing_else(keys: MetadataKeys, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one architecture are read.

    Attributes:
        model_types: values of model_type in configs of such targets; a file's own config gets the
            first.
        class_name: name of transformers' class of the causal LM.
        layer_tensors: names of a layer's tensors in transformers, by their names in the file.
            Several tensors of the file may form one of transformers; then `joins` combines them.
        biases: names of bias tensors, likewise, of layers whose config has attention_bias.
        joins: functions that combine tensors of the file, by the name below the layer.
        constants: further config entries that do not depend on the file.
        config: function that adds further config entries, from the file's keys and the config so
            far.
        adjacent_pairs: whether the rows of a rotary pair are adjacent in q_proj and k_proj.
        norm_offset: constant that the file adds to norm weights.
        partial_rotary: whether rope.dimension_count may be less than the head's size.
        extra_tensors: further tensors that `config` reads.
    """

    model_types: tuple[str, ...]
    class_name: str
    layer_tensors: dict[str, str]
    biases: dict[str, str] = field(default_factory=dict)
    joins: Mapping[str, Callable[..., Array]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    config: ConfigOf = _nothing_else
    adjacent_pairs: bool = False
    norm_offset: float = 0.0
    partial_rotary: bool = False
    extra_tensors: tuple[str, ...] = ()


def shortest(value: float) -> float:
    """Return the shortest decimal that rounds to this fp32 number: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _named(kind: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names with `.weight` or `.bias` behind both sides."""
    return {f"{source}.{kind}": f"{name}.{kind}" for source, name in names.items()}


# ---------------------------------------------------------------------------------- tensors
QKV_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
}
ATTENTION_TENSORS = QKV_NAMES | {"attn_output": "self_attn.o_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GLM_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
LLAMA_LAYER = _named("weight", PRE_NORMS | ATTENTION_TENSORS | MLP)
GATE_UP_NAME = "mlp.experts.gate_up_proj"
DOWN = "mlp.experts.down_proj"
EXPERTS = {
    "ffn_gate_exps.weight": GATE_UP_NAME,
    "ffn_up_exps.weight": GATE_UP_NAME,
    "ffn_down_exps.weight": DOWN,
}
EXPERT_BIASES = {
    "ffn_gate_exps.bias": f"{GATE_UP_NAME}_bias",
    "ffn_up_exps.bias": f"{GATE_UP_NAME}_bias",
    "ffn_down_exps.bias": f"{DOWN}_bias",
}


def interleaved(gate: Array, up: Array) -> Array:
    """Interleave the rows of gate and up of all experts, with inputs first: [E, H, 2 I] from two [E, I, H]."""
    experts, rows, columns = gate.shape
    return np.stack([gate, up], 2).reshape(experts, 2 * rows, columns).swapaxes(1, 2)


def interleaved_biases(gate: Array, up: Array) -> Array:
    """Interleave the entries of gate and up biases: [E, 2 I] from two [E, I]."""
    return np.stack([gate, up], 2).reshape(len(gate), -1)


def inputs_first(weight: Array) -> Array:
    """Transpose all experts: [E, I, O] from [E, O, I]."""
    return weight.swapaxes(1, 2)


def one_after_the_other(gate: Array, up: Array) -> Array:
    """Concatenate the rows of gate and up of all experts: [E, 2 I, H] from two [E, I, H]."""
    return np.concatenate([gate, up], 1)


# ----------------------------------------------------------------------------------- config
def scaled_rope(keys: MetadataKeys, theta: float) -> dict[str, Any]:
    """Return the rotary parameters of a file with one scaling for all layers. Raises GGUFError for other kinds."""
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {
            "rope_type": "linear",
            "rope_theta": theta,
            "factor": keys.require("rope.scaling.factor"),
        }
    if kind == "yarn":
        return _yarn(keys, theta)
    raise GGUFError(
        f"{keys.architecture}.rope.scaling.type is {kind!r}, which is not read. Use a model with linear, yarn or none"
    )


YARN_KEYS = {  # by those of transformers
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def _yarn(keys: MetadataKeys, theta: float) -> dict[str, Any]:
    optional = {name: keys.get(key) for name, key in YARN_KEYS.items()}
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": keys.require("rope.scaling.factor"),
        "original_max_position_embeddings": keys.require("rope.scaling.original_context_length"),
    } | {name: value for name, value in optional.items() if value is not None}


def layer_types(keys: MetadataKeys, num_layers: int, pattern: int) -> list[str]:
    """Return the kind of each layer: in every `pattern` layers, the last one has full attention.

    The file may override this, by a number or layer by layer.
    """
    stored = keys.get("attention.sliding_window_pattern", pattern)
    if isinstance(stored, list):
        return [SLIDING_LAYER if is_sliding else FULL_LAYER for is_sliding in stored]
    return [SLIDING_LAYER if (layer + 1) % stored else FULL_LAYER for layer in range(num_layers)]


def _two_bases(
    keys: MetadataKeys, config: dict[str, Any], sliding_theta: float
) -> dict[str, dict[str, Any]]:
    """Return rotary parameters of both kinds of layers; only those that see all tokens are scaled."""
    theta = config["rope_parameters"]["rope_theta"]
    return {
        FULL_LAYER: scaled_rope(keys, theta),
        SLIDING_LAYER: {
            "rope_type": "default",
            "rope_theta": keys.get("rope.freq_base_swa", sliding_theta),
        },
    }


GEMMA_CONFIG = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # whose attention scale is of the hidden size


def _query_scalar(keys: MetadataKeys, config: dict[str, Any]) -> int:
    """Return the number whose inverse square root scales attention. No key has it."""
    if config["num_hidden_layers"] == GEMMA_27B_LAYERS[keys.architecture]:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _gemma2(keys: MetadataKeys, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(keys, config),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        "sliding_window": keys.get("attention.sliding_window", 4096),
        "layer_types": layer_types(keys, config["num_hidden_layers"], 2),
    }


def _gemma3(keys: MetadataKeys, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    num_layers = config["num_hidden_layers"]
    return {
        "query_pre_attn_scalar": _query_scalar(keys, config),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "sliding_window": window,
        "layer_types": layer_types(keys, num_layers, 6) if window else [FULL_LAYER] * num_layers,
        "rope_parameters": _two_bases(keys, config, sliding_theta=10000.0),
        "use_bidirectional_attention": False,
    }


def _partial_rotary_factor(keys: MetadataKeys, config: dict[str, Any]) -> float:
    rotated = keys.get("rope.dimension_count", config["head_dim"])
    return rotated / config["head_dim"]


def _phi3(keys: MetadataKeys, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    original = keys.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    rope = config["rope_parameters"] | {
        "partial_rotary_factor": _partial_rotary_factor(keys, config)
    }
    keys.get("rope.scaling.attn_factor")  # transformers makes the same of both lengths
    if FACTORS_LONG in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": _factors(file, FACTORS_LONG),
            "short_factor": _factors(file, FACTORS_SHORT),
            "original_max_position_embeddings": original,
        }
    return {
        "sliding_window": keys.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


def _factors(file: GGUFFile, name: str) -> list[float]:
    return [shortest(factor) for factor in file.tensor(name)]


def _olmo2(keys: MetadataKeys, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Read OLMo 2's and OLMo 3's keys; a file with a window is an OLMo 3."""
    window = keys.get("attention.sliding_window")
    if not window:
        return {}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(keys, config["num_hidden_layers"], 4),
        "rope_parameters": _two_bases(keys, config, config["rope_parameters"]["rope_theta"]),
    }


def _glm4(keys: MetadataKeys, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    factor = _partial_rotary_factor(keys, config)
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": factor},
        "partial_rotary_factor": factor,
    }


def _granite(keys: MetadataKeys, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    if not keys.get("rope.scaling.finetuned", True):
        raise GGUFError(
            "granite.rope.scaling.finetuned is false: the model has no rotary embeddings. Use another model"
        )
    return {
        "attention_multiplier": keys.get("attention.scale") or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.get("embedding_scale", 1.0),
        "residual_multiplier": keys.get("residual_scale", 1.0),
        "logits_scaling": keys.get("logit_scale", 1.0),
    }


def _ministral3(keys: MetadataKeys, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Read Ministral 3's keys, which scale queries by position; other files are Mistral's own layers."""
    beta = keys.get("attention.temperature_scale")
    if beta is None:
        return {}
    scale = keys.get("rope.scaling.yarn_log_multiplier", 1.0)
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": config["rope_parameters"]
        | {"mscale": 1.0, "mscale_all_dim": scale, "llama_4_scaling_beta": beta},
    }


def _gpt_oss(keys: MetadataKeys, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        "intermediate_size": keys.require("expert_feed_forward_length"),
        "num_local_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
        "sliding_window": keys.require("attention.sliding_window"),
        "layer_types": layer_types(keys, config["num_hidden_layers"], 2),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def _qwen3moe(keys: MetadataKeys, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "moe_intermediate_size": keys.require("expert_feed_forward_length"),
        "num_experts": keys.require("expert_count"),
        "num_experts_per_tok": keys.require("expert_used_count"),
    }


LLAMA_CONFIG = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
SILU = {"hidden_act": "silu"}
ARCHITECTURES = {  # by general.architecture
    "llama": Architecture(
        ("llama", "mistral"),
        "LlamaForCausalLM",
        LLAMA_LAYER,
        constants=LLAMA_CONFIG,
        adjacent_pairs=True,
    ),
    "mistral3": Architecture(
        ("mistral", "ministral3"),
        "MistralForCausalLM",
        LLAMA_LAYER,
        constants=SILU | {"sliding_window": None},
        config=_ministral3,
        adjacent_pairs=True,
    ),
    "smollm3": Architecture(
        ("smollm3",),
        "SmolLM3ForCausalLM",
        LLAMA_LAYER,
        constants=LLAMA_CONFIG | {"no_rope_layer_interval": 4},
        adjacent_pairs=True,
    ),
    "granite": Architecture(
        ("granite",),
        "GraniteForCausalLM",
        LLAMA_LAYER,
        constants=LLAMA_CONFIG,
        config=_granite,
        adjacent_pairs=True,
    ),
    "qwen2": Architecture(
        ("qwen2",),
        "Qwen2ForCausalLM",
        LLAMA_LAYER | _named("bias", QKV_NAMES),
        constants=LLAMA_CONFIG,
    ),
    "qwen3": Architecture(
        ("qwen3",),
        "Qwen3ForCausalLM",
        LLAMA_LAYER | _named("weight", QK_NORMS),
        constants=LLAMA_CONFIG,
    ),
    "qwen3moe": Architecture(
        ("qwen3_moe",),
        "Qwen3MoeForCausalLM",
        _named("weight", PRE_NORMS | ATTENTION_TENSORS | QK_NORMS | {"ffn_gate_inp": "mlp.gate"})
        | EXPERTS,
        joins={GATE_UP_NAME: one_after_the_other},
        constants=SILU
        | {
            "attention_bias": False,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        config=_qwen3moe,
    ),
    "gemma": Architecture(
        ("gemma",),
        "GemmaForCausalLM",
        LLAMA_LAYER,
        constants={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
        norm_offset=-1.0,
    ),
    "gemma2": Architecture(
        ("gemma2",),
        "Gemma2ForCausalLM",
        _named("weight", SANDWICH_NORMS | ATTENTION_TENSORS | MLP),
        constants=GEMMA_CONFIG,
        config=_gemma2,
        norm_offset=-1.0,
    ),
    "gemma3": Architecture(
        ("gemma3_text",),
        "Gemma3ForCausalLM",
        _named("weight", SANDWICH_NORMS | ATTENTION_TENSORS | QK_NORMS | MLP),
        constants=GEMMA_CONFIG,
        config=_gemma3,
        norm_offset=-1.0,
    ),
    "phi3": Architecture(
        ("phi3",),
        "Phi3ForCausalLM",
        _named(
            "weight",
            PRE_NORMS
            | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
            | FUSED_MLP,
        ),
        constants=SILU,
        config=_phi3,
        partial_rotary=True,
        extra_tensors=(FACTORS_LONG, FACTORS_SHORT),
    ),
    "olmo2": Architecture(
        ("olmo2", "olmo3"),
        "Olmo2ForCausalLM",
        _named("weight", POST_NORMS | ATTENTION_TENSORS | QK_NORMS | MLP),
        constants=SILU | {"attention_bias": False},
        config=_olmo2,
    ),
    "glm4": Architecture(
        ("glm4",),
        "Glm4ForCausalLM",
        _named("weight", GLM_NORMS | ATTENTION_TENSORS | FUSED_MLP),
        biases=_named("bias", QKV_NAMES),
        constants=SILU,
        config=_glm4,
        partial_rotary=True,
    ),
    "gpt-oss": Architecture(
        ("gpt_oss",),
        "GptOssForCausalLM",
        _named(
            "weight",
            {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
            | ATTENTION_TENSORS
            | {"ffn_gate_inp": "mlp.router"},
        )
        | _named("bias", ATTENTION_TENSORS | {"ffn_gate_inp": "mlp.router"})
        | {"attn_sinks.weight": "self_attn.sinks"}
        | EXPERTS
        | EXPERT_BIASES,
        joins={
            GATE_UP_NAME: interleaved,
            f"{GATE_UP_NAME}_bias": interleaved_biases,
            DOWN: inputs_first,
        },
        constants=SILU | {"attention_bias": True},
        config=_gpt_oss,
    ),
}
OF_MODEL_TYPE = {
    model_type: record
    for record in reversed(ARCHITECTURES.values())
    for model_type in record.model_types
}
