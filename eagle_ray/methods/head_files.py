"""Files of a published head: its config.json, its tensors, and what the layouts of all methods have in common.

Weights are safetensors or pickles (weights only), single or sharded. Headers alone tell whether a
head fits a target, before anything is read.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle_ray.core.errors import EngineError, one_line
from eagle_ray.core.json_text import dump_json
from eagle_ray.families import text_name
from eagle_ray.methods.rounded_weights import SCALE, restore_weights, scales_of
from eagle_ray.models.packed_layouts import DOWNLOAD, NOT_FINITE, wraps_text
from eagle_ray.models.sharded_checkpoint import read_slice
from eagle_ray.parallel.draft_shards import DraftPart
from eagle_ray.parallel.shard import cut_out
from eagle_ray.storage.model_files import check_no_pointers

HEAD_WEIGHTS = SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
UNREADABLE_HEAD = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    RuntimeError,
    SafetensorError,
    pickle.PickleError,
)
STORED_FLOATS = ("F64", "F32", "F16", "BF16")  # names in safetensors
VOCABULARY_MAPS = ("d2t", "t2d")
PUBLISHED_ROPE_THETA = 10000.0
PARTIAL = "partial_rotary_factor"
ROPE_SECTIONS = ("rope_scaling", "rope_parameters")  # the second decides
ROPE_TYPES = ("rope_type", "type")  # transformers' key and its older one
MROPE = "mrope"  # positions of three axes, which are equal for text
MROPE_KEYS = ("mrope_section", "mrope_interleaved")  # how the axes share a head
FULL, SLIDING = "full_attention", "sliding_attention"  # in layer_types
DEFAULT_WINDOW_LAYERS = 28  # max_window_layers of Qwen configs that do not say it
ROPES = {  # required keys of each rope_type
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers")
DEFAULT_NORM_EPS = 1e-6  # of configs without rms_norm_eps
KEYS_FROM_TARGET = (
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
SPECULATORS = "speculators_model_type"  # which head a config of speculators is of
BLOCK_HEADS = re.compile("DFlash|DSpark|Domino")  # in the names of their classes
MAX_FAULTY_TENSORS = 8  # tensors of each fault
Named = TypeVar("Named")
Head = TypeVar("Head", bound=nn.Module)
Read = TypeVar("Read")
Shape = tuple[int, ...]


def save_head(
    head: nn.Module,
    raw_config: dict[str, Any],
    path: Path,
    name: str = SAFETENSORS,
    repeated: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the published layout: the given config.json, and the weights in bf16.

    Vocabulary maps are left out if the head drafts every token: vLLM 0.33 refuses them then.

    Args:
        repeated: tensors of the target that the layout also contains.
    """
    skipped = VOCABULARY_MAPS if getattr(head, "token_ids", None) is None else ()
    state = {**head.state_dict(), **(repeated or {})}
    tensors = {
        key: value.detach().contiguous() for key, value in state.items() if key not in skipped
    }
    halves = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in tensors.items()
    }
    write_files(path, raw_config, halves, name)


def write_files(
    path: Path, raw_config: dict[str, Any], tensors: dict[str, Tensor], name: str = SAFETENSORS
) -> None:
    """Write a config.json and one file of safetensors, without changes."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(dump_json(raw_config, indent=2) + "\n")
    save_file(tensors, path / name, metadata={"format": "pt"})


def load_into(
    head: Head, path: Path, tensors: dict[str, Tensor], part: DraftPart | None = None
) -> Head:
    """Load tensors into a head in fp32, and return it.

    Raises EngineError if its vocabulary maps select no tokens, or a weight is not finite.

    Args:
        part: the part of the head that this rank holds; None is the whole head.
    """
    _check_finite(path, tensors)
    buffers = dict(head.named_buffers())
    if "d2t" in buffers:
        with with_path(path):
            tensors |= vocabulary_maps(buffers["d2t"], len(buffers["t2d"]), tensors)
    head.load_state_dict(tensors, assign=True)
    return head.float() if part is None else cast(Head, part.joined(head.float()))


def _check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise EngineError for the first tensor with a number that is not finite, which would make every draft a NaN."""
    for name, values in tensors.items():
        if values.is_floating_point() and not values.float().isfinite().all():
            raise EngineError(f"{path}: tensor {name}: {NOT_FINITE}. {DOWNLOAD}")


def on_meta(make: Callable[[], Head]) -> Head:
    """Build a module on the meta device, for its shapes without weights. Raises ValueError if its config is invalid."""
    try:
        with torch.device("meta"):
            return make()
    except ValueError:
        raise
    except Exception as error:  # transformers' classes may raise anything for such values
        raise ValueError(f"its config.json makes no head: {one_line(error)}") from error


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises EngineError."""
    check_no_pointers([path / "config.json"])
    if not (path / "config.json").exists():
        raise EngineError(f"{path} has no config.json, so it is no directory of a head")
    try:
        content = json.loads((path / "config.json").read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(
            f"the head's config in {path} cannot be read: {one_line(error)}"
        ) from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise EngineError(f"{path / 'config.json'}: it must hold a JSON object, got {kind}")
    return content


class TensorHeader(NamedTuple):
    """Shape and type of a stored tensor.

    Attributes:
        num_bytes: bytes in the file.
        is_float: whether loading casts the tensor to the model's dtype.
    """

    shape: Shape
    num_bytes: int
    is_float: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


def read_headers(path: Path) -> dict[str, TensorHeader] | None:
    """Return the header of every tensor by name; None if there are no weights. Raises EngineError."""
    has_weights = any(_files(path, name) for name in (SAFETENSORS, PICKLE))
    return _read(path, _headers_of_safetensors, _headers_of_pickle) if has_weights else None


def text_headers(path: Path) -> dict[str, TensorHeader] | None:
    """Return the tensor headers of a target; for a multimodal wrapper (families.py), those of its text model."""
    headers = read_headers(path)
    if headers is None or not wraps_text(path):
        return headers
    named = {text_name(name): header for name, header in headers.items()}
    return {name: header for name, header in named.items() if name is not None}


def restored_headers(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers that a head's tensors have once loaded: 8-bit weights are floats then, and scales are gone."""
    scales = scales_of(headers)
    return {
        name: header._replace(is_float=header.is_float or name + SCALE in scales)
        for name, header in headers.items()
        if name not in scales
    }


def check_safetensors(path: Path) -> None:
    """Read the headers of the safetensors files in a directory, if there are any. Raises EngineError."""
    for file in _files(path, SAFETENSORS):
        read_file(file, _headers_of_safetensors)


def read_shapes(path: Path, names: tuple[str, str] = HEAD_WEIGHTS) -> dict[str, Shape]:
    """Return the shape of every tensor by name, from headers. Raises EngineError.

    Args:
        names: names of the file as safetensors and as pickle.
    """
    headers = restored_headers(_read(path, _headers_of_safetensors, _headers_of_pickle, names))
    codes = [name for name, header in headers.items() if _holds_codes(name, header)]
    if codes:
        raise EngineError(
            f"{path}: {', '.join(first_few(codes))}: codes of a quantiser, whole numbers or FP8, whose scales are not "
            "there. Use the head in 16 or 32 bits."
        )
    return {name: header.shape for name, header in headers.items()}


def _holds_codes(name: str, header: TensorHeader) -> bool:
    return name.endswith((".weight", ".bias")) and not header.is_float


def read_tensors(
    path: Path, names: tuple[str, str] = HEAD_WEIGHTS, part: DraftPart | None = None
) -> dict[str, Tensor]:
    """Return every tensor by name, from the files that `read_shapes` accepts. Raises EngineError.

    Args:
        part: part of the head that is returned; None is all of it. Only that part is read from
            disk, unless the file is a pickle that is no archive, or has 8-bit weights.
    """
    is_rounded = bool(scales_of(_read(path, _headers_of_safetensors, _headers_of_pickle, names)))
    if part is not None and not is_rounded:
        return _read(
            path, partial(_part_of_safetensors, part), partial(_part_of_pickle, part), names
        )
    tensors = _read(path, load_file, lambda file: load_pickle(file, "cpu"), names)
    if is_rounded:
        with with_path(path):
            tensors = restore_weights(tensors)
    if part is None:
        return tensors
    return {key: cut_out(x, part.part_of(key, x.shape)) for key, x in tensors.items()}


def _read(
    path: Path,
    safetensors: Callable[[Path], Mapping[str, Read]],
    pickled: Callable[[Path], Mapping[str, Read]],
    names: tuple[str, str] = HEAD_WEIGHTS,
) -> dict[str, Read]:
    for name, read in zip(names, (safetensors, pickled), strict=True):
        files = _files(path, name)
        if files:
            values: dict[str, Read] = {}
            for file in files:
                values |= read_file(file, read)
            return values
    raise EngineError(
        f"the weights in {path} cannot be read: there is neither {names[0]} nor {names[1]}"
    )


def read_file(file: Path, read: Callable[[Path], Mapping[str, Read]]) -> Mapping[str, Read]:
    """Apply `read` to a file of weights. Raises EngineError with the file and the fix if it fails."""
    check_no_pointers([file])
    try:
        return read(file)
    except pickle.UnpicklingError as error:
        raise EngineError(
            f"the weights in {file} cannot be read: it is damaged, or holds more than weights, which is never "
            "run here; convert it to safetensors"
        ) from error
    except UNREADABLE_HEAD as error:
        remedy = "" if isinstance(error, ValueError) else "; if it was cut off, fetch it again"
        reason = one_line(error) or type(error).__name__
        raise EngineError(f"the weights in {file} cannot be read: {reason}{remedy}") from error


def _files(path: Path, name: str) -> list[Path]:
    """Return the file of this name, or the shards that its index names, or nothing."""
    index = path / f"{name}.index.json"
    if (path / name).exists() or not index.exists():
        return [path / name] if (path / name).exists() else []
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if all(Path(shard).name == shard for shard in shards):
            return [path / shard for shard in shards]
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise EngineError(f"{index} is no index of weights: {one_line(error)}") from error
    raise EngineError(f"{index} names shards that are missing from its directory")


def _headers_of_safetensors(file: Path) -> dict[str, TensorHeader]:
    with safe_open(file, "pt") as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return {
            key: _header(tuple(one.get_shape()), one.get_dtype()) for key, one in slices.items()
        }


def _header(shape: Shape, dtype: str) -> TensorHeader:
    """Return the header of a tensor of safetensors.

    Args:
        dtype: such as BF16, BOOL or F8_E4M3, with its bits.
    """
    match = re.search(r"\d+", dtype)
    bits = int(match[0]) if match else 8
    return TensorHeader(shape, prod(shape) * bits // 8, dtype in STORED_FLOATS)


def _part_of_safetensors(part: DraftPart, file: Path) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        own = {
            key: read_slice(stored, part.part_of(key, stored.get_shape()))
            for key, stored in slices.items()
        }
        # No views of the whole.
        return {key: x.clone(memory_format=torch.contiguous_format) for key, x in own.items()}


def _part_of_pickle(part: DraftPart, file: Path) -> dict[str, Tensor]:
    return {
        key: cut_out(x, part.part_of(key, x.shape)) for key, x in load_pickle(file, "cpu").items()
    }


def _headers_of_pickle(file: Path) -> dict[str, TensorHeader]:
    tensors = load_pickle(file, "meta")
    return {
        key: TensorHeader(tuple(x.shape), x.nbytes, x.is_floating_point())
        for key, x in tensors.items()
    }


def load_pickle(file: Path, device: str) -> dict[str, Tensor]:
    """Load weights only; anything else in a pickle is refused. Archives are memory-mapped, so
    reading shapes is cheap.
    """
    loaded = torch.load(file, map_location=device, mmap=zipfile.is_zipfile(file), weights_only=True)
    named = isinstance(loaded, dict) and all(isinstance(key, str) for key in loaded)
    if not (named and all(isinstance(value, Tensor) for value in loaded.values())):
        raise ValueError(f"{file.name} holds something else than named tensors")
    return loaded


@contextmanager
def with_path(path: Path) -> Iterator[None]:
    """Return a context that puts the head's directory in front of errors about heads that do not fit."""
    try:
        yield
    except ValueError as error:
        raise EngineError(f"{path}: {error}") from error


def vocabulary_maps(
    d2t: Tensor, vocab_size: int, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the maps between draft vocabulary and target vocabulary, d2t and t2d.

    Missing maps, and those of a head that drafts every token, are computed instead of read. Raises
    ValueError if d2t does not select tokens of the target.
    """
    count = len(d2t)
    if tensors.get("d2t", d2t).is_floating_point():
        raise ValueError("d2t holds no whole numbers")
    if count == vocab_size:
        ids = torch.arange(count)
    else:
        ids = _mapped_ids(tensors["d2t"].long(), vocab_size, tensors.get("t2d"))
    chosen = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(count), "t2d": chosen}


def _mapped_ids(d2t: Tensor, vocab_size: int, t2d: Tensor | None) -> Tensor:
    """Return the tokens that d2t names, as offsets from its indices (the usual form) or as ids.

    t2d decides if it marks as many tokens as d2t has. Otherwise the numbers decide: ids if they are
    no offsets, or if they rise at every step, as sorted ids do and offsets of neighbours do not.
    """
    readings = [torch.arange(len(d2t)) + d2t, d2t]
    if t2d is not None and int(t2d.bool().sum()) == len(d2t):
        wanted = t2d.bool().nonzero().flatten()
        for ids in readings:
            if torch.equal(ids.sort().values, wanted):
                return ids
        reason = _why_no_tokens(readings[0], vocab_size) or "d2t and t2d name different tokens"
        raise ValueError(f"{reason} (as offsets, and as ids neither)")
    faults = [_why_no_tokens(ids, vocab_size) for ids in readings]
    if faults[0] is not None and faults[1] is not None:
        raise ValueError(f"{faults[0]} (as offsets; as ids {faults[1]})")
    rises = len(d2t) > 1 and bool((d2t.diff() > 0).all())
    return readings[1] if faults[0] is not None or (faults[1] is None and rises) else readings[0]


def _why_no_tokens(ids: Tensor, vocab_size: int) -> str | None:
    """Return why these are no different tokens of the target, or None if they are."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        return f"d2t maps to tokens {int(ids.min())} to {int(ids.max())}, and the target has {vocab_size}"
    if len(ids.unique()) < len(ids):
        return f"d2t maps {len(ids)} draft tokens to {len(ids.unique())} different tokens of the target"
    return None


def is_dflash(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json and tensor names are those of a DFlash head, or of DSpark, DFlash2 or Domino."""
    classes = raw.get("architectures")
    names_one = isinstance(classes, list) and any(BLOCK_HEADS.search(str(name)) for name in classes)
    is_named = "dflash_config" in raw or raw.get(SPECULATORS) in ("dflash", "dspark", "dflash2")
    return names_one or is_named or {"hidden_norm.weight", "fc.weight"} <= {*names}


def without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_a_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_counts(
    raw: Mapping[str, Any],
    needed: Collection[str],
    others: Mapping[str, Any],
    optional: Collection[str],
) -> None:
    """Raise ValueError unless sizes are integers >= 1: all `needed` keys of `raw`, and those of
    `others` that are present."""
    wrong = [key for key in needed if not is_count(raw.get(key))]
    wrong += [key for key in optional if key in others and not is_count(others[key])]
    if wrong:
        raise ValueError(f"its config.json gives no whole number, 1 or more, as {', '.join(wrong)}")


def attention_heads(raw: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the number of attention heads, of key/value heads, and the head size. Raises
    ValueError if they do not fit together."""
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads", heads)
    head_dim = raw.get("head_dim", raw["hidden_size"] // heads)
    if heads % kv_heads:
        raise ValueError(
            f"its {heads} attention heads cannot share {kv_heads} key/value heads (num_key_value_heads)"
        )
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"its head_dim is {head_dim}; positions turn pairs of numbers, so it must be even"
        )
    return heads, kv_heads, head_dim


def norm_eps(raw: Mapping[str, Any]) -> float:
    """Return the epsilon of a head's RMSNorms. Raises ValueError if it is not a number, or negative."""
    eps = raw.get("rms_norm_eps", DEFAULT_NORM_EPS)
    if not is_a_number(eps) or not eps >= 0:
        raise ValueError(f"its rms_norm_eps is {eps!r}; it must be a number, 0 or more")
    return float(eps)


def head_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope parameters from transformers 5's form (rope_parameters) or older ones
    (rope_theta, rope_scaling, `type`).
    """
    sections = _rope_sections(raw)
    kind = _rope_type(sections)
    rope = {"rope_theta": raw.get("rope_theta", PUBLISHED_ROPE_THETA)}
    for section in sections.values():
        rope |= section
    rope = {
        key: value for key, value in rope.items() if key not in (PARTIAL, *ROPE_TYPES, *MROPE_KEYS)
    }
    if kind == "default" and rope.get("factor", 1) != 1:
        raise ValueError(f"its rope type is default, and its factor is {rope['factor']!r}")
    rope["rope_type"] = kind
    missing = [key for key in ROPES[rope["rope_type"]] if rope.get(key) is None]
    if missing:
        raise ValueError(f"its rope of type {rope['rope_type']} has no {', '.join(missing)}")
    for key in ("rope_theta", "factor"):
        number = rope.get(key, 1)
        if not is_a_number(number) or not number > 0:
            raise ValueError(f"its {key} is {rope[key]!r}; it must be a number above 0")
    return rope


def _rope_sections(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections about positions by name, without nulls. Raises ValueError if one is no section."""
    sections = {}
    for name in ROPE_SECTIONS:
        section = raw.get(name)
        if not isinstance(section, dict | None):
            raise ValueError(f"its config.json has a {name} that is no section: {section!r}")
        sections[name] = without_nulls(section or {})
    return sections


def _rope_type(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how positions are stretched. Raises ValueError if it is unknown, or if sections contradict each other."""
    types = {
        f"{name}.{key}": section[key]
        for name, section in sections.items()
        for key in ROPE_TYPES
        if key in section
    }
    for name, section in sections.items():
        stretching = [key for key in section if key not in ("rope_theta", PARTIAL, *MROPE_KEYS)]
        if stretching and not types:
            raise ValueError(f"its {name} has {stretching[0]} and no rope_type; add its type")
    for key, kind in types.items():
        if kind == MROPE:
            section = sections[key.partition(".")[0]]
            if "mrope_section" not in section:
                raise ValueError(f"its {key} is {MROPE}, and it has no mrope_section")
            types[key] = "default"
        elif not isinstance(kind, str) or kind not in ROPES:
            raise ValueError(
                f"its positions are stretched as {kind!r} ({key}), and this release knows {', '.join(ROPES)}"
            )
    if len({*types.values()}) > 1:
        raise ValueError(
            f"its {' and its '.join(f'{key} {kind}' for key, kind in types.items())} differ"
        )
    return next(iter(types.values()), "default")


def rotary_dim_of(raw: Mapping[str, Any], head_dim: int) -> int | None:
    """Return how many elements of each attention head rotary embeddings rotate, or None if all are.

    The key is partial_rotary_factor, at the top level or in rope_parameters or rope_scaling.
    """
    sections = [raw, *_rope_sections(raw).values()]
    factors = [place[PARTIAL] for place in sections if place.get(PARTIAL) is not None]
    if len({*map(str, factors)}) > 1:
        raise ValueError(f"its config.json gives {' and '.join(map(str, factors))} as {PARTIAL}")
    if not factors:
        return None
    [factor] = {*factors}
    if not is_a_number(factor) or not 0 < factor <= 1:
        raise ValueError(f"its {PARTIAL} is {factor!r}; it must be a number above 0, 1 at most")
    size = int(head_dim * factor)
    if size == head_dim:
        return None
    if size < 2 or size % 2:
        raise ValueError(
            f"its {PARTIAL} {factor} rotates {size} of the {head_dim} numbers of a head; it must be an even number"
        )
    kind = head_rope(raw)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"its {PARTIAL} is {factor} and its rope type is {kind!r}; a part of a head is rotated with "
            "default, linear and llama3 only"
        )
    return size


def windows_of(raw: Mapping[str, Any], count: int) -> list[int | None]:
    """Return the attention window of each of a head's layers; None for full attention.

    layer_types says which layers have one. Without it, layers have one from max_window_layers on if
    use_sliding_window is true, as in transformers' Qwen configs. A sliding_window alone is ignored:
    trainers copy it from the target and do not apply it.
    """
    window, switch = raw.get("sliding_window"), raw.get("use_sliding_window")
    if not isinstance(switch, bool | None):
        raise ValueError(f"its use_sliding_window is {switch!r}; it must be true or false")
    first = raw.get("max_window_layers", DEFAULT_WINDOW_LAYERS)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ValueError(
            f"its max_window_layers is {first!r}; it must be a whole number, 0 or more"
        )
    types = raw.get("layer_types")
    if types is None:
        begin = first if switch else count
        types = [SLIDING if i >= begin else FULL for i in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise ValueError(
            f"its layer_types is {types!r}; it must be a list of {count}, one for each layer"
        )
    if unknown := [kind for kind in types if kind not in (FULL, SLIDING)]:
        raise ValueError(
            f"its layer_types has {unknown[0]!r}, which is neither {FULL} nor {SLIDING}"
        )
    if SLIDING in types and switch is False:
        raise ValueError(f"its layer_types has {SLIDING}, and its use_sliding_window is false")
    if SLIDING in types and not is_count(window):
        raise ValueError(f"its sliding_window is {window!r}; {SLIDING} needs 1 or more")
    return [window if kind == SLIDING else None for kind in types]


def idle_layer_keys(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of windows and rotations that change nothing in a head, with the reason.

    Raises ValueError as head_rope does.
    """
    rope = head_rope(raw)
    idle = _idle_window_keys(raw)
    if rope["rope_type"] != "yarn" or "original_max_position_embeddings" in rope:
        idle["max_position_embeddings"] = "rotations do not depend on it"
    if rope["rope_type"] == "dynamic":
        idle["factor"] = "a target's positions end where dynamic scaling begins"
    return idle


def _idle_window_keys(raw: Mapping[str, Any]) -> dict[str, str]:
    types: Any = raw.get("layer_types")
    has_types = isinstance(types, list)
    idle = {"max_window_layers": "layer_types says which layers have a window"} if has_types else {}
    has_window = SLIDING in types if has_types else bool(raw.get("use_sliding_window"))
    return idle if has_window else {**dict.fromkeys(WINDOW_KEYS, "no layer has a window"), **idle}


def check_equal(key: str, number: int, target_key: str, target: PretrainedConfig) -> None:
    """Raise ValueError unless a size of a head equals the target's."""
    if number != (wanted := getattr(target, target_key)):
        its = "the target's" if key == target_key else f"the target's {target_key}"
        raise ValueError(f"the head's {key} is {number} and {its} is {wanted}: they are not a pair")


def check_tensors(
    kind: str, module: nn.Module, shapes: Mapping[str, Shape], optional: Collection[str] = ()
) -> None:
    """Check that the files hold every tensor of the module in its shape, and no others.

    Raises ValueError with the first few tensors of each fault.

    Args:
        kind: kind of the head in words.
        optional: names of tensors that may be missing.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    misshapen = [
        name
        for name in sorted(wanted.keys() & shapes.keys())
        if tuple(shapes[name]) != wanted[name]
    ]
    faults = [
        *first_few(
            [f"missing {name}" for name in sorted(wanted.keys() - shapes.keys() - set(optional))]
        ),
        *first_few([f"unexpected {name}" for name in sorted(shapes.keys() - wanted.keys())]),
        *first_few(
            [f"{name} is {tuple(shapes[name])}, wanted {wanted[name]}" for name in misshapen]
        ),
    ]
    if faults:
        raise ValueError(f"not {kind} of this target: {'; '.join(faults)}")


def first_few(faults: list[str]) -> list[str]:
    """Return the first few names as text; a language model in place of a head would give hundreds."""
    more = len(faults) - MAX_FAULTY_TENSORS
    return faults if more <= 0 else [*faults[:MAX_FAULTY_TENSORS], f"and {more} more such"]
