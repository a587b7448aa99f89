"""Target: a transformers causal LM run over our own key/value slots.

The module tree is transformers'; the attention function, the cache and the row layout are ours, so one pass takes
rows of many sequences, trees included, packed as [1, R]. Does not know requests, sampling or who drafted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from eagle_ray.errors import EngineError
from eagle_ray.models.attention import ATTENTION, Layout, PromptLayout, TreeLayout
from eagle_ray.models.blocks import BLOCK_SIZE, Blocks
from eagle_ray.models.kv_cache import BatchSlots, KVCache
from eagle_ray.speculative.tree import DraftTree, VerifyRows
from eagle_ray.speculative.verify import VerifyResult

UNSUPPORTED_LOGITS = ("logit_scale", "logits_scaling", "lm_head_multiplier")  # they change logits after the lm_head


@dataclass(frozen=True, slots=True)
class Prompts:
    """Chunks of B prompts for one prefill pass, one after the other in R rows.

    starts, lengths: the column of each chunk's first token and its number of tokens. tokens, positions: of every row.
    last: the row of each chunk's last token.
    """

    slots: list[int]
    starts: list[int]
    lengths: list[int]
    tokens: Int[Tensor, " R"]
    positions: Int[Tensor, " R"]
    last: Int[Tensor, " B"]

    @classmethod
    def of(
        cls,
        slots: list[int],
        chunks: list[list[int]],
        device: torch.device | str = "cpu",
        starts: list[int] | None = None,
    ) -> Prompts:
        """The given tokens of each prompt; without starts, from the first one on."""
        starts, lengths = starts or [0] * len(slots), [len(ids) for ids in chunks]
        positions = [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
        return cls(
            slots=slots,
            starts=starts,
            lengths=lengths,
            tokens=torch.tensor([i for ids in chunks for i in ids], dtype=torch.int64, device=device),
            positions=torch.cat(positions).to(device),
            last=torch.tensor(lengths, device=device).cumsum(0) - 1,
        )


class Target:
    """The model whose tokens are produced, and its KVCache of num_slots slots.

    capacity: columns of a slot, tree rows included. kv_tokens: columns that all slots together may use, rounded down
    to whole blocks; None lets every slot be full. feature_layers: the layers whose inputs are a row's feature, one
    after the other; None is the last layer's output after the norm, which the lm_head reads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        capacity: int,
        kv_tokens: int | None = None,
        feature_layers: tuple[int, ...] | None = None,
    ):
        check_supported(model)
        self.model = model.eval()
        model.set_attn_implementation(ATTENTION)
        config = model.config.get_text_config(decoder=True)
        self.embed_tokens: nn.Embedding = model.get_input_embeddings()
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self._feature_layers = feature_layers
        self.feature_size = config.hidden_size * len(feature_layers or [0])
        self.eos_ids = eos_ids(model)
        self._lm_head = model.get_output_embeddings()
        self._config = config
        weight = self.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        num_blocks = None if kv_tokens is None else kv_tokens // BLOCK_SIZE
        self.cache = KVCache(
            Blocks(num_slots, capacity, num_blocks, weight.device),
            config.num_hidden_layers,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            weight.dtype,
            weight.device,
        )

    def prefill(self, prompts: Prompts) -> tuple[Float[Tensor, "B V"], Float[Tensor, "R H"]]:
        """Fill the slots with the chunks; logits after each one's last token, features of every row."""
        layout = PromptLayout(self.cache, prompts.slots, [0] * len(prompts.slots), prompts.starts, prompts.lengths)
        hidden, features = self._run(prompts.tokens, prompts.positions, layout)
        return self.logits(hidden[prompts.last]), features

    def verify(
        self, tree: DraftTree, rows: VerifyRows, batch: BatchSlots, max_depth: int
    ) -> tuple[Float[Tensor, "R V"], Float[Tensor, "R H"]]:
        """One pass over the packed rows of B trees: logits and features after each row.

        Row (b, i) is written at column lengths[b] + i; `commit` moves what is accepted.
        """
        layout = self._tree_layout(tree, rows, batch, max_depth)
        hidden, features = self._run(rows.tokens, rows.positions, layout)
        return self.logits(hidden), features

    def commit(self, batch: BatchSlots, result: VerifyResult) -> None:
        """Keep the accepted path of each tree; the rest is forgotten."""
        self.cache.commit(batch, result)

    def logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """The lm_head, with the model's own final soft-cap."""
        return softcapped(self._lm_head(hidden), self._config)

    def _run(
        self, tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"], layout: Layout
    ) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R F"]]:
        """What the lm_head reads, and the features."""
        with self._tapped() as taps:
            out = self.model.base_model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, rows=layout
            )
        hidden = out.last_hidden_state[0]
        return hidden, torch.cat([tap[0] for tap in taps], -1) if taps else hidden

    @contextmanager
    def _tapped(self) -> Iterator[list[Float[Tensor, "1 R H"]]]:
        """The inputs of feature_layers during a pass, in their order."""
        taps: list[Tensor] = []

        def tap(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            taps.append((args[0] if args else kwargs["hidden_states"]).to(self.device))

        layers = self.model.base_model.layers
        hooks = [layers[i].register_forward_pre_hook(tap, with_kwargs=True) for i in self._feature_layers or ()]
        try:
            yield taps
        finally:
            for hook in hooks:
                hook.remove()

    def _tree_layout(self, tree: DraftTree, rows: VerifyRows, batch: BatchSlots, max_depth: int) -> TreeLayout:
        seq = rows.seq.clamp(min=0)
        columns = torch.where(rows.seq >= 0, batch.lengths[seq] + rows.node, self.cache.blocks.padding)
        return TreeLayout(
            cache=self.cache,
            batch=batch,
            cells=self.cache.cells(batch.slots[seq], columns),
            ancestors=tree.ancestors(max_depth),
            depths=tree.depths,
            column_depths=tree.depths,
            row_of=None if rows.is_rectangle else rows.row_of,
            unpack=None if rows.is_rectangle else seq * tree.num_nodes + rows.node,
        )


def softcapped(logits: Float[Tensor, "*rows V"], config: PretrainedConfig) -> Float[Tensor, "*rows V"]:
    """The lm_head's outputs as the model's own final soft-cap leaves them."""
    softcap = getattr(config, "final_logit_softcapping", None)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def load_target(path: Path, dtype: torch.dtype | str, device: str) -> PreTrainedModel:
    """A causal LM from a local directory in transformers' layout. Raises EngineError where it cannot be read."""
    try:
        with _no_progress_bars():
            model, found = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"the causal LM in {path} cannot be loaded: {error}") from error
    if missing := sorted(found["missing_keys"]):  # transformers would go on with random numbers in their place
        raise EngineError(f"{path} is no causal LM: {len(missing)} of its tensors are missing, such as {missing[0]}")
    return model.to(device).eval().requires_grad_(False)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws bars for weights that are read in a moment, over whatever the caller prints."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """The generation config's EOS ids, else the config's; empty where neither has one."""
    generation = getattr(model.generation_config, "eos_token_id", None) if model.generation_config else None
    eos = generation if generation is not None else model.config.get_text_config(decoder=True).eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset([eos])


def load_config(path: Path) -> PretrainedConfig:
    """The text config of the causal LM in `path`, without its weights. Raises EngineError where it cannot be read."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"the target's config in {path} cannot be read: {error}") from error


def check_supported(model: PreTrainedModel) -> None:
    """Refuse, by name, a model whose logits this engine would not reproduce exactly."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if not getattr(model, "_supports_attention_backend", False):
        raise EngineError(f"{name} does not route attention through transformers' attention interface")
    scaled = [key for key in UNSUPPORTED_LOGITS if getattr(config, key, None) not in (None, 1, 1.0)]
    if scaled:
        raise EngineError(f"{name} scales its logits ({', '.join(scaled)}), which this release does not reproduce")
