"""Published DFlash heads, and causal heads of JetSpec: read a directory with config.json and weights.

head = load(path, target.config)
"""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig

from eagle_ray.methods.dflash.heads import DFlashHead
from eagle_ray.methods.dflash.spec import build_dflash, own_names
from eagle_ray.methods.eagle.checkpoint import read_config, read_shapes, read_tensors, vocabulary_maps, with_path


def load(path: Path, target: PretrainedConfig) -> DFlashHead:
    """Return the DFlash head in `path`, in fp32. Raises EngineError if it cannot be read or does not fit the target."""
    head = check(path, target)
    tensors = own_names(read_tensors(path))
    if head.lm_head is not None:
        with with_path(path):
            tensors |= vocabulary_maps(head.d2t, head.config.vocab_size, tensors)
    head.load_state_dict(tensors, assign=True)
    return head.float()


def check(path: Path, target: PretrainedConfig) -> DFlashHead:
    """Return the DFlash head with its parameters on the meta device; no weights are read. Raises EngineError."""
    raw, shapes = read_config(path), read_shapes(path)
    with with_path(path):
        return build_dflash(raw, shapes, target)
