"""Run the small operations of a decoder layer on a CPU: cpu_ops.cpp, compiled at install and called through ctypes.

    if cpu_ops.available(torch.device("cpu"), torch.float32):
        normed = cpu_ops.add_rms_norm(hidden, delta, weight, eps)     # hidden += delta, then RMSNorm
        cpu_ops.rotate_and_write(qkv, ...)                            # rotary embedding; keys and values to the cache
        out = cpu_ops.attend(rows, query, keys, values, shape)        # ragged rows of many sequences in one call
        out = cpu_ops.silu_mul(gate_up)                               # SiLU(gate) * up
        out = cpu_ops.quantized_matmul(inputs, weight, bias)          # a weight of 4 or 8 bits (quantized_matmul.cpp)
        index, log_probs = cpu_ops.top_k(logits, 10)                  # the ten likeliest tokens of each row
        tokens = cpu_ops.sample_rows(logits, temperature, ...)        # the token that each row samples (sample.cpp)

The library is built once for each of LEVELS that the compiler knows; the best one that this
processor runs is loaded, or the one that EAGLE_RAY_CPU_OPS names. Where none was built, or
EAGLE_RAY_CPU_OPS=off, `available` is False and the callers use torch instead. Each row's result is
the same bits in any batch: sums are in fp32, in an order that depends on the row alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

log = logging.getLogger("eagle_ray")
SWITCH = "EAGLE_RAY_CPU_OPS"
LIBRARY_SUFFIX = ".abi3.so"  # ending of libraries that any version of Python loads
# By torch's name of what a CPU can.
LEVELS = {
    "AVX512": ["avx512", "avx2", "base"],
    "AVX2": ["avx2", "base"],
}
# What multiplies quantised weights, by the number of a Path in quantized_matmul.cpp.
INSTRUCTIONS = (
    "plain C++",
    "AVX2",
    "AVX-VNNI",
    "AVX-512 VNNI",
    "AVX-512 VNNI, and AMX from 32 rows on",
    "ARM's dot products",
    "ARM's dot products and i8mm",
)
CPU_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class SeenRows(Structure):
    """Struct Rows of cpu_ops.h: the cached positions that each row of a pass attends to."""

    _fields_ = [(name, c_int64) for name in ("rows", "columns", "block_size", "table_width")] + [
        (name, c_void_p) for name in ("table", "slots", "begin", "end", "trunk", "mask")
    ]


class AttentionHeads(Structure):
    """Struct Heads of cpu_ops.h: numbers, sizes and strides of attention heads, and how scores are scaled."""

    _fields_ = [
        *(
            (name, c_int64)
            for name in ("heads", "kv_heads", "key_dim", "value_dim", "row_stride", "head_stride")
        ),
        ("scaling", c_float),
        ("softcap", c_float),
        ("threads", c_int32),
    ]


class _Weight(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("inputs", "outputs", "group_size", "bits")),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("has_half_scales", c_int32),
        ("path", c_int32),
    ]


class _DenseWeight(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("inputs", "outputs")),
        ("numbers", c_void_p),
        *((name, c_int32) for name in ("is_bf16", "path")),
    ]


class LayerProjection(Structure):
    """Struct Projection of cpu_ops.h: pointers to a quantised weight and its bias."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class DecoderLayer(Structure):
    """Struct DecoderLayer of quantized_layers.cpp: pointers to the weights, norms and cache of one decoder layer."""

    _fields_ = [
        *((name, LayerProjection) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, c_float) for name in ("input_eps", "post_eps", "head_eps")),
        ("has_bf16_cache", c_int32),
        *((name, c_void_p) for name in ("keys", "values", "rows", "tap")),
    ]


class PassRows(Structure):
    """Struct PassRows of quantized_layers.cpp: the rows of a pass, their rotary angles, and where results go."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "hidden_size", "tap_stride")),
        *((name, c_void_p) for name in ("cells", "cosine", "sine", "hidden", "out", "norm")),
        ("eps", c_float),
    ]


class CandidateTree(Structure):
    """C struct of tree_merge.cpp: the draft trees of one drafter, [rows, nodes]; `nodes` is 0 without a draft."""

    _fields_ = [("nodes", c_int64)] + [
        (name, c_void_p)
        for name in ("tokens", "parents", "depths", "log_values", "draft_log_probs", "valid")
    ]


class Blend(Structure):
    """C struct of tree_merge.cpp: the weights of an EnsembleCalibration, which give merged nodes their values.

    `weights` are fp32 [levels, num_sets, 3 * drafters + 1], and `sets` is the set of weights of
    each row. `left_out` is the drafter whose nodes are not in MergedTrees.by_depth; -1 leaves out
    none.
    """

    _fields_ = [
        *((name, c_int64) for name in ("drafters", "levels", "num_sets", "left_out")),
        ("weights", c_void_p),
        ("sets", c_void_p),
    ]


class MergedTrees(Structure):
    """C struct of tree_merge.cpp: its output tensors, with the merged trees, [rows, nodes], and their nodes' values."""

    _fields_ = [(name, c_int64) for name in ("rows", "nodes", "max_depth")] + [
        (name, c_void_p)
        for name in (
            "tokens",
            "parents",
            "depths",
            "log_values",
            "draft_log_probs",
            "valid",
            "log_probs",
            "by_depth",
            "largest",
        )
    ]


CPU_SIGNATURES = {
    "merge_blended": [POINTER(CandidateTree), POINTER(Blend), POINTER(MergedTrees), c_int],
    "quantized_layers": [c_void_p, c_int64, POINTER(PassRows), POINTER(AttentionHeads)],
    "quantized_matmul": [c_void_p] * 3 + [POINTER(_Weight), c_int64, c_int],
    "dense_matmul": [c_void_p] * 3 + [POINTER(_DenseWeight), c_int64, c_int],
    "quantized_argmax": [c_void_p] * 3 + [POINTER(_Weight), c_int64, c_int],
    "add_rms_norm": [c_void_p] * 4 + [c_int64] * 2 + [c_float, c_int],
    "silu_mul": [c_void_p] * 2 + [c_int64] * 2 + [c_int],
    "gelu_tanh_mul": [c_void_p] * 2 + [c_int64] * 2 + [c_int],
    "rotate_and_write": [c_void_p] * 8 + [c_float] + [c_int64] * 4 + [c_int],
    "draft_head_pass": [c_void_p] * 3,
    "append_level": [c_void_p] * 4,
    "draft_levels": [c_void_p] * 4 + [c_int64],
    "update_calibration": [c_void_p] * 2 + [c_int64, c_void_p],
    "select_nodes": [c_void_p] * 3,
    "ancestors": [c_void_p] * 2 + [c_int64] * 2,
    "pack_rows": [c_void_p] * 3,
    "lay_out_rows": [c_void_p] * 6 + [c_int64] * 3,
    "walk_paths": [c_void_p] * 9 + [c_int64] * 3,
    "move_rows": [c_void_p]
    + [c_int64] * 3
    + [c_void_p]
    + [c_int64] * 2
    + [c_void_p] * 3
    + [c_int64] * 2,
    "queue_path": [c_void_p] * 2 + [c_int64] * 2 + [c_void_p] * 7 + [c_int64] * 3,
    "record_trees": [c_void_p, c_int64] + [c_void_p] * 4 + [c_int64] * 2 + [c_float, c_int64],
    "best_candidates": [c_void_p] * 5 + [c_int64] * 3,
    "keep_candidates": [c_void_p] * 5 + [c_int64] * 3,
    "sample_rows": [c_void_p] * 10 + [c_int64] * 2 + [c_int],
    "likeliest": [c_void_p] * 3 + [c_int64] * 3 + [c_int],
    "attend": [POINTER(SeenRows), POINTER(AttentionHeads)] + [c_void_p] * 5,
}


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the compiled library is loaded and supports tensors, or a cache, of this device and dtype."""
    is_host = device.type == "cpu" and not device.index  # cpu:1 stands for a device in tests
    return is_host and dtype in CPU_DTYPES and best_library() is not None


@dataclass(frozen=True, slots=True)
class SeenPositions:
    """For each of R rows, the cached positions of its sequence that it attends to.

    Row r sees positions begin[r] .. end[r] - 1 of its slot, then position trunk[r] + j for each j
    that mask[r] names.

    Attributes:
        table: block numbers of each slot; position c is in block table[slot, c // block_size], at c
            % block_size.
        mask: 1 for a tree position that the row sees; M may be 0.
    """

    table: Int[Tensor, "S W"]
    block_size: int
    slots: Int[Tensor, " R"]
    begin: Int[Tensor, " R"]
    end: Int[Tensor, " R"]
    trunk: Int[Tensor, " R"]
    mask: UInt8[Tensor, "R M"]
    descriptor: SeenRows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = (*self.mask.shape, self.block_size, self.table.shape[1])
        tensors = (self.table, self.slots, self.begin, self.end, self.trunk, self.mask)
        assert all(x.is_contiguous() for x in tensors)
        object.__setattr__(self, "descriptor", SeenRows(*sizes, *(x.data_ptr() for x in tensors)))


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How attention scores become weights: multiplied by scaling, squashed to (-softcap, softcap),
    with one sink per head."""

    scaling: float
    softcap: float | None = None
    sinks: Float[Tensor, " heads"] | None = None


TILE = 16  # outputs whose codes lie together
BLOCK = 32  # inputs of a row that are rounded together


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight of 4 or 8 bits as quantized_matmul.cpp reads it.

    Attributes:
        codes: codes by tiles of TILE outputs; in a tile, by blocks of BLOCK inputs. A vector of 64
            bytes has 4 successive inputs of each output. With 4 bits, its low halves are those of
            vector j, and its high halves those of j + 4.
        scales: TILE scales and TILE offsets for each group of inputs, in fp16 or fp32.
        num_outputs: number of outputs, without the padding of the last tile.
    """

    codes: UInt8[Tensor, "tiles blocks vectors 64"]
    scales: Float[Tensor, "tiles groups 2 16"]
    num_outputs: int
    descriptor: _Weight = field(init=False, repr=False)

    @property
    def bits(self) -> int:
        return self.codes.shape[2]

    def __post_init__(self) -> None:
        assert self.codes.is_contiguous() and self.scales.is_contiguous()
        inputs = self.codes.shape[1] * BLOCK
        sizes = (inputs, self.num_outputs, inputs // self.scales.shape[1], self.bits)
        pointers = (self.codes.data_ptr(), self.scales.data_ptr())
        weight = _Weight(*sizes, *pointers, self.scales.dtype is torch.float16, quantized_path())
        object.__setattr__(self, "descriptor", weight)


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A dense weight as dense_matmul.cpp reads it.

    Attributes:
        numbers: TILE outputs of each input, by tiles; those that fill the last tile are 0.
        num_outputs: number of outputs, without the padding of the last tile.
    """

    numbers: Float[Tensor, "tiles inputs 16"]
    num_outputs: int
    descriptor: _DenseWeight = field(init=False, repr=False)

    @classmethod
    def of(cls, weight: Float[Tensor, "O I"]) -> TiledWeight:
        """Return a copy of the weight in this layout."""
        num_outputs, num_inputs = weight.shape
        numbers = weight.new_zeros(-(-num_outputs // TILE), num_inputs, TILE)
        whole = num_outputs // TILE
        numbers[:whole] = weight[: whole * TILE].view(whole, TILE, num_inputs).transpose(1, 2)
        if whole < len(numbers):
            numbers[whole, :, : num_outputs % TILE] = weight[whole * TILE :].T
        return cls(numbers, num_outputs)

    def __post_init__(self) -> None:
        assert self.numbers.is_contiguous()
        num_inputs = self.numbers.shape[1]
        is_bf16 = self.numbers.dtype is torch.bfloat16
        pointer = self.numbers.data_ptr()
        weight = _DenseWeight(num_inputs, self.num_outputs, pointer, is_bf16, dense_path())
        object.__setattr__(self, "descriptor", weight)

    def dense(self) -> Float[Tensor, "O I"]:
        """Return the weight in its original layout."""
        return self.numbers.transpose(1, 2).flatten(0, 1)[: self.num_outputs]


def add_rms_norm(
    residual: Float[Tensor, "R H"],
    delta: Float[Tensor, "R H"] | None,
    weight: Float[Tensor, " H"],
    eps: float,
) -> Float[Tensor, "R H"]:
    """Add delta to residual in place and return the RMSNorm of the sum."""
    out = torch.empty_like(residual)
    pointer = None if delta is None else delta.data_ptr()
    sizes = (*residual.shape, eps, num_threads())
    _run(
        "add_rms_norm",
        residual.dtype,
        out.data_ptr(),
        residual.data_ptr(),
        pointer,
        weight.data_ptr(),
        *sizes,
    )
    return out


def silu_mul(gate_up: Float[Tensor, "R 2I"]) -> Float[Tensor, "R I"]:
    """Return SiLU(gate) * up, where each row holds gate and then up."""
    return _gated("silu_mul", gate_up)


def gelu_tanh_mul(gate_up: Float[Tensor, "R 2I"]) -> Float[Tensor, "R I"]:
    """Return GELU(gate) * up with tanh's approximation, where each row holds gate and then up."""
    return _gated("gelu_tanh_mul", gate_up)


def _gated(name: str, gate_up: Float[Tensor, "R 2I"]) -> Float[Tensor, "R I"]:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _run(
        name,
        gate_up.dtype,
        out.data_ptr(),
        gate_up.data_ptr(),
        rows,
        size,
        num_threads(),
    )
    return out


def quantized_matmul(
    inputs: Float[Tensor, "R I"], weight: PackedWeight, bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "R O"]:
    """Return inputs @ weight.T + bias, where each block of inputs is rounded to 8 bits.

    Inputs must be contiguous. A row with a number that is not finite is NaN.
    """
    out = inputs.new_empty(len(inputs), weight.num_outputs)
    pointers = (out.data_ptr(), inputs.data_ptr(), None if bias is None else bias.data_ptr())
    _run(
        "quantized_matmul",
        inputs.dtype,
        *pointers,
        weight.descriptor,
        len(inputs),
        num_threads(),
    )
    return out


def dense_matmul(
    inputs: Float[Tensor, "R I"], weight: TiledWeight, bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "R O"]:
    """Return inputs @ weight.T + bias, each output summed in fp32 in the order of the inputs.

    Inputs must be contiguous.
    """
    out = inputs.new_empty(len(inputs), weight.num_outputs)
    pointers = (out.data_ptr(), inputs.data_ptr(), address(bias))
    _run("dense_matmul", inputs.dtype, *pointers, weight.descriptor, len(inputs), num_threads())
    return out


def quantized_argmax(
    inputs: Float[Tensor, "R I"], weight: PackedWeight, bias: Float[Tensor, " O"] | None
) -> Int[Tensor, " R"]:
    """Return the argmax of `quantized_matmul` of fp32 inputs, without writing its outputs."""
    picks = torch.empty(len(inputs), dtype=torch.int64)
    pointers = (picks.data_ptr(), inputs.data_ptr(), address(bias))
    _run(
        "quantized_argmax", torch.float32, *pointers, weight.descriptor, len(inputs), num_threads()
    )
    return picks


@cache
def quantized_path() -> int:
    """Return which CPU instructions multiply quantised weights: the number of a Path in quantized_matmul.cpp."""
    library = best_library()
    return 0 if library is None else library.quantized_matmul_path()


@cache
def dense_path() -> int:
    """Return which CPU instructions multiply dense weights: the number of a Path in
    dense_matmul.cpp, 0 if torch is faster."""
    library = best_library()
    if library is None or not hasattr(library, "dense_matmul_path"):
        return 0
    path: int = library.dense_matmul_path()
    return path


def rotate_and_write(
    qkv: Float[Tensor, "R width"],
    keys: Float[Tensor, "indices kv_heads d"],
    values: Float[Tensor, "indices kv_heads d"],
    slot_mapping: Int[Tensor, " R"],
    cosine: Float[Tensor, "R half"],
    sine: Float[Tensor, "R half"],
    q_norm: Float[Tensor, " d"] | None = None,
    k_norm: Float[Tensor, " d"] | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate the queries in place, and store rotated keys and values at their indices. Queries and
    keys can be normed first.

    Args:
        qkv: queries, keys and values of a row, one head after the other, contiguous.
    """
    kv_heads, dim = keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    tensors = (qkv, keys, values, slot_mapping, cosine, sine, q_norm, k_norm)
    pointers = (None if x is None else x.data_ptr() for x in tensors)
    sizes = (len(qkv), heads, kv_heads, dim, num_threads())
    _run("rotate_and_write", _pair(qkv, keys), *pointers, eps, *sizes)


def attend(
    seen: SeenPositions,
    query: Float[Tensor, "R heads d"],
    keys: Float[Tensor, "indices kv_heads d"],
    values: Float[Tensor, "indices kv_heads dv"],
    rule: ScoreRule,
) -> Float[Tensor, "R heads dv"]:
    """Return the attention of each row over the positions that it sees; 0 for a row that sees none.

    Args:
        query: queries with any strides over rows and heads. sinks must be fp32.
    """
    num_rows, heads, key_dim = query.shape
    assert query.stride(2) == 1 or key_dim == 1
    out = query.new_empty(num_rows, heads, values.shape[2])
    sizes = (heads, keys.shape[1], key_dim, values.shape[2], query.stride(0), query.stride(1))
    shape = AttentionHeads(*sizes, rule.scaling, rule.softcap or 0.0, num_threads())
    sinks = None if rule.sinks is None else rule.sinks.data_ptr()
    pointers = (query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), sinks)
    _run("attend", _pair(query, keys), seen.descriptor, shape, *pointers)
    return out


def top_k(
    logits: Float[Tensor, "*rows V"], count: int
) -> tuple[Int[Tensor, "*rows count"], Float[Tensor, "*rows count"]]:
    """Return the `count` likeliest tokens of each row of fp32 logits, the likeliest first, and their log-probabilities.

    Ties go to the lower index. A NaN makes all log-probabilities of its row NaN, and its tokens
    arbitrary.
    """
    index = torch.empty(*logits.shape[:-1], count, dtype=torch.int64)
    log_probs = torch.empty(index.shape)
    _likeliest(index, log_probs, logits)
    return index, log_probs


def argmax(logits: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows"]:
    """Return the index of each row's highest fp32 logit; ties go to the lower index, and a NaN is the highest."""
    index = torch.empty(*logits.shape[:-1], 1, dtype=torch.int64)
    _likeliest(index, None, logits)
    return index[..., 0]


def sample_rows(
    logits: Float[Tensor, "R V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    seed: Int[Tensor, " B"],
    seq: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """Sample a token from each row of fp32 logits, like sampling.sample. top_k 0, top_p 1 and min_p 0 cut nothing.

    Sums are in fp64 here and in fp32 in torch, so a token whose cumulative probability equals top_p
    within fp32's rounding may be kept by one and cut by the other.
    """
    numbers = [x.float().contiguous() for x in (logits, temperature, top_p, min_p)]
    integers = [x.long().contiguous() for x in (top_k, seed, seq, positions)]
    (logits, temperature, top_p, min_p), (top_k, seed, seq, positions) = numbers, integers
    scratch = torch.empty(num_threads(), logits.shape[-1])
    tokens = torch.empty(len(logits), dtype=torch.int64)
    tensors = tokens, logits, temperature, top_k, top_p, min_p, seed, seq, positions, scratch
    pointers = [x.data_ptr() for x in tensors]
    _run("sample_rows", logits.dtype, *pointers, *logits.shape, num_threads())
    return tokens


def _likeliest(index: Tensor, log_probs: Tensor | None, logits: Tensor) -> None:
    logits = logits.contiguous()
    size, count = logits.shape[-1], index.shape[-1]
    pointers = index.data_ptr(), address(log_probs), logits.data_ptr()
    _run(
        "likeliest",
        logits.dtype,
        *pointers,
        logits.numel() // size,
        size,
        count,
        num_threads(),
    )


def quantized_layers(
    layers: ctypes.Array[DecoderLayer], rows: PassRows, heads: AttentionHeads
) -> None:
    """Run decoder layers over the rows of a pass: see models/quantized_decoder.py."""
    heads.threads = num_threads()
    function_for("quantized_layers")(ctypes.addressof(layers), len(layers), rows, heads)


_of_thread = threading.local()


def num_threads() -> int:
    """Return how many threads this module's functions may use in the calling thread."""
    return getattr(_of_thread, "team_size", 0) or torch.get_num_threads()


@contextmanager
def team(is_used: bool = True) -> Iterator[None]:
    """Run the body of the context in this process's team of threads (kernels/team.h), with torch's
    operations in one thread.

    For work whose products are all of this module: torch's own need OpenMP's threads, and the two
    groups of threads would wait for each other.

    Args:
        is_used: False changes nothing.
    """
    library = best_library()
    is_inside = bool(getattr(_of_thread, "team_size", 0))
    if not is_used or is_inside or library is None or not hasattr(library, "join_team"):
        yield
        return
    set_mkl_threads = _mkl_setter()
    _of_thread.team_size = torch.get_num_threads()
    openmp_threads = library.join_team()
    mkl_threads = set_mkl_threads(1)
    try:
        yield
    finally:
        set_mkl_threads(mkl_threads)
        library.leave_team(openmp_threads)
        _of_thread.team_size = 0


@cache
def _mkl_setter() -> Callable[[int], int]:
    """Return the function that sets the calling thread's number of MKL threads and returns the old one.

    Its cosines and exponentials of a few hundred numbers run in OpenMP's threads by a number of its
    own. Those then spin for milliseconds, in which a pass took three times as long.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(path)).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):  # a torch without MKL
        return lambda threads: 0


def has_function(name: str) -> bool:
    """Return whether the compiled library has this function. A library of older sources may lack it."""
    library = best_library()
    return library is not None and hasattr(library, name)


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's first element; None for no tensor, a null pointer in C."""
    return None if tensor is None else tensor.data_ptr()


def _pair(rows: Tensor, cache: Tensor) -> str:
    """Return the suffix of functions over rows and a cache, whose dtypes may differ."""
    suffix = CPU_DTYPES[rows.dtype]
    return suffix if rows.dtype == cache.dtype else f"{suffix}_{CPU_DTYPES[cache.dtype]}"


def _run(name: str, suffix: torch.dtype | str, *arguments: object) -> None:
    function_for(name, suffix if isinstance(suffix, str) else CPU_DTYPES[suffix])(*arguments)


@cache
def function_for(name: str, suffix: str = "") -> ctypes._CFuncPtr:
    """Return a function of the library. If it exists per dtype, the one whose suffix names these dtypes."""
    library = best_library()
    assert library is not None, "the library was found when the backend was chosen"
    function = getattr(library, f"{name}_{suffix}" if suffix else name)
    function.argtypes, function.restype = CPU_SIGNATURES[name], None
    return function


@cache
def best_library() -> ctypes.CDLL | None:
    """Load the best compiled library for this processor. If there is none, log that once."""
    if is_switched_off():
        return None
    wanted = os.environ.get(SWITCH, "auto")
    for level in [wanted, *levels()] if wanted in levels() else levels():
        if (library := library_of(level)) is not None:
            if wanted not in ("auto", level):
                log.warning(
                    "%s: %r is not built or not for this processor; %s runs instead. Set it to one of %s.",
                    *(SWITCH, wanted, level, ", ".join(["auto", "off", *levels()])),
                )
            return library
    log.info(
        "cpu_ops: no compiled library for this processor: torch's operations run instead, at a fraction of the speed. "
        "Install eagle_ray with a C++ compiler."
    )
    return None


def is_switched_off() -> bool:
    """Return whether the environment variable SWITCH turns compiled libraries off."""
    return os.environ.get(SWITCH) == "off"


def levels() -> list[str]:
    """Return the instruction set levels that this processor supports, the best one first."""
    return LEVELS.get(torch.backends.cpu.get_cpu_capability(), ["base"])


def library_of(level: str) -> ctypes.CDLL | None:
    """Load the library compiled for an instruction set level; None if it was not built or cannot be loaded."""
    return load_library(f"_cpu_{level}")


def load_library(name: str) -> ctypes.CDLL | None:
    """Load a compiled library of this folder; None if it was not built or cannot be loaded."""
    path = Path(__file__).parent / f"{name}{LIBRARY_SUFFIX}"
    if not path.exists():
        return None
    try:
        # Torch is loaded: both use one OpenMP library, and so one set of threads.
        return ctypes.CDLL(str(path))
    except OSError as error:
        log.warning(
            "cpu_ops: %s cannot be loaded (%s). Install eagle_ray again on this machine.",
            path,
            error,
        )
        return None
