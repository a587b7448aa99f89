"""StartHead: the published head from which `head.start` trains further, for example for a fine-tuned target.

Its config.json, its draft vocabulary and the layers that it reads are kept. It reads the target's embedding, of which
published heads hold a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_ray.assembly.hub import download
from eagle_ray.config.head_training import TrainConfig
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.methods.eagle.draft_vocab import head_vocab
from eagle_ray.methods.eagle.heads import Eagle3Head, EagleHead
from eagle_ray.methods.head_files import load_head, read_config
from eagle_ray.models.loader import CausalLM

KINDS = {"eagle2": EagleHead, "eagle3": Eagle3Head}


@dataclass(frozen=True, slots=True)
class StartHead:
    """A head in fp32.

    Attributes:
        raw_config: its config.json.
        token_ids: its draft vocabulary, in the order of an EAGLE-3 head's logits; None is every token.
    """

    head: EagleHead | Eagle3Head
    raw_config: dict[str, Any]
    token_ids: list[int] | None

    @classmethod
    def load(cls, config: TrainConfig, causal_lm: CausalLM) -> StartHead | None:
        """Return the head that head.start names, or None. Raises ConfigError if it cannot be trained further."""
        if config.head.start is None:
            return None
        if config.head.method not in KINDS:
            raise ConfigError(f"head.start: only {' and '.join(KINDS)} heads are trained further")
        for key in ("draft_vocab_size", "intermediate_size"):
            if getattr(config.head, key) is not None:
                raise ConfigError(f"head.{key}: leave it out, since the head that head.start names has its own")
        target = causal_lm.config.get_text_config(decoder=True)
        try:
            path = download(config.head.start, "draft")
            head, raw_config = load_head(path, target), read_config(path)
            token_ids = head_vocab(path, target.vocab_size) if isinstance(head, EagleHead) else None
        except (ConfigError, EngineError) as error:
            raise ConfigError(f"head.start: {str(error).removeprefix('model.draft: ')}") from error
        if not isinstance(head, KINDS[config.head.method]):
            raise ConfigError(f"head.start: {path} is another kind of head than head.method: {config.head.method}")
        if isinstance(head, Eagle3Head) and head.token_ids is not None:
            token_ids = head.token_ids.tolist()
        head.embed_tokens = None
        return cls(head, raw_config, token_ids)
