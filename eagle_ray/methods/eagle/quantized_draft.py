"""QuantizedDraft: a draft of an EAGLE-3 head with quantised weights on a CPU, in two C++ calls a level.

    draft = QuantizedDraft.of(head, embedding, cache, queue, max_depth)      # None for a head that torch has to run
    draft.start(at, spans, roots, sampling, plan, calibration)
    while draft.depth < plan.max_depth:
        draft.grow(ranking)
    tree = draft.tree

It fills DraftBuffers as PaddedDraft does by torch, by the functions that compute a pass layer by layer
(kernels/draft_head.cpp). `EagleDrafter._expand` is the reference: the nodes are the same, within the rounding of fp32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import ALL_KINDS, SamplingBatch
from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.cpu_ops import AttentionHeads, LayerProjection, address
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import CandidateRanker, RankingFeedback
from eagle_ray.methods.eagle.draft_buffers import DraftBuffers, DraftShape, PaddedDraft
from eagle_ray.methods.eagle.heads import Eagle3Head
from eagle_ray.methods.pair_drafter import FeatureBuffer
from eagle_ray.models.decoder import Angles, Layer, Mlp, is_llama_layer, ops_for
from eagle_ray.models.quantized_linear import QuantizedLinear
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import DraftPlan, Frontier

PROJECTIONS = ("fc", "qkv", "output", "gate_up", "down", "lm_head")
NORMS = ("embedding", "feature", "post", "last")


class _Head(Structure):
    _fields_ = [
        *((name, LayerProjection) for name in PROJECTIONS),
        ("embedding", c_void_p),
        *((f"{name}_norm", c_void_p) for name in NORMS),
        *((f"{name}_eps", c_float) for name in NORMS),
        *((name, c_void_p) for name in ("cosine", "sine")),
        ("norm_before_residual", c_int32),
        ("norm_output", c_int32),
        ("hidden_size", c_int64),
        ("first_position", c_int64),
        *((name, c_void_p) for name in ("keys", "values")),
        ("heads", AttentionHeads),
    ]


OF_NODES = ("tokens", "parents", "log_values", "draft_log_probs", "frontier_nodes", "frontier_values", "words")
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


class QuantizedDraft:
    """The draft in the making. One at a time; the results of a draft are overwritten by the next one.

    Args:
        parts: the head's projections, by the names in PROJECTIONS.
        max_depth: levels of the deepest draft.
    """

    def __init__(
        self,
        head: Eagle3Head,
        layer: Layer,
        parts: dict[str, QuantizedLinear],
        embedding: Float[Tensor, "V H"],
        cache: KVCache,
        queue: FeatureBuffer,
        max_depth: int,
    ):
        self._owned = head, layer, parts, embedding, cache, queue  # what the structures point to
        self._cache, self._queue, self._max_depth = cache, queue, max_depth
        self._hidden_size, self._num_tokens = head.config.hidden_size, parts["lm_head"].out_features
        self._rotary = Angles(head.rotary)(torch.arange(cache.capacity + max_depth + 1))
        self._head = self._head_structure(head, layer, parts, embedding)
        self._buffers: dict[tuple[int, int], tuple[DraftBuffers, _Drafts]] = {}  # by children and ends
        self._padded: dict[tuple[int, int, int, int], PaddedDraft] = {}  # by these, sequences and width
        self.depth = 0  # levels so far

    @classmethod
    def of(
        cls, head: nn.Module, embedding: nn.Module, cache: KVCache, queue: FeatureBuffer, max_depth: int
    ) -> QuantizedDraft | None:
        """Return what drafts by the head, or None if it is not an EAGLE-3 head that these calls compute."""
        if not isinstance(head, Eagle3Head) or not is_llama_layer(head.midlayer) or max_depth < 1:
            return None
        ops = ops_for(head.midlayer.hidden_norm.weight)
        layer = Layer.of(head.midlayer, ops)
        mlp, attention = cast(Mlp, layer.mlp), layer.attention
        modules = head.fc, attention.qkv, attention.output, mlp.gate_up, mlp.down, head.lm_head
        parts = {
            name: module
            for name, module in zip(PROJECTIONS, modules, strict=True)
            if isinstance(module, QuantizedLinear) and module.dtype is torch.float32 and module.order is None
        }
        shape, has_norms = attention.shape, head.input_norm is not None or head.fc_norm is not None
        weight = cast(nn.Embedding, embedding).weight
        is_plain = type(embedding) is nn.Embedding and weight.dtype is torch.float32
        is_known = shape.window is None and shape.q_norm is None and cache.keys.dtype is torch.float32
        if ops is not cpu_ops or len(parts) < len(PROJECTIONS) or has_norms or not is_plain or not is_known:
            return None
        return cls(head, layer, parts, weight.detach().contiguous(), cache, queue, max_depth)

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
        self.depth, self._num = 0, len(roots)
        num_ends = sampling.ends.shape[1]
        buffers, drafts = self._buffers_of(plan.children, num_ends)
        key = plan.children, num_ends, self._num, plan.width
        if key not in self._padded:
            self._padded[key] = PaddedDraft(buffers, self._num, plan.width, ALL_KINDS)
        self._draft = self._padded[key]
        parameters = None if calibration is None else calibration.fit.parameters
        ends, temperature = sampling.ends.contiguous(), sampling.temperature.contiguous()
        tensors = {"slots": at.slots, "lengths": at.lengths, "roots": roots, "ends": ends, "temperature": temperature}
        self._started = tensors, spans, parameters  # which the structure points to
        for name, tensor in tensors.items():
            assert tensor.is_contiguous()
            setattr(drafts, name, tensor.data_ptr())
        drafts.first, drafts.starts = (row.ctypes.data for row in spans)
        drafts.calibration = address(parameters)
        drafts.batch, drafts.width, drafts.level = self._num, plan.width, 0
        self._head.heads.threads = torch.get_num_threads()
        self._drafts, self._kinds = drafts, (temperature > 0).long()

    def grow(self, ranking: CandidateRanker) -> None:
        """Run the head on the frontier, or on the unread pairs at first, and add the ranked children."""
        drafts = self._drafts
        num_parents = drafts.width if self.depth else 1
        drafts.level = self.depth
        of_drafts = ctypes.addressof(drafts)
        logits = torch.empty(self._num, num_parents, self._num_tokens)
        cpu_ops.function_for("draft_head_pass")(ctypes.addressof(self._head), of_drafts, logits.data_ptr())
        ranked = ranking.rank_logits(self.depth, logits, drafts.children)
        tokens, scores, own = (part.contiguous() for part in ranked)
        cpu_ops.function_for("append_level")(of_drafts, tokens.data_ptr(), scores.data_ptr(), own.data_ptr())
        self.depth += 1

    # What a plan's should_stop reads between two levels, as from a TreeBuilder.

    @property
    def levels(self) -> list[Float[Tensor, "B _ K"]]:
        """Return the log values of each level's nodes, by parent."""
        return self._draft.levels(self._num, self.depth)

    def frontier(self) -> Frontier:
        """Return the nodes of the last level with the most valuable children."""
        return self._draft.frontier(self.depth, self._num)

    @property
    def tree(self) -> DraftTree:
        return self._draft.tree(self._num, self.depth)

    def feedback(self, started: RankingFeedback) -> RankingFeedback:
        """Return from what ranking learns. started: of the same sequences, as `CandidateRanker.start` made it."""
        offered = self._draft.offered(self._kinds, self._num, self.depth)
        features = self._draft.features(self._num, self.depth)
        return RankingFeedback(started.members, started.sampling, started.lengths, features, offered)

    def _buffers_of(self, children: int, num_ends: int) -> tuple[DraftBuffers, _Drafts]:
        key = children, num_ends
        if key not in self._buffers:
            shape = DraftShape(self._cache.num_slots, children, children, self._max_depth)
            buffers = DraftBuffers(shape, self._hidden_size, num_ends, torch.float32, "cpu")
            self._buffers[key] = buffers, self._drafts_structure(buffers)
        return self._buffers[key]

    def _drafts_structure(self, buffers: DraftBuffers) -> _Drafts:
        shape, blocks, queue = buffers.shape, self._cache.blocks, self._queue
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
        self, head: Eagle3Head, layer: Layer, parts: dict[str, QuantizedLinear], embedding: Tensor
    ) -> _Head:
        shape, (keys, values) = layer.attention.shape, self._cache.layer(0)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        dims = shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, width, shape.head_dim
        structure = _Head(
            embedding=embedding.data_ptr(),
            cosine=self._rotary.cosine.data_ptr(),
            sine=self._rotary.sine.data_ptr(),
            norm_before_residual=head.midlayer.norm_before_residual,
            norm_output=head.norm_output,
            hidden_size=self._hidden_size,
            first_position=head.first_position,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            heads=AttentionHeads(*dims, shape.scaling, 0.0, 1),
        )
        for name, projection in parts.items():
            part = getattr(structure, name)
            part.weight, part.bias = ctypes.addressof(projection.packed.descriptor), address(projection.bias)
        for name, norm in self._norms(head):
            setattr(structure, f"{name}_norm", norm.weight.data_ptr())
            setattr(structure, f"{name}_eps", norm.variance_epsilon)
        return structure

    @staticmethod
    def _norms(head: Eagle3Head) -> Iterator[tuple[str, Any]]:
        layer = head.midlayer
        norms = layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.norm
        yield from zip(NORMS, norms, strict=True)
