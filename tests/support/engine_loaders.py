"""The rules by which vLLM and SGLang load EAGLE and EAGLE-3 heads of the Llama shape, and a check of a directory.

    assert loader_faults(directory) == {VLLM: [], SGLANG: []}

The rules were read in the wheels of vLLM 0.33.0 and SGLang 0.5.23 in November 2026. A rule says
what a checkpoint needs so that the engine computes what the head was trained to compute. Most
broken rules raise no error there: a missing tensor keeps what the memory held, an unexpected bias
is dropped, and only acceptance suffers.

    vLLM      transformers_utils/configs/eagle.py (architectures), models/registry.py, models/llama_eagle.py,
              models/llama_eagle3.py, models/utils.py (AutoWeightsLoader), v1/worker/gpu_model_runner.py (layer ids)
    SGLang    srt/models/registry.py, srt/models/llama_eagle.py, srt/models/llama_eagle3.py, srt/models/llama.py,
              srt/model_executor/model_runner_components/spec_aux_hidden_state.py (layer ids)

Facts that no checkpoint can break: both use the target's embedding if the head has none. SGLang
uses the target's in any case, unless `target_hidden_size` differs from `hidden_size`. SGLang
refuses a head whose max_position_embeddings is below the target's context length, unless
SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"
BOTH = (VLLM, SGLANG)
EAGLE, EAGLE3 = "EAGLE", "EAGLE-3"  # the method that the engine is started with
ANY = (EAGLE, EAGLE3)
CONFIG_KEYS = (  # without them, the loaders read LlamaConfig's defaults, which are Llama-7B's
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
)
LAYER_KEYS = (  # under layers.0.
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
)
EAGLE_KEYS = ("fc.weight", *(f"layers.0.{key}" for key in LAYER_KEYS))
EAGLE3_KEYS = (
    *EAGLE_KEYS,
    "layers.0.hidden_norm.weight",
    "layers.0.input_layernorm.weight",
    "norm.weight",
    "lm_head.weight",
)
IGNORED_KEYS = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)  # by both, wherever they are
OPTIONAL_KEYS = {
    EAGLE: {"embed_tokens.weight", "lm_head.weight"},
    EAGLE3: {"embed_tokens.weight", "d2t", "t2d"},
}
ATTENTION_BIASES = tuple(f"layers.0.self_attn.{name}_proj.bias" for name in "qkvo")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Checkpoint:
    """A head's config.json, and its tensors with `midlayer.` read as `layers.0.`, as both loaders do."""

    raw: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def generation(self) -> str:
        return EAGLE3 if {"d2t", "layers.0.hidden_norm.weight"} & self.tensors.keys() else EAGLE

    @property
    def architectures(self) -> list[str]:
        return self.raw.get("architectures") or []

    @property
    def eagle_config(self) -> dict[str, Any]:
        return self.raw.get("eagle_config") or {}

    @property
    def norm_before_fc(self) -> bool:
        """Both look under eagle_config first."""
        return bool(self.eagle_config.get("norm_before_fc", self.raw.get("norm_before_fc", False)))

    @property
    def num_features(self) -> int:
        """The number of layers of the target that both expect fc to read."""
        return (
            self.raw.get("num_aux_hidden_states")
            or len(self.eagle_config.get(LAYER_IDS) or ())
            or 3
        )

    @property
    def needed_keys(self) -> set[str]:
        if self.generation == EAGLE:
            return set(EAGLE_KEYS)
        keys = set(EAGLE3_KEYS)
        if self.raw.get("draft_vocab_size") not in (None, self.raw.get("vocab_size")):
            keys.add("d2t")
        if self.norm_before_fc:
            keys.add("input_norm.weight")
        if self.raw.get("fc_norm"):
            keys |= {f"fc_norm.{i}.weight" for i in range(self.num_features)}
        return keys

    @property
    def extra_keys(self) -> set[str]:
        known = self.needed_keys | OPTIONAL_KEYS[self.generation]
        return {
            key for key in self.tensors.keys() - known if not key.endswith((*IGNORED_KEYS, ".bias"))
        }

    def is_on(self, *keys: str) -> bool:
        return any(self.raw.get(key) for key in keys)


@dataclass(frozen=True)
class Rule:
    """What a loader needs.

    Attributes:
        text: the requirement and what happens otherwise.
        holds: whether a checkpoint meets it.
    """

    loaders: tuple[str, ...]
    generations: tuple[str, ...]
    text: str
    holds: Callable[[Checkpoint], bool]


def _vllm_architecture(head: Checkpoint) -> bool:
    """vLLM prefixes names with Eagle or Eagle3 if they have neither, and takes the first that it knows."""
    known = {
        EAGLE: {"LlamaForCausalLM", "EagleLlamaForCausalLM"},
        EAGLE3: {"LlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"},
    }
    return bool(known[head.generation].intersection(head.architectures))


def _sglang_architecture(head: Checkpoint) -> bool:
    """SGLang takes the first name that it knows, and LlamaForCausalLM is a whole language model."""
    wanted = {EAGLE: "LlamaForCausalLMEagle", EAGLE3: "LlamaForCausalLMEagle3"}[head.generation]
    known = [name for name in head.architectures if name in (wanted, "LlamaForCausalLM")]
    return known[:1] == [wanted]


def _has_bare_names(head: Checkpoint) -> bool:
    """Both add `model.` themselves, SGLang for EAGLE-3 only where it is absent."""
    return not any(key.startswith("model.") for key in head.tensors)


def _fc_bias_is_zero(head: Checkpoint) -> bool:
    return not head.tensors.get("fc.bias", torch.zeros(1)).any()


def _maps_the_vocabulary(head: Checkpoint) -> bool:
    """d2t goes with a draft vocabulary that is not the target's."""
    size, vocab_size = head.raw.get("draft_vocab_size"), head.raw.get("vocab_size")
    return ("d2t" in head.tensors) == (size not in (None, vocab_size))


RULES = (
    Rule(
        BOTH, ANY, "model_type: must be llama", lambda head: head.raw.get("model_type") == "llama"
    ),
    Rule(
        (VLLM,),
        ANY,
        "architectures: must name LlamaForCausalLM or EagleLlamaForCausalLM, or for EAGLE-3 Eagle3LlamaForCausalLM or "
        "LlamaForCausalLMEagle3",
        _vllm_architecture,
    ),
    Rule(
        (SGLANG,),
        ANY,
        "architectures: must name LlamaForCausalLMEagle, or for EAGLE-3 LlamaForCausalLMEagle3; LlamaForCausalLM "
        "may only follow",
        _sglang_architecture,
    ),
    Rule(
        BOTH,
        ANY,
        f"config.json: must have {', '.join(CONFIG_KEYS)}",
        lambda head: head.raw.keys() >= {*CONFIG_KEYS},
    ),
    Rule(
        BOTH,
        ANY,
        "num_hidden_layers: must be 1; other layers would keep uninitialized weights",
        lambda head: head.raw.get("num_hidden_layers") == 1,
    ),
    Rule(
        BOTH,
        ANY,
        "tie_word_embeddings: must not be true; the lm_head would be the embedding",
        lambda head: not head.is_on("tie_word_embeddings"),
    ),
    Rule(
        BOTH,
        ANY,
        "bias: must not be true; queries, keys, values and outputs of attention would get biases that no file has",
        lambda head: not head.is_on("bias"),
    ),
    Rule(
        BOTH,
        ANY,
        "attention_bias: must not be true; o_proj would get a bias that no file has",
        lambda head: not head.is_on("attention_bias"),
    ),
    Rule(
        (VLLM,),
        (EAGLE3,),
        "self_attn.*_proj.bias: must not be there; they are read with attention_bias only",
        lambda head: not {*ATTENTION_BIASES} & head.tensors.keys(),
    ),
    Rule(
        (SGLANG,),
        ANY,
        "self_attn.*_proj.bias: must not be there; they are dropped",
        lambda head: not {*ATTENTION_BIASES} & head.tensors.keys(),
    ),
    Rule(
        BOTH,
        ANY,
        "target_hidden_size: must be a number or absent, not null",
        lambda head: head.raw.get("target_hidden_size", 1) is not None,
    ),
    Rule(BOTH, ANY, "tensor names: must not start with model.", _has_bare_names),
    Rule(
        BOTH, ANY, "tensors: some are missing", lambda head: head.needed_keys <= head.tensors.keys()
    ),
    Rule(
        (VLLM,),
        ANY,
        "tensors: some are unexpected, which is an error unless they are biases",
        lambda head: not head.extra_keys,
    ),
    Rule((VLLM,), ANY, "fc.bias: must be absent or zero; it is dropped", _fc_bias_is_zero),
    Rule(
        (SGLANG,),
        (EAGLE,),
        "fc.bias: must be there, with zeros if need be; fc has one and would keep random numbers",
        lambda head: "fc.bias" in head.tensors,
    ),
    Rule(
        (SGLANG,),
        (EAGLE3,),
        "draft_vocab_size: must be in config.json",
        lambda head: "draft_vocab_size" in head.raw,
    ),
    Rule(
        (VLLM,),
        (EAGLE3,),
        "d2t: must be there if the draft vocabulary is smaller than the target's, and absent if they are equal",
        _maps_the_vocabulary,
    ),
    Rule(
        (SGLANG,),
        (EAGLE3,),
        "norm_before_residual: must not be true; it is ignored",
        lambda head: not head.is_on("norm_before_residual"),
    ),
    Rule(
        BOTH,
        (EAGLE3,),
        "eagle_config: fc_norm and norm_output are read at the top level only",
        lambda head: not {"fc_norm", "norm_output"} & head.eagle_config.keys(),
    ),
    Rule(
        (VLLM,),
        (EAGLE3,),
        f"eagle_config.{LAYER_IDS}: is read as the layers' inputs, one layer before what SGLang and ModelOpt mean",
        lambda head: not head.eagle_config.get(LAYER_IDS),
    ),
    Rule(
        (SGLANG,),
        (EAGLE3,),
        f"{LAYER_IDS}: is read under eagle_config only",
        lambda head: not head.raw.get(LAYER_IDS),
    ),
)


def loader_faults(directory: Path) -> dict[str, list[str]]:
    """Return, for each loader, the rules that the head in `directory` breaks; all lists are empty for a good head."""
    head = read_checkpoint(directory)
    broken = [
        rule for rule in RULES if head.generation in rule.generations and not rule.holds(head)
    ]
    return {loader: [rule.text for rule in broken if loader in rule.loaders] for loader in BOTH}


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read config.json, and model.safetensors or pytorch_model.bin, in one file or in shards."""
    raw = json.loads((directory / "config.json").read_text("utf-8"))
    files = sorted(directory.glob("*.safetensors"))
    parts: list[Mapping[str, Tensor]] = [load_file(file) for file in files]
    parts = parts or [
        torch.load(file, weights_only=True) for file in sorted(directory.glob("*.bin"))
    ]
    tensors = {
        key.replace("midlayer.", "layers.0."): tensor
        for part in parts
        for key, tensor in part.items()
    }
    return Checkpoint(raw, tensors)
