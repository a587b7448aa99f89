"""EAGLE-3 heads in each published layout: random tensors by published names, and the layers' equations, slowly.

raw, tensors, path = published(tmp_path / "head", "DeepSpec")
read, normed = outputs(raw, tensors, embeddings, projected(raw, tensors, features))
"""

import torch

from eagle_ray.models.target import TargetModel
from tests.support.checkpoints import E3, eagle3_tensors, maps, target_config, write
from tests.support.eagle_formulas import decoder_layer, rms_norm
from tests.support.toy_models import llama

TARGET = target_config()
NUM_LAYERS = TARGET.num_hidden_layers
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 4}
DEEPSPEC = {
    "architectures": ["Qwen3Eagle3Model"],
    "model_type": "qwen3",
    "target_layer_ids": [0, 2, 3, 4, 6],
    "num_target_layers": NUM_LAYERS,
    "num_hidden_layers": 1,
    "draft_num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "ttt_length": 7,
    "step_loss_decay": 0.8,
    "target_model_name_or_path": "Qwen/Qwen3-4B",
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 36,
}
# Each layout: what config.json adds, whether queries and keys are normed, the number of layers, and
# whether speculators wrote it.
LAYOUTS = {
    "window": (WINDOW, False, 1, False),
    "window by max_window_layers": (
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 3},
        False,
        1,
        False,
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, False, 1, False),
    "partial rotary and norms": ({"partial_rotary_factor": 0.25, **WINDOW}, True, 1, False),
    "query and key norms": ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, True, 1, False),
    "speculators' qwen3": ({"model_type": "qwen3"}, True, 1, True),
    "speculators' layers": ({"num_hidden_layers": 3}, False, 3, True),
    "speculators' windows": (
        {
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 3,
            "use_sliding_window": True,
        },
        True,
        2,
        True,
    ),
    "output bias": ({"attention_bias": True}, False, 1, False),
    "the target's lm_head": ({"draft_vocab_size": 97}, False, 1, False),
    "DeepSpec": (DEEPSPEC, True, 1, False),
    "DeepSpec's layers": (
        DEEPSPEC
        | {
            "num_hidden_layers": 2,
            "draft_num_hidden_layers": 2,
            "layer_types": ["full_attention"] * 2,
        },
        True,
        2,
        False,
    ),
    "EAGLE-3.1 with windows": (
        {**WINDOW, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
        True,
        1,
        False,
    ),
}
EMBEDDING = torch.randn(97, 32, generator=torch.Generator().manual_seed(9))


def settings_of(layout):
    """The numbers of a layout's config, with nothing nested."""
    added, has_norms, num_layers, is_speculators = LAYOUTS[layout]
    raw = E3 | {"num_hidden_layers": num_layers} | added
    if layout.startswith("DeepSpec"):
        raw.pop("draft_vocab_size")
    return raw, has_norms, num_layers, is_speculators


def published(path, layout, seed=0, lm_head=None):
    """A random head in a layout: its settings, its tensors by published name, and where it was written."""
    raw, has_norms, num_layers, is_speculators = settings_of(layout)
    is_deepspec = layout.startswith("DeepSpec")
    drafted = raw.get("draft_vocab_size", 97)
    tensors = eagle3_tensors(raw | {"draft_vocab_size": drafted}, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for i in range(1, num_layers):
        like = eagle3_tensors(raw | {"draft_vocab_size": drafted}, seed + i)
        for name, tensor in like.items():
            if not name.startswith("midlayer.") or ("hidden_norm" in name and not is_deepspec):
                continue
            if (
                name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
                and not is_deepspec
            ):
                tensor = tensor[:, :32].contiguous()
            tensors[name.replace("midlayer.", f"layers.{i}.")] = tensor
    for i in range(num_layers):
        prefix = "midlayer." if i == 0 else f"layers.{i}."
        if has_norms:
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}self_attn.{name}.weight"] = 1 + 0.3 * torch.randn(
                    8, generator=generator
                )
        if raw.get("attention_bias"):
            for name, size in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = torch.randn(
                    size, generator=generator
                )
    if is_deepspec:
        tensors["fc.weight"] = torch.randn(32, 5 * 32, generator=generator) / 12
        tensors["embed_tokens.weight"] = EMBEDDING
    if drafted == 97:
        tensors |= maps(torch.arange(97), 97)
    if lm_head is not None:
        tensors["lm_head.weight"] = lm_head
    if layout == "the target's lm_head":
        del tensors["lm_head.weight"]

    written = {
        name: tensor
        for name, tensor in tensors.items()
        if drafted != 97 or name not in ("d2t", "t2d")
    }
    if is_speculators or is_deepspec:
        written = {name.replace("midlayer.", "layers.0."): x for name, x in written.items()}
    return raw, tensors, write(path, written, config_of(raw, is_speculators))


def config_of(raw, is_speculators):
    if not is_speculators:
        return raw
    own = ("draft_vocab_size", "norm_before_residual")
    layers = {key: value for key, value in raw.items() if key not in (*own, "architectures")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b"}},
        "draft_vocab_size": raw["draft_vocab_size"],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "transformer_layer_config": layers,
    }


def window_of(raw, i):
    types = raw.get("layer_types") or ["full_attention"] * (i + 1)
    is_windowed = types[i] == "sliding_attention" or raw.get("max_window_layers") == 0
    return raw["sliding_window"] if is_windowed else None


def projected(raw, tensors, features):
    if raw.get("fc_norm"):
        parts = features.chunk(3, -1)
        features = torch.cat(
            [rms_norm(raw, parts[i], tensors[f"fc_norm.{i}.weight"]) for i in range(3)], -1
        )
    return features @ tensors["fc.weight"].T


def outputs(raw, tensors, embeddings, x, target_lm_head=None):
    """What the next draft step reads after each pair of a sequence, and the normed output there."""
    num_layers = raw["num_hidden_layers"]
    for i in range(num_layers):
        prefix = "midlayer." if i == 0 else f"layers.{i}."
        if prefix + "hidden_norm.weight" in tensors:
            normed = rms_norm(raw, x, tensors[prefix + "hidden_norm.weight"])
            e = rms_norm(raw, embeddings, tensors[prefix + "input_layernorm.weight"])
            read = torch.cat([e, normed], -1)
            residual = normed if raw.get("norm_before_residual") else x
        else:
            read = rms_norm(raw, x, tensors[prefix + "input_layernorm.weight"])
            residual = x
        x = decoder_layer(raw, tensors, prefix, read, residual, window_of(raw, i))
    normed = rms_norm(raw, x, tensors["norm.weight"])
    return (normed if raw.get("norm_output") else x), normed


def target_of(head, num_slots=1):
    """Return a random target with the layers that a head reads."""
    return TargetModel(
        llama(num_hidden_layers=NUM_LAYERS),
        num_slots=num_slots,
        capacity=64,
        feature_layers=head.feature_layers(NUM_LAYERS),
    )
