"""Heads as they are published, by the facts' own key names and shapes, not by our modules', and a hub that has them.

path = write(tmp_path, eagle3_tensors(E3), E3, "sharded safetensors")
with hub({"org/model": path}, gated={"org/secret"}, cache=tmp_path / "cache") as asked:      # the files that were sent
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from eagle_ray.methods.dflash.checkpoint import load_dflash
from eagle_ray.methods.dflash.heads import DFlashHead
from eagle_ray.methods.medusa.checkpoint import save_path_heads
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads
from tests.support.toy_models import LLAMA, llama

RAW: dict[str, Any] = {  # of an EAGLE-1/2 head for `toy.llama`
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 40,  # some published heads say so; there is one layer
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}
E3: dict[str, Any] = RAW | {
    "draft_vocab_size": 60
}  # of an EAGLE-3 head for `toy.llama` with 8 layers
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYOUTS = ["safetensors", "bin", "old bin", "sharded safetensors", "sharded bin"]
Tensors = dict[str, Tensor]


def target_config(**shape: object) -> LlamaConfig:
    """Of a target that both heads go with."""
    return LlamaConfig(**LLAMA | {"num_hidden_layers": 8} | shape)


def eagle_tensors(raw: dict[str, Any] = RAW, seed: int = 0) -> Tensors:
    """EAGLE-1 and 2: fc.bias as the config's `bias` says, default true; biases of q, k and v as `qkv_bias` says."""
    shapes = _layer("layers.0.", raw, raw["hidden_size"]) | {
        "fc.weight": (raw["hidden_size"], 2 * raw["hidden_size"])
    }
    if raw.get("bias", True):
        shapes["fc.bias"] = (raw["hidden_size"],)
    return _random(shapes, seed)


def eagle3_tensors(raw: dict[str, Any] = E3, seed: int = 0) -> Tensors:
    """EAGLE-3, with an unsorted choice of the target's tokens; embed_tokens where `target_hidden_size` is set.

    With the norms of EAGLE-3.1 that `fc_norm` and `norm_before_fc` switch on.
    """
    width, vocab_size = raw["hidden_size"], raw["vocab_size"]
    target_width = raw.get("target_hidden_size", width)
    shapes = _layer("midlayer.", raw, 2 * width) | {
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        "norm.weight": (width,),
        "fc.weight": (width, 3 * target_width),
        "lm_head.weight": (raw["draft_vocab_size"], width),
    }
    if "target_hidden_size" in raw:
        shapes["embed_tokens.weight"] = (vocab_size, width)
    if raw.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(3)}
    if raw.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * target_width,)
    chosen = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[
        : raw["draft_vocab_size"]
    ]
    return _random(shapes, seed) | maps(chosen, vocab_size)


def maps(chosen: Tensor, vocab_size: int) -> Tensors:
    """d2t: offsets to the chosen tokens; t2d: which of the target's they are."""
    mask = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    return {"d2t": chosen - torch.arange(len(chosen)), "t2d": mask}


def write(
    path: Path, tensors: Tensors, raw: dict[str, Any] = RAW, layout: str = "safetensors"
) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    kind = layout.split()[-1]
    name = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[kind]
    if not layout.startswith("sharded"):
        _save(tensors, path / name, layout)
        return path
    shards = {key: f"part-{i % 2}.{kind}" for i, key in enumerate(tensors)}
    for shard in set(shards.values()):
        _save(
            {key: tensor for key, tensor in tensors.items() if shards[key] == shard},
            path / shard,
            kind,
        )
    (path / f"{name}.index.json").write_text(json.dumps({"weight_map": shards}))
    return path


def _save(tensors: Tensors, file: Path, layout: str) -> None:
    if layout == "safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file, _use_new_zipfile_serialization=layout != "old bin")


def _layer(prefix: str, raw: dict[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
    width, middle = raw["hidden_size"], raw["intermediate_size"]
    head_dim = raw.get("head_dim", width // raw["num_attention_heads"])
    sizes = {
        name: raw[f"num_{kind}_heads"] * head_dim for name, kind in zip("qkv", KINDS, strict=True)
    }
    shapes = {f"self_attn.{name}_proj.weight": (size, inputs) for name, size in sizes.items()}
    if raw.get("qkv_bias"):
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    shapes |= {
        "self_attn.o_proj.weight": (width, sizes["q"]),
        "mlp.gate_proj.weight": (middle, width),
        "mlp.up_proj.weight": (middle, width),
        "mlp.down_proj.weight": (width, middle),
        "post_attention_layernorm.weight": (width,),
    }
    return {prefix + name: shape for name, shape in shapes.items()}


KINDS = ("attention", "key_value", "key_value")


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    """Large enough that every tensor matters: norms near one, the others of the size of one over a row's root."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: 1 + 0.3 * t if "norm" in name else t / t.shape[-1] ** 0.5 if t.ndim > 1 else 0.5 * t
        for name, t in tensors.items()
    }


HIDDEN, VOCAB, HEADS, KV_HEADS, DIM, INNER = 32, 97, 4, 2, 8, 40
NUM_LAYERS, BLOCK, MASK, EPS = 2, 6, 90, 1e-6
LAYERS = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    hidden_act="silu",
    rms_norm_eps=EPS,
    attention_bias=False,
    rope_theta=10000,
    layer_types=["full_attention"] * NUM_LAYERS,
)


def zlab_config(
    num_target_layers: int = 2, ids: tuple[int, ...] = (0,), **dflash: Any
) -> dict[str, Any]:
    """A config.json in z-lab's layout; `dflash` is added to its dflash_config."""
    section = {"mask_token_id": MASK, "target_layer_ids": list(ids), **dflash}
    top = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": BLOCK}
    return {**top, "num_target_layers": num_target_layers, **LAYERS, "dflash_config": section}


def speculators_config(ids: tuple[int, ...] = (0, 1), **top: Any) -> dict[str, Any]:
    """A config.json in speculators' layout, with a draft vocabulary of 40 tokens."""
    own = {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": list(ids),
        "draft_vocab_size": 40,
    }
    return {
        "speculators_model_type": "dflash",
        "transformer_layer_config": dict(LAYERS),
        **own,
        **top,
    }


DRAFTED = 40  # tokens of a draft vocabulary


def deepspec_config(ids: tuple[int, ...] = (0,), **top: Any) -> dict[str, Any]:
    """A config.json of DSpark in DeepSpec's layout, with a vanilla Markov head and a confidence head."""
    own = {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": list(ids),
        "num_target_layers": 2,
    }
    markov = {"markov_rank": 6, "markov_head_type": "vanilla"}
    confidence = {
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_anchors": 8,
    }
    return {"architectures": ["Qwen3DSparkModel"], **LAYERS, **own, **markov, **confidence, **top}


def dflash2_config(**dflash: Any) -> dict[str, Any]:
    """A config.json of DFlash2 in z-lab's layout."""
    selector = {
        "selector_rank": 5,
        "selector_top_k": 9,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
    }
    return zlab_config(**{**selector, **dflash}) | {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
    }


def domino_config(**dflash: Any) -> dict[str, Any]:
    """A config.json of Domino in z-lab's layout."""
    return zlab_config(
        **{
            "projector_type": "domino",
            "gru_hidden_dim": 7,
            "emb_dim": 5,
            "shift_label": True,
            **dflash,
        }
    )


PATH_CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "vanilla": deepspec_config,
    "gated": lambda: deepspec_config(markov_head_type="gated", enable_confidence_head=False),
    "rnn": lambda: deepspec_config(markov_head_type="rnn", confidence_head_with_markov=False),
    "speculators": lambda: speculators_config(
        speculators_model_type="dspark", markov_rank=6, markov_head_type="vanilla"
    ),
    "dflash2": dflash2_config,
    "domino": lambda: domino_config(pure_draft_prefix_len=1),
    "domino after the root": lambda: domino_config(shift_label=False),
}


def path_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The published tensors of a config's path head, of its confidence head and of its convolutions."""
    own = config | config.get("dflash_config", {})
    shapes: dict[str, tuple[int, ...]] = {}
    drafted = DRAFTED if "speculators_model_type" in config else VOCAB
    if rank := own.get("markov_rank"):
        shapes |= {
            "markov_head.markov_w1.weight": (VOCAB, rank),
            "markov_head.markov_w2.weight": (drafted, rank),
        }
        kind = own["markov_head_type"]
        outputs, inputs = {
            "gated": (rank, HIDDEN + rank),
            "rnn": (3 * rank, 2 * rank + HIDDEN),
        }.get(kind, (0, 0))
        if outputs:
            name = {"gated": "gate_proj", "rnn": "joint_proj"}[kind]
            shapes |= {
                f"markov_head.{name}.weight": (outputs, inputs),
                f"markov_head.{name}.bias": (outputs,),
            }
    if own.get("enable_confidence_head", "speculators_model_type" in config) and rank:
        width = HIDDEN + rank * own.get("confidence_head_with_markov", True)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if rank := own.get("selector_rank"):
        shapes |= {
            f"candidate_selector.{name}_codebook": (VOCAB, rank)
            for name in ("predecessor", "successor")
        }
        shapes["candidate_selector.hidden_projection.weight"] = (rank, HIDDEN)
        taps, groups = own["conv_kernel_size"], HIDDEN // own["conv_group_size"]
        for i in range(NUM_LAYERS):
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{name}.base_kernel"] = (2, taps, HIDDEN)
                shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * taps * groups, HIDDEN)
    if "projector_type" in own:
        state, inner = own["gru_hidden_dim"], own["emb_dim"]
        shapes |= {
            "prefix_gru.weight_ih_l0": (3 * state, HIDDEN),
            "prefix_gru.weight_hh_l0": (3 * state, state),
        }
        shapes |= {
            "embed_proj.0.weight": (inner, HIDDEN + state),
            "embed_proj.2.weight": (VOCAB, inner),
        }
    return shapes


def tensors_of(config: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """Random tensors under the published names."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) * (1.5 / math.sqrt(columns))

    def norm(size: int = HIDDEN) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=random)

    is_speculators = "speculators_model_type" in config
    own = config | config.get("dflash_config", {})
    ids = own["aux_hidden_state_layer_ids" if is_speculators else "target_layer_ids"]
    tensors = {
        "fc.weight": matrix(HIDDEN, len(ids) * HIDDEN),
        "hidden_norm.weight": norm(),
        "norm.weight": norm(),
    }
    for i in range(NUM_LAYERS):
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            tensors[f"layers.{i}.self_attn.{name}_proj.weight"] = matrix(rows, HIDDEN)
        tensors[f"layers.{i}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * DIM)
        for name in ("q_norm", "k_norm"):
            tensors[f"layers.{i}.self_attn.{name}.weight"] = norm(DIM)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"layers.{i}.{name}.weight"] = norm()
        for name, shape in (
            ("gate", (INNER, HIDDEN)),
            ("up", (INNER, HIDDEN)),
            ("down", (HIDDEN, INNER)),
        ):
            tensors[f"layers.{i}.mlp.{name}_proj.weight"] = matrix(*shape)
    if is_speculators:
        chosen = torch.randperm(VOCAB, generator=random)[:40].sort().values
        tensors |= {
            "embed_tokens.weight": matrix(VOCAB, HIDDEN),
            "lm_head.weight": matrix(40, HIDDEN),
        }
        tensors |= {"d2t": chosen - torch.arange(40), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
        tensors["t2d"][chosen] = True
    if "Qwen3DSparkModel" in config.get("architectures", ()):
        tensors |= {
            "embed_tokens.weight": matrix(VOCAB, HIDDEN),
            "lm_head.weight": matrix(VOCAB, HIDDEN),
        }
    for name, shape in path_shapes(config).items():
        tensors[name] = torch.randn(shape, generator=random) * (1.5 / math.sqrt(shape[-1]))
    return tensors


def publish(path: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config) if tensors is None else tensors, path / "model.safetensors")
    return path


def toy_config(num_layers: int = 2) -> LlamaConfig:
    return LlamaConfig(**{**LLAMA, "num_hidden_layers": num_layers})


def published_head(path: Path, config: dict[str, Any], num_target_layers: int = 2) -> DFlashHead:
    """Publish a random head and load it."""
    return load_dflash(publish(path, config), toy_config(num_target_layers)).requires_grad_(False)


def published_draft(path: Path, kind: str, num_target_layers: int) -> Path:
    """Publish a random draft of a kind for a `toy.llama` of so many layers: a method's name, or one of PATH_CONFIGS."""
    sizes = 3, 2, LLAMA["hidden_size"], LLAMA["vocab_size"]
    if kind == "eagle3":
        return write(path, eagle3_tensors(), E3)
    if kind == "peagle":
        masks = {"mask_hidden": torch.ones(1, 1, 3 * E3["hidden_size"])}
        return write(path, eagle3_tensors() | masks, E3 | {"mask_token_id": MASK})
    if kind in ("medusa", "hydra"):
        torch.manual_seed(3)
        heads = MedusaHeads(*sizes, own_lm_head=True) if kind == "medusa" else HydraHeads(*sizes)
        save_path_heads(heads, path)
    elif kind == "draft_model":
        llama(
            seed=1, num_hidden_layers=1, hidden_size=24, num_key_value_heads=1, head_dim=8
        ).save_pretrained(path)
    elif kind == "dflash":
        publish(path, zlab_config(num_target_layers))
    elif kind in PATH_CONFIGS:
        publish(path, PATH_CONFIGS[kind]() | {"num_target_layers": num_target_layers})
    else:
        write(path, eagle_tensors())
    return path


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """One head's vector, turned by the angles of a position."""
    half = DIM // 2
    angles = position * torch.tensor([10000.0 ** (-i / half) for i in range(half)])
    a, b = x[:half], x[half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def published_outputs(
    tensors: dict[str, Tensor],
    block: Tensor,
    features: Tensor,
    *,
    causal: bool,
    windows: tuple[int | None, ...] = (None,) * NUM_LAYERS,
) -> Tensor:
    """The outputs of one block, row by row and head by head.

    block: embeddings [N, H] of the root and of masks. features: [T, F], of the T tokens before the
    root.
    """
    context = rms_norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    hidden, start = block, len(features)
    for i in range(NUM_LAYERS):
        weights = {
            k.removeprefix(f"layers.{i}."): v
            for k, v in tensors.items()
            if k.startswith(f"layers.{i}.")
        }
        normed = rms_norm(hidden, weights["input_layernorm.weight"])
        own = convolved(weights, "attention_conv", 0, normed, normed)
        rows = torch.cat([context, own])
        out = torch.stack(
            [
                attention_row(weights, own[n], rows, start + n, start, causal, windows[i])
                for n in range(len(block))
            ]
        )
        out = out @ weights["self_attn.o_proj.weight"].T
        hidden = hidden + convolved(weights, "attention_conv", 1, normed, out)
        normed = rms_norm(hidden, weights["post_attention_layernorm.weight"])
        own = convolved(weights, "mlp_conv", 0, normed, normed)
        gate, up = own @ weights["mlp.gate_proj.weight"].T, own @ weights["mlp.up_proj.weight"].T
        out = (gate * gate.sigmoid() * up) @ weights["mlp.down_proj.weight"].T
        hidden = hidden + convolved(weights, "mlp_conv", 1, normed, out)
    return rms_norm(hidden, tensors["norm.weight"])


def convolved(
    weights: dict[str, Tensor], name: str, side: int, normed: Tensor, rows: Tensor
) -> Tensor:
    """DFlash2's convolution before (side 0) or after a part of a layer, channel by channel; `rows` in other heads."""
    if f"{name}.base_kernel" not in weights:
        return rows
    kernel = weights[f"{name}.base_kernel"][side]  # [taps, H]
    taps, size = kernel.shape
    corrections = (normed @ weights[f"{name}.kernel_projection.weight"].T).view(
        len(rows), 2, taps, -1
    )[:, side]
    group = size // corrections.shape[2]
    out = torch.zeros_like(rows)
    for n in range(len(rows)):
        for tap in range(min(taps, n + 1)):
            for channel in range(size):
                factor = kernel[tap, channel] + corrections[n, tap, channel // group]
                out[n, channel] += factor * rows[n - tap, channel]
    return out


def published_path(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    path: list[int],
    rows: Tensor,
    logits: Tensor,
    embed: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The logits of the children of the last token of a path, and the head's log-odds of acceptance there.

    path: tokens from the root on. rows: outputs of the block [L, H] that predict the children of
    each. logits: of these rows [L, Dv]. embed: the embedding [V, H].
    """
    own = config | config.get("dflash_config", {})
    row, base, last, confidence = rows[len(path) - 1], logits[len(path) - 1], path[-1], None
    if "confidence_head.proj.weight" in tensors:
        known = [row]
        if own.get("confidence_head_with_markov", True):
            known.append(tensors["markov_head.markov_w1.weight"][last])
        confidence = tensors["confidence_head.proj.weight"][0] @ torch.cat(known)
        confidence = confidence + tensors["confidence_head.proj.bias"][0]
    if "markov_head.markov_w1.weight" in tensors:
        w1, w2 = tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"]
        latent, rank = w1[last], w1.shape[1]
        if own["markov_head_type"] == "gated":
            mixed = tensors["markov_head.gate_proj.weight"] @ torch.cat([row, latent])
            latent = (mixed + tensors["markov_head.gate_proj.bias"]).sigmoid() * latent
        if own["markov_head_type"] == "rnn":
            state = torch.zeros(rank)
            for token, each in zip(path, rows, strict=False):
                mixed = tensors["markov_head.joint_proj.weight"] @ torch.cat(
                    [state, w1[token], each]
                )
                gate, candidate, output = (mixed + tensors["markov_head.joint_proj.bias"]).split(
                    rank
                )
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                latent = output.tanh()
        return base + w2 @ latent, confidence
    if "prefix_gru.weight_ih_l0" in tensors:
        gru = torch.nn.GRU(HIDDEN, own["gru_hidden_dim"], bias=False)
        gru.load_state_dict(
            {name: tensors[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")}
        )
        state = gru(embed[torch.tensor(path)])[0][-1].detach()
        inner = tensors["embed_proj.0.weight"] @ torch.cat([row, state])
        added = tensors["embed_proj.2.weight"] @ (inner * inner.sigmoid())
        return base + added * (len(path) > own.get("pure_draft_prefix_len", 0)), None
    gate = tensors["candidate_selector.hidden_projection.weight"] @ row
    latent = tensors["candidate_selector.predecessor_codebook"][last] * gate
    chosen = base.topk(own["selector_top_k"]).indices
    scores = torch.full_like(base, -torch.inf)
    scores[chosen] = (
        base[chosen] + tensors["candidate_selector.successor_codebook"][chosen] @ latent
    )
    return scores, None


def attention_row(
    weights: dict[str, Tensor],
    own: Tensor,
    rows: Tensor,
    position: int,
    start: int,
    causal: bool,
    window: int | None,
) -> Tensor:
    """One row's attention. rows: the context, then the block, which begins at position `start`."""
    seen = [j for j in range(len(rows)) if not (causal and j > position)]
    seen = [j for j in seen if window is None or position - j < window]
    outputs = []
    for head in range(HEADS):
        mine, theirs = slice(head * DIM, (head + 1) * DIM), head // (HEADS // KV_HEADS)
        shared = slice(theirs * DIM, (theirs + 1) * DIM)
        query = rms_norm(
            weights["self_attn.q_proj.weight"][mine] @ own, weights["self_attn.q_norm.weight"]
        )
        query = rotate(query, position)
        keys = [
            rms_norm(
                weights["self_attn.k_proj.weight"][shared] @ rows[j],
                weights["self_attn.k_norm.weight"],
            )
            for j in seen
        ]
        scores = torch.stack(
            [query @ rotate(key, j) for key, j in zip(keys, seen, strict=True)]
        ) / math.sqrt(DIM)
        values = torch.stack([weights["self_attn.v_proj.weight"][shared] @ rows[j] for j in seen])
        outputs.append(scores.softmax(0) @ values)
    return torch.cat(outputs)


COMMIT = "1" * 40


def write_shuffled(source: Path, path: Path, seed: int = 0) -> Path:
    """A copy of a head whose matrices have their numbers in another order: it fits in shape, and knows nothing."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            order = torch.randperm(tensor.numel(), generator=generator)
            tensors[name] = tensor.flatten()[order].view_as(tensor).contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@contextmanager
def hub(
    repos: dict[str, Path], gated: frozenset[str] | set[str], cache: Path
) -> Iterator[list[str]]:
    """Where huggingface_hub looks meanwhile. cache: its own, empty at first."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, repos, gated, asked))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    names = {"ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False}
    names["HUGGINGFACE_CO_URL_TEMPLATE"] = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in names.items():
                patch.setattr(f"huggingface_hub.constants.{name}", value)
            yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Hub(BaseHTTPRequestHandler):
    """GET /api/models/NAME/revision/..., GET /api/models/NAME/tree/..., HEAD and GET /NAME/resolve/COMMIT/FILE."""

    def __init__(self, repos: dict[str, Path], gated: set[str], asked: list[str], *request: object):
        self.repos, self.gated, self.asked = repos, gated, asked
        super().__init__(*request)

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name not in self.repos:
            self._answer(b"", 403 if name in self.gated else 404, {"X-Error-Code": self._why(name)})
        elif parts[0] != "api":
            self._send(name, "/".join(parts[4:]))
        elif parts[4] == "tree":
            files = [file for file in self.repos[name].rglob("*") if file.is_file()]
            self._answer_json(
                [{"type": "file", **_entry(file, self.repos[name])} for file in files]
            )
        else:
            self._answer_json(
                {"_id": "0", "id": name, "modelId": name, "sha": COMMIT, "siblings": [], "tags": []}
            )

    do_HEAD = do_GET

    def _why(self, name: str) -> str:
        return "GatedRepo" if name in self.gated else "RepoNotFound"

    def _send(self, name: str, path: str) -> None:
        file = self.repos[name] / path
        if not file.is_file():
            self._answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            self.asked.append(f"{name}/{path}")
        self._answer(
            file.read_bytes(), 200, {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT}
        )

    def _answer_json(self, value: object) -> None:
        self._answer(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def _answer(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


def _entry(file: Path, root: Path) -> dict[str, object]:
    return {"path": str(file.relative_to(root)), "size": file.stat().st_size, "oid": _digest(file)}


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
