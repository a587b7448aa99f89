"""Return the text model's config out of a multimodal model's config.

    text_half(Gemma3Config(...))          # its Gemma3TextConfig, with the whole's dtype, quantisation and ends
    text_half(Qwen2_5_VLConfig(...))      # a Qwen2Config: without images the three axes of its positions are equal

families.py lists these multimodal wrappers. SafetensorFiles (packed_layouts.py) reads only the
tensors of the text model, by a text model's names.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from eagle_ray.core.errors import EngineError
from eagle_ray.families import FAMILIES, WRAPPERS

# What the text half takes from the whole, if it has none of its own.
INHERITED = ("dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
# Rotary parameters of several axes in a head.
MROPE_SETTINGS = (
    "mrope_section",
    "mrope_interleaved",
    "type",
)


def text_half(config: PretrainedConfig) -> PretrainedConfig:
    """Return the text model's config of a multimodal wrapper; any other config is returned unchanged.

    Raises EngineError if the text model is of another family than WRAPPERS names.
    """
    wrapper = WRAPPERS.get(config.model_type)
    if wrapper is None:
        return config
    text = deepcopy(config.get_text_config(decoder=True))
    family = wrapper.text_families.get(text.model_type)
    if family is None:
        known = ", ".join(wrapper.text_families)
        raise EngineError(
            f"text_config.model_type: {text.model_type!r} is no text half of {config.model_type!r} that is read. "
            f"Use a model whose text half is one of: {known}"
        )
    if family != text.model_type:
        text = _of_family(text, family)
    for key in INHERITED:
        value = getattr(config, key, None)
        if getattr(text, key, None) is None and value is not None:
            setattr(text, key, value)
    text.tie_word_embeddings = config.tie_word_embeddings
    text.architectures = [FAMILIES[family].causal_lm]
    return text


def _of_family(text: PretrainedConfig, family: str) -> PretrainedConfig:
    """Return a config of a family that computes what the text half does for text alone."""
    settings: dict[str, Any] = text.to_dict()
    settings.pop("model_type")
    rope = settings["rope_parameters"]
    settings["rope_parameters"] = {
        key: value for key, value in rope.items() if key not in MROPE_SETTINGS
    }
    return AutoConfig.for_model(family, **settings)
