"""Load targets from local directories in transformers' layout, quantised ones included.

    model = load_causal_lm(path, "auto", "cuda")
    dtype, reason = auto_dtype(config, path, "cpu")      # (torch.bfloat16, "the checkpoint's own; this CPU has ...")

A checkpoint that lacks a tensor, or has one of another shape, is refused; transformers would
initialize it at random. Weights of GGUF files, AWQ, GPTQ, compressed-tensors and FP8 stay quantised
(quantized_model); checkpoints of other quantisers, such as bitsandbytes, are loaded by transformers
and the library that they name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig
from transformers.utils import logging as transformers_logging

from eagle_ray.core.errors import EngineError, one_line
from eagle_ray.families import FAMILIES, layers_of
from eagle_ray.kernels import cpu_ops
from eagle_ray.models.base_class_checkpoint import with_prefix
from eagle_ray.models.longrope import choose_factors, original_length
from eagle_ray.models.packed_layouts import DOWNLOAD, FLOAT_DTYPES, NOT_FINITE, wraps_text
from eagle_ray.models.packed_products import bf16_unit, can_pack
from eagle_ray.models.quantized_checkpoint import check_settings, is_fp8, reads
from eagle_ray.models.quantized_model import (
    RESTORED,
    Checkpoint,
    build_model,
    has_mxfp4,
    quantization_of,
    quantized_checkpoint,
)
from eagle_ray.models.rounded_checkpoint import ROUNDS_PLAIN, RoundedCheckpoint
from eagle_ray.models.sharded_checkpoint import PlainCheckpoint, load_shard
from eagle_ray.models.supported_models import LONGROPE, check_config
from eagle_ray.models.text_half import text_half
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.storage.model_files import check_files, check_weight_files, gguf_in, read_object

log = logging.getLogger("eagle_ray")

UNREADABLE_TARGET = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)
REPLACEMENTS = "AWQ, GPTQ, compressed-tensors or GGUF, which this engine runs by itself"
FETCHING = (
    "eetq",
    "fbgemm_fp8",
    "metal",
    "nvfp4",
)  # quantisers of transformers that download kernels at run time
SU = "su"  # first name of LongRoPE, by which transformers finds no parameters
MODELOPT_SETTINGS = "hf_quant_config.json"  # of Model Optimizer, if config.json does not have them
CausalLM = PreTrainedModel  # for packages that do not import transformers


def read_model_config(path: Path) -> PretrainedConfig:
    """Return the config of the causal LM in `path`, without its weights. Raises EngineError if it cannot be run."""
    check_files(path)
    check_weight_files(path)
    _refuse_head(path)
    config = text_half(_read_config(path))
    if quantization_of(config) is None and (settings := read_object(path, MODELOPT_SETTINGS)):
        config.quantization_config = settings | {"quant_method": "modelopt"}
    check_config(config)
    _check_quantiser(config)
    return config


def _refuse_head(path: Path) -> None:
    """Raise EngineError for a draft head, whose config.json may be that of a small Llama."""
    file = path / "model.safetensors"
    if not file.is_file():
        return
    try:
        with safe_open(file, "pt") as weights:
            names = list(weights.keys())
    except (OSError, SafetensorError):
        return  # reading the weights says so
    if "fc.weight" in names:
        raise EngineError(
            f"{path} is a draft head (it has fc.weight) and no target. Name it as model.draft, and its target as "
            "model.target"
        )


def load_causal_lm(
    path: Path,
    dtype: torch.dtype | str,
    device: str,
    dequantize: bool = False,
    runs_on: str | None = None,
    ranks: RankGroup | None = None,
    rounds: bool = False,
    has_lm_head: bool = True,
    max_model_len: int | None = None,
) -> PreTrainedModel:
    """Return a causal LM from a local directory. Raises EngineError if its files cannot be read or
    do not match its config.

    Args:
        dtype: dtype of the model; "auto" is the checkpoint's own.
        dequantize: whether to dequantise weights that this engine could run quantised.
        runs_on: type of the device that quantised weights are laid out for, if they move there
            later; None is `device`.
        ranks: group in which this rank reads its part; None reads all.
        rounds: whether plain weights of layers are rounded to FP8 as they are read.
        has_lm_head: whether the checkpoint must have an lm_head; without, it may be one of the
            family's base class, such as Qwen3Model, whose names of tensors have no prefix.
        max_model_len: tokens of the longest sequence, by which the factors of LongRoPE are chosen;
            None leaves both kinds in the config.
    """
    config = read_model_config(path)
    if max_model_len is not None:
        _choose_factors(path, config, max_model_len)
    if has_mxfp4(config):
        log.info("%s: %s", path, RESTORED)
    if not has_lm_head and not str((config.architectures or [""])[0]).endswith("ForCausalLM"):
        config.tie_word_embeddings = True  # the checkpoint has none, and nothing reads it
    if ranks is not None:
        own = auto_dtype(config, path, runs_on or device)[0] if isinstance(dtype, str) else dtype
        model = load_shard(path, config, own, device, ranks, dequantize, rounds)
        model.generation_config = _generation_config(path) or model.generation_config
        return model
    runs_on = runs_on or device
    checkpoint = _checkpoint(path, config, device if rounds else None)
    if checkpoint is not None:
        auto = (
            checkpoint_dtype(config) if runs_on == "cpu" else auto_dtype(config, path, runs_on)[0]
        )
        own = auto if isinstance(dtype, str) else dtype
        if not has_lm_head:
            checkpoint = with_prefix(checkpoint)
        model = build_model(config, checkpoint, own, device, dequantize, runs_on)
        model.generation_config = _generation_config(path) or model.generation_config
        return model
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    if not has_lm_head or original_length(config) is not None:
        options["config"] = config
    if (quantization := quantization_of(config)) is not None:
        method = quantization.get("quant_method")
        log.warning(
            "the target is quantised (%s): slower than %s, since transformers runs it",
            method,
            REPLACEMENTS,
        )
    options |= {
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }  # for _check_complete, which ignores none
    if quantization_of(config) is not None or loads_to(device):
        options |= {
            "device_map": {"": device}
        }  # quantised weights are laid out for a device when they are read
    try:
        with _no_progress_bars():
            loaded = AutoModelForCausalLM.from_pretrained(path, **options)
    except UNREADABLE_TARGET as error:
        raise EngineError(f"the target in {path} cannot be loaded: {one_line(error)}") from error
    model, report = cast(
        tuple[PreTrainedModel, dict[str, Any]], loaded
    )  # a pair, by output_loading_info
    _check_complete(path, report)
    _check_finite(model)
    if "device_map" not in options:
        model.to(device)  # type: ignore[arg-type]  # transformers' wrapper of Module.to loses its self
    model.eval().requires_grad_(False)
    return _freeze(model)


def _choose_factors(path: Path, config: PretrainedConfig, max_model_len: int) -> None:
    """Choose the factors of LongRoPE in the config, and log which they are."""
    factors = choose_factors(config, max_model_len)
    if factors is not None:
        log.info(
            "%s: all positions turn by the %s factors of LongRoPE: sequences have at most %d tokens, and the short "
            "factors are for %d",
            path,
            factors,
            max_model_len,
            original_length(config),
        )


def _checkpoint(path: Path, config: PretrainedConfig, rounds_on: str | None) -> Checkpoint | None:
    """Return the tensors of a target that this engine reads itself; None if transformers does. Raises EngineError.

    Args:
        rounds_on: where plain weights of layers are rounded to FP8; None leaves them as they are.
    """
    checkpoint = quantized_checkpoint(path, config)
    if rounds_on is not None:
        if checkpoint is not None or quantization_of(config) is not None:
            raise EngineError(ROUNDS_PLAIN)
        return RoundedCheckpoint(PlainCheckpoint.open(path), rounds_on)
    if checkpoint is None and has_mxfp4(config):
        return PlainCheckpoint.open(path)
    if checkpoint is None and wraps_text(path):
        return _text_checkpoint(path, config)
    return checkpoint


def _text_checkpoint(path: Path, config: PretrainedConfig) -> PlainCheckpoint:
    """Return the tensors of a wrapper's text half. Raises EngineError."""
    quantization = quantization_of(config)
    if quantization is not None:
        raise EngineError(
            f"the target is the text half of a larger model and is quantised ({quantization.get('quant_method')}). "
            f"Take a checkpoint of {REPLACEMENTS}."
        )
    log.info("%s: only its text half is read", path)
    return PlainCheckpoint.open(path)


def _generation_config(path: Path) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:
        return None


def loads_to(device: str) -> bool:
    """Return whether weights are read straight to the device, which needs a GPU and accelerate.

    Otherwise they are read to the host first, which takes as much memory there and one copy more.
    """
    return torch.device(device).type != "cpu" and find_spec("accelerate") is not None


def keeps_quantized(path: Path, config: PretrainedConfig) -> bool:
    """Return whether load_causal_lm keeps the directory's quantised weights as they are stored."""
    quantization = quantization_of(config)
    return gguf_in(path) is not None or (quantization is not None and reads(quantization))


def _read_config(path: Path) -> PretrainedConfig:
    raw = read_object(path, "config.json")
    scaling = raw.get("rope_scaling")
    try:
        if isinstance(scaling, dict) and SU in (scaling.get("type"), scaling.get("rope_type")):
            named = scaling | {"type": LONGROPE, "rope_type": LONGROPE}
            return AutoConfig.for_model(**raw | {"rope_scaling": named})
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (
        Exception
    ) as error:  # whatever the family's own class makes of values that it was not made for
        raise EngineError(f"the config in {path} cannot be read: {one_line(error)}") from error


def _check_quantiser(config: PretrainedConfig) -> None:
    """Refuse a quantised checkpoint of a family whose layers are not read, a quantiser that transformers lacks,
    and one with a missing library.

    A missing GPU is no error yet: the driver's machine may have none.
    """
    quantisation = quantization_of(config)
    if quantisation is None:
        return
    family = FAMILIES[config.model_type]
    if has_mxfp4(config):
        return
    if reads(quantisation):
        check_settings(quantisation)
        if family.why_dense and not (family.keeps_fp8_experts and is_fp8(quantisation)):
            raise EngineError(
                f"a quantised checkpoint of {config.model_type!r} is not read: {family.why_dense}. Use one with plain "
                "weights"
            )
        return
    method = quantisation.get("quant_method")
    if family.why_own:
        raise EngineError(
            f"the target is quantised ({method}), whose layers transformers' forward runs: not those of "
            f"{config.model_type!r}, since {family.why_own}. Use a checkpoint with plain weights."
        )
    if quantisation.get("load_in_8bit") and quantisation.get("llm_int8_threshold", 6.0):
        raise EngineError(
            "the target is quantised (bitsandbytes, 8 bits) with an llm_int8_threshold: which columns it keeps in 16 "
            "bits depends on all rows of a pass, so that a row's tokens would depend on its company. Take a checkpoint "
            f"of {REPLACEMENTS}, or set llm_int8_threshold to 0.0 in its config.json"
        )
    if method in FETCHING:
        raise EngineError(
            f"the target is quantised ({method}), whose kernels transformers fetches from the hub while it runs. Take "
            f"a checkpoint of {REPLACEMENTS}."
        )
    try:
        quantiser = AutoHfQuantizer.from_config(
            AutoQuantizationConfig.from_dict(quantisation), pre_quantized=True
        )
        quantiser.validate_environment(device_map=None)
    except RuntimeError:
        return
    except (ValueError, TypeError, ImportError) as error:
        raise EngineError(
            f"the target is quantised ({method}) and cannot be run here: {one_line(error)}. Install that, or take a "
            f"checkpoint of {REPLACEMENTS}."
        ) from error


def set_eos_ids(model: PreTrainedModel, ids: frozenset[int]) -> None:
    """Set the model's end-of-sequence tokens: those of its files and of its tokenizer."""
    generation = model.generation_config or GenerationConfig()
    generation.eos_token_id = sorted(ids) or None
    model.generation_config = generation


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the EOS ids of the generation config, or else of the config; empty if neither has any."""
    generation = (
        getattr(model.generation_config, "eos_token_id", None) if model.generation_config else None
    )
    eos = (
        generation
        if generation is not None
        else model.config.get_text_config(decoder=True).eos_token_id
    )
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset([eos])


def input_embedding(model: PreTrainedModel) -> nn.Embedding:
    """Return the embedding of the model's tokens."""
    return cast(nn.Embedding, model.get_input_embeddings())


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the sequential layers between the embedding and the last norm."""
    base = layers_of(model)
    layers = getattr(base, "layers", None)
    if not (isinstance(layers, nn.ModuleList) and hasattr(base, "norm")):
        raise EngineError(
            f"{type(model).__name__} is not built of `layers` and a `norm`: it can neither be placed over several "
            "devices (set execution.gpus_per_actor to 1) nor be the target of an EAGLE-3 head"
        )
    return layers


@torch.no_grad()
def _freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze the model after running one token: some quantisers create their layers at the first
    call of the whole model.
    """
    if model._forward_pre_hooks:
        model(torch.ones(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    return model


def _check_complete(path: Path, report: dict[str, Any]) -> None:
    """Raise EngineError for missing or mismatched tensors. found: transformers' loading report."""
    missing = sorted(report["missing_keys"])
    misshapen = [
        f"{key} is {tuple(given)}, wanted {tuple(wanted)}"
        for key, given, wanted in sorted(report["mismatched_keys"])
    ]
    faults = [f"missing {', '.join(missing)}"] if missing else []
    if faults or misshapen:
        raise EngineError(f"the target in {path} is not whole: {'; '.join(faults + misshapen)}")


def _check_finite(model: PreTrainedModel) -> None:
    """Raise EngineError for the first tensor with a number that is not finite. A sum shows one, and takes less time."""
    for name, values in model.named_parameters():
        if (
            values.dtype in FLOAT_DTYPES
            and not values.sum(dtype=torch.float32).isfinite()
            and not values.isfinite().all()
        ):
            raise EngineError(f"tensor {name}: {NOT_FINITE}. {DOWNLOAD}")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars, which would overwrite the caller's output."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


MIN_BF16_BYTES = (
    192 << 20
)  # of bf16 weights; fewer may stay in a cache, where fp32 is as fast. 1.5x at 257 MiB


def auto_dtype(config: PretrainedConfig, path: Path, device: str) -> tuple[torch.dtype, str]:
    """Return the dtype that `model.dtype: auto` stands for, and the reason in a few words.

    On a GPU it is the checkpoint's own. On a CPU it is fp32, also of activations between quantised
    weights, unless the checkpoint is plain bf16 already, the processor multiplies bf16 matrices
    (AMX or AVX512-BF16) and reading the weights dominates a step.

    Args:
        config: config of the causal LM.
        path: directory of the model, for the sizes of its weight files.
        device: cpu or cuda.
    """
    own = checkpoint_dtype(config)
    if device != "cpu":
        if keeps_quantized(path, config):
            return (
                torch.bfloat16,
                "for activations, in which products with quantised weights are computed",
            )
        return own, "the checkpoint's own"
    if keeps_quantized(path, config):
        if cpu_ops.quantized_path() == 0:
            return (
                torch.float32,
                "quantised weights are dequantised: nothing here multiplies them as they are stored",
            )
        return (
            torch.float32,
            "of activations; quantised weights stay as they are stored, FP8 is dequantised",
        )
    if own is not torch.bfloat16 or getattr(config, "quantization_config", None) is not None:
        return torch.float32, "the checkpoint is not plain bf16"
    unit = bf16_unit()
    if unit is None:
        return torch.float32, "this CPU has neither AMX nor AVX512-BF16"
    size = sum(
        file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern)
    )
    if size < MIN_BF16_BYTES:
        return torch.float32, f"{size >> 20} MiB of weights are too few for bf16 to be faster"
    return torch.bfloat16, f"the checkpoint's own, and this CPU has {unit}"


def activation_dtype(
    dtype: torch.dtype, config: PretrainedConfig, path: Path, device: str
) -> torch.dtype:
    """Return the dtype of a target's activations, given the requested one.

    A quantised target on a CPU runs in fp32 where a row of a dense layer would otherwise depend on
    the other rows: for fp16, and for bf16 on a CPU without bf16 instructions.
    """
    if device != "cpu" or not keeps_quantized(path, config) or cpu_ops.quantized_path() == 0:
        return dtype
    return dtype if can_pack(device, dtype) else torch.float32


def checkpoint_dtype(config: PretrainedConfig) -> torch.dtype:
    """Return the dtype that the checkpoint states, or fp32."""
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.float32
