"""QuantizedDraft: a draft of an EAGLE head with quantised weights on a CPU, in one C++ call or in two a level.

    draft = QuantizedDraft.of(head, embedding, target_logits, cache, queue, max_depth)  # None if torch has to run it
    draft.start(at, spans, roots, sampling, plan, calibration)
    draft.grow_all(plan, token_ids)
    tree = draft.tree

or level by level, where Python ranks the children or decides where to stop:

    while draft.depth < plan.max_depth:
        draft.grow(ranking)

It fills DraftBuffers as PaddedDraft does by torch, by the functions that compute a pass layer by
layer (kernels/draft_head.cpp). `EagleDrafter._expand` is the reference: the nodes are the same,
within the rounding of fp32.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import ALL_KINDS, SamplingBatch
from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.cpu_ops import AttentionHeads, LayerProjection, address
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import CandidateRanker, RankingFeedback
from eagle_ray.methods.eagle.draft_buffers import DraftBuffers, DraftShape, PaddedDraft
from eagle_ray.methods.eagle.heads import Eagle3Head, EagleHead, PEagleHead
from eagle_ray.methods.pair_drafter import FeatureBuffer
from eagle_ray.models.decoder import Angles, Layer, Mlp, Norm, is_llama_layer, ops_for
from eagle_ray.models.quantized_linear import QuantizedLinear
from eagle_ray.models.target import OfferedLogits
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import DraftPlan, Frontier, PriceRule

HEAD_PROJECTIONS = ("fc", "qkv", "output", "gate_up", "down", "lm_head")
NORMS = ("embedding", "feature", "post", "last")


class _Head(Structure):
    _fields_ = [
        *((name, LayerProjection) for name in HEAD_PROJECTIONS),
        ("embedding", c_void_p),
        *((f"{name}_norm", c_void_p) for name in NORMS),
        *((f"{name}_eps", c_float) for name in NORMS),
        *((name, c_void_p) for name in ("cosine", "sine", "q_norm", "k_norm")),
        ("head_eps", c_float),
        ("norm_before_residual", c_int32),
        ("norm_output", c_int32),
        ("hidden_size", c_int64),
        ("first_position", c_int64),
        ("window", c_int64),
        *((name, c_void_p) for name in ("keys", "values")),
        ("heads", AttentionHeads),
    ]


OF_NODES = (
    "tokens",
    "parents",
    "log_values",
    "draft_log_probs",
    "frontier_nodes",
    "frontier_values",
    "words",
)
OF_LEVELS = ("frontier_tokens", "parent_rows", "offered", "scores", "features")


class _Drafts(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("max_batch", "max_width", "num_nodes", "num_words")),
        *((name, c_void_p) for name in OF_NODES + OF_LEVELS),
        ("table", c_void_p),
        *((name, c_int64) for name in ("table_width", "block_size")),
        *((name, c_void_p) for name in ("queue_tokens", "queue_features")),
        ("window", c_int64),
        *((name, c_int64) for name in ("level", "batch", "width", "children", "num_ends")),
        *((name, c_void_p) for name in ("slots", "lengths", "first", "starts", "roots", "ends")),
        *((name, c_void_p) for name in ("temperature", "calibration")),
    ]


class _PriceRule(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_depths", "num_ranks")),
        ("children", POINTER(c_double)),
        *((name, c_double) for name in ("accuracy", "level_price", "row_price")),
        ("num_more", c_int64),
    ]


class QuantizedDraft:
    """A draft that is being computed by C++. There is one at a time: the next draft overwrites its results.

    Args:
        parts: the head's projections, by the names in HEAD_PROJECTIONS.
        max_depth: levels of the deepest draft.
    """

    def __init__(
        self,
        modules: _Modules,
        parts: dict[str, QuantizedLinear],
        embedding: Float[Tensor, "V H"],
        cache: KVCache,
        queue: FeatureBuffer,
        max_depth: int,
    ):
        # Objects that the structures point to.
        self._owned = (
            modules,
            parts,
            embedding,
            cache,
            queue,
        )
        self._cache = cache
        self._queue = queue
        self._max_depth = max_depth
        head = modules.head
        self._hidden_size = head.config.hidden_size
        self._num_tokens = parts["lm_head"].out_features
        self._rotary = Angles(head.rotary)(torch.arange(cache.capacity + max_depth + 1))
        self._head = self._head_structure(modules, parts, embedding)
        # By children and ends.
        self._buffers: dict[tuple[int, int], tuple[DraftBuffers, _Drafts]] = {}
        # By these, sequences and width.
        self._padded: dict[tuple[int, int, int, int], PaddedDraft] = {}
        self.depth = 0  # levels so far

    @classmethod
    def of(
        cls,
        head: nn.Module,
        embedding: nn.Module,
        target_logits: OfferedLogits,
        cache: KVCache,
        queue: FeatureBuffer,
        max_depth: int,
    ) -> QuantizedDraft | None:
        """Return a QuantizedDraft for an EAGLE head, or None if the C++ does not support the head.

        Args:
            target_logits: the target's lm_head, for a head without its own.
        """
        modules = _modules_of(head, target_logits)
        if modules is None or max_depth < 1:
            return None
        layer = modules.layer
        attention = layer.attention
        mlp = cast(Mlp, layer.mlp)
        projections = modules.fc, attention.qkv, attention.output, mlp.gate_up, mlp.down
        parts = {
            name: module
            for name, module in zip(HEAD_PROJECTIONS, (*projections, modules.lm_head), strict=True)
            if isinstance(module, QuantizedLinear)
            and module.dtype is torch.float32
            and module.order is None
        }
        shape = attention.shape
        weight = cast(nn.Embedding, embedding).weight
        is_plain = type(embedding) is nn.Embedding and weight.dtype is torch.float32
        norms = [norm for norm in (shape.q_norm, shape.k_norm) if norm is not None]
        is_known = all(each.dtype is torch.float32 for each in (cache.keys, *norms))
        if (
            layer.ops is not cpu_ops
            or len(parts) < len(HEAD_PROJECTIONS)
            or not (is_plain and is_known)
        ):
            return None
        return cls(modules, parts, weight.detach().contiguous(), cache, queue, max_depth)

    def start(
        self,
        at: DecodeSlots,
        spans: Int[np.ndarray, "2 B"],
        roots: Int[Tensor, " B"],
        sampling: SamplingBatch,
        plan: DraftPlan,
        calibration: Calibration | None,
    ) -> None:
        """Begin drafts of several sequences.

        Args:
            spans: each sequence's first visible position and its first unread position.
        """
        self.depth = 0
        self._num = len(roots)
        num_ends = sampling.ends.shape[1]
        buffers, drafts = self._buffers_of(plan.children, num_ends)
        key = plan.children, num_ends, self._num, plan.width
        if key not in self._padded:
            self._padded[key] = PaddedDraft(buffers, self._num, plan.width, ALL_KINDS)
        self._draft = self._padded[key]
        parameters = None if calibration is None else calibration.fit.parameters
        ends = sampling.ends.contiguous()
        temperature = sampling.temperature.contiguous()
        tensors = {
            "slots": at.slots,
            "lengths": at.lengths,
            "roots": roots,
            "ends": ends,
            "temperature": temperature,
        }
        self._started = tensors, spans, parameters  # which the structure points to
        for name, tensor in tensors.items():
            assert tensor.is_contiguous()
            setattr(drafts, name, tensor.data_ptr())
        drafts.first = spans.ctypes.data
        drafts.starts = drafts.first + spans.strides[0]
        drafts.calibration = address(parameters)
        drafts.batch = self._num
        drafts.width = plan.width
        drafts.level = 0
        self._head.heads.threads = cpu_ops.num_threads()
        self._drafts = drafts

    def grow(self, ranking: CandidateRanker) -> None:
        """Add a level: run the head on the frontier (at first, on the unread pairs) and append the ranked children."""
        drafts = self._drafts
        num_parents = drafts.width if self.depth else 1
        drafts.level = self.depth
        of_drafts = ctypes.addressof(drafts)
        logits = torch.empty(self._num, num_parents, self._num_tokens)
        cpu_ops.function_for("draft_head_pass")(
            ctypes.addressof(self._head), of_drafts, logits.data_ptr()
        )
        ranked = ranking.rank_logits(self.depth, logits, drafts.children)
        tokens, scores, own = (part.contiguous() for part in ranked)
        cpu_ops.function_for("append_level")(
            of_drafts, tokens.data_ptr(), scores.data_ptr(), own.data_ptr()
        )
        self.depth += 1

    def grow_all(self, plan: DraftPlan, token_ids: Int[Tensor, " D"] | None) -> None:
        """Draft all levels of the started plan, until its rule ends the draft. Children are the
        head's likeliest tokens.

        Args:
            token_ids: the token of each of the head's logits; None is the whole vocabulary.
        """
        assert token_ids is None or token_ids.is_contiguous()
        rule = None
        if plan.price_rule is not None:
            rule = _price_rule(plan.price_rule)
        cpu_ops.function_for("draft_levels")(
            ctypes.addressof(self._head),
            ctypes.addressof(self._drafts),
            address(token_ids),
            None if rule is None else ctypes.addressof(rule),
            plan.max_depth,
        )
        self.depth = self._drafts.level

    # What a plan's should_stop reads between two levels, as from a TreeBuilder.

    @property
    def levels(self) -> list[Float[Tensor, "B _ K"]]:
        """Return the log values of each level's nodes, by parent."""
        return self._draft.levels(self._num, self.depth)

    def frontier(self) -> Frontier:
        """Return the nodes of the last level that are expanded next: those of the highest value."""
        return self._draft.frontier(self.depth, self._num)

    @property
    def tree(self) -> DraftTree:
        return self._draft.tree(self._num, self.depth)

    def feedback(self, started: RankingFeedback) -> RankingFeedback:
        """Return the inputs of the draft for the ranker's update.

        Args:
            started: the feedback that `CandidateRanker.start` made for these sequences.
        """
        offered = self._draft.offered(started.offered.kinds, self._num, self.depth)
        features = self._draft.features(self._num, self.depth)
        return RankingFeedback(
            started.members, started.sampling, started.lengths, features, offered
        )

    def _buffers_of(self, children: int, num_ends: int) -> tuple[DraftBuffers, _Drafts]:
        key = children, num_ends
        if key not in self._buffers:
            shape = DraftShape(self._cache.num_slots, children, children, self._max_depth)
            buffers = DraftBuffers(shape, self._hidden_size, num_ends, torch.float32, "cpu")
            self._buffers[key] = buffers, self._drafts_structure(buffers)
        return self._buffers[key]

    def _drafts_structure(self, buffers: DraftBuffers) -> _Drafts:
        shape = buffers.shape
        blocks = self._cache.blocks
        queue = self._queue
        drafts = _Drafts(
            max_batch=shape.batch,
            max_width=shape.width,
            num_nodes=shape.num_nodes,
            num_words=buffers.words.shape[2],
            table=blocks.block_table.data_ptr(),
            table_width=blocks.block_table.shape[1],
            block_size=blocks.size,
            queue_tokens=queue.tokens.data_ptr(),
            queue_features=queue.features.data_ptr(),
            window=queue.window,
            children=shape.children,
            num_ends=buffers.ends.shape[1],
        )
        for name in OF_NODES + OF_LEVELS:
            setattr(drafts, name, getattr(buffers, name).data_ptr())
        return drafts

    def _head_structure(
        self, modules: _Modules, parts: dict[str, QuantizedLinear], embedding: Tensor
    ) -> _Head:
        shape = modules.layer.attention.shape
        keys, values = self._cache.layer(0)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        dims = shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, width, shape.head_dim
        structure = _Head(
            embedding=embedding.data_ptr(),
            cosine=self._rotary.cosine.data_ptr(),
            sine=self._rotary.sine.data_ptr(),
            norm_before_residual=modules.norm_before_residual,
            norm_output=modules.norm_output,
            hidden_size=self._hidden_size,
            first_position=modules.head.first_position,
            window=shape.window or 0,
            q_norm=address(shape.q_norm),
            k_norm=address(shape.k_norm),
            head_eps=shape.norm_eps,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            heads=AttentionHeads(*dims, shape.scaling, 0.0, 1),
        )
        for name, projection in parts.items():
            part = getattr(structure, name)
            part.weight = ctypes.addressof(projection.packed.descriptor)
            part.bias = address(projection.bias)
        for name, norm in modules.norms.items():
            setattr(structure, f"{name}_norm", norm.weight.data_ptr())
            setattr(structure, f"{name}_eps", norm.variance_epsilon)
        return structure


@dataclass(frozen=True, slots=True)
class _Modules:
    """The modules of a head.

    Attributes:
        norms: by names in NORMS; a head of EAGLE-1 or 2 has the one behind its attention alone.
    """

    head: EagleHead | Eagle3Head
    layer: Layer
    fc: nn.Module
    lm_head: nn.Module | None
    norms: dict[str, Norm]
    norm_before_residual: bool = False
    norm_output: bool = False


def _modules_of(head: nn.Module, target_logits: OfferedLogits) -> _Modules | None:
    """Return the modules of a supported head, or None for any other head."""
    if isinstance(head, EagleHead) and is_llama_layer(head.layers[0]):
        module = cast(LlamaDecoderLayer, head.layers[0])
        post_norm: Norm = module.post_attention_layernorm
        layer = Layer.of(module, ops_for(module.post_attention_layernorm.weight))
        lm_head = target_logits.linear if head.lm_head is None else head.lm_head
        return _Modules(head, layer, head.fc, lm_head, {"post": post_norm})
    if not isinstance(head, Eagle3Head) or not is_llama_layer(head.midlayer):
        return None
    if head.layers or head.lm_head is None or isinstance(head, PEagleHead):
        return None
    if head.input_norm is not None or head.fc_norm is not None:
        return None
    eagle3 = head.midlayer
    layer = Layer.of(eagle3, ops_for(eagle3.hidden_norm.weight))
    norms: dict[str, Norm] = {
        "embedding": eagle3.input_layernorm,
        "feature": eagle3.hidden_norm,
        "post": eagle3.post_attention_layernorm,
        "last": head.norm,
    }
    switches = eagle3.norm_before_residual, head.norm_output
    return _Modules(head, layer, head.fc, head.lm_head, norms, *switches)


def _price_rule(rule: PriceRule) -> _PriceRule:
    """Return the rule as C++ reads it. Shorter levels are padded with 0, which no row's price is below."""
    num_ranks = max(map(len, rule.children))
    padded = [
        probability
        for level in rule.children
        for probability in (*level, *[0.0] * (num_ranks - len(level)))
    ]
    children = (c_double * len(padded))(*padded)  # the structure keeps it
    return _PriceRule(
        num_depths=len(rule.children),
        num_ranks=num_ranks,
        children=children,
        accuracy=rule.accuracy,
        level_price=rule.level_price,
        row_price=rule.row_price,
        num_more=rule.num_more,
    )
