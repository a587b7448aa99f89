"""A second reader of GGUF files and a second Llama, both by the definition: slow, obvious and independent of ours.

reader = SlowReader(path)
reader.rows("blk.0.attn_q.weight", [3, 7])         # those rows, value by value
llama_logits(reader, [1, 5, 9], num_layers=2)      # float64, in the file's own layout
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
ROW_BYTES = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34)}  # values and bytes of a block


class SlowReader:
    """Attributes:
    metadata: values by key.
    tensors: dimensions (fastest first), type and offset in the file, by name.
    """

    def __init__(self, path: Path):
        self.data = path.read_bytes()
        self.at = 8
        num_tensors, num_keys = self._scalar(10), self._scalar(10)
        self.metadata = {self._string(): self._value(self._scalar(4)) for _ in range(num_keys)}
        entries = [self._entry() for _ in range(num_tensors)]
        start = (self.at + 31) // 32 * 32
        self.tensors = {name: (dimensions, kind, start + at) for name, dimensions, kind, at in entries}

    def rows(self, name: str, wanted: list[int] | None = None) -> np.ndarray:
        """Return rows of a tensor, all without `wanted`, as float32 [rows, columns]."""
        (columns, *rest), kind, start = self.tensors[name]
        values, size = ROW_BYTES[kind]
        row_size = columns // values * size
        wanted = list(range(rest[0] if rest else 1)) if wanted is None else wanted
        found = []
        for row in wanted:
            first = start + row * row_size
            blocks = [self.data[at : at + size] for at in range(first, first + row_size, size)]
            found.append(np.concatenate([block_values(block, kind) for block in blocks]))
        return np.stack(found)

    def _scalar(self, kind: int) -> Any:
        (value,) = struct.unpack_from(SCALARS[kind], self.data, self.at)
        self.at += struct.calcsize(SCALARS[kind])
        return value

    def _string(self) -> str:
        size = self._scalar(10)
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._string()
        if kind == 9:
            item, size = self._scalar(4), self._scalar(10)
            return [self._value(item) for _ in range(size)]
        return self._scalar(kind)

    def _entry(self) -> tuple[str, list[int], int, int]:
        name, num_dimensions = self._string(), self._scalar(4)
        dimensions = [self._scalar(10) for _ in range(num_dimensions)]
        return name, dimensions, self._scalar(4), self._scalar(10)


def block_values(block: bytes, kind: int) -> np.ndarray:
    """Return the float32 values of one block."""
    if kind == 0:
        return np.array(struct.unpack("<f", block), np.float32)
    if kind == 1:
        return np.array(struct.unpack("<e", block), np.float32)
    if kind == 30:
        return np.array(struct.unpack("<f", b"\0\0" + block), np.float32)
    (scale,) = struct.unpack("<e", block[:2])
    if kind == 8:
        return np.float32(scale) * np.array(struct.unpack("<32b", block[2:]), np.float32)
    packed = block[2:] if kind == 2 else block[4:]
    numbers = np.array([byte % 16 for byte in packed] + [byte // 16 for byte in packed], np.float32)
    if kind == 2:
        return np.float32(scale) * (numbers - 8)
    (minimum,) = struct.unpack("<e", block[2:4])
    return np.float32(scale) * numbers + np.float32(minimum)


def llama_logits(reader: SlowReader, ids: list[int], num_layers: int, vocab_ids: list[int]) -> np.ndarray:
    """Return float64 logits [ids, vocab_ids] of the first num_layers layers with a tied lm_head.

    Weights are rounded to fp16, as conversion does. Heads keep the file's order: rotary pairs are adjacent.
    """
    x = _weight(reader, "token_embd.weight", ids)
    for layer in range(num_layers):
        prefix = f"blk.{layer}"
        normed = _norm(reader, f"{prefix}.attn_norm.weight", x)
        x = x + _attention(reader, prefix, normed) @ _weight(reader, f"{prefix}.attn_output.weight").T
        normed = _norm(reader, f"{prefix}.ffn_norm.weight", x)
        gate = normed @ _weight(reader, f"{prefix}.ffn_gate.weight").T
        up = normed @ _weight(reader, f"{prefix}.ffn_up.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ _weight(reader, f"{prefix}.ffn_down.weight").T
    return _norm(reader, "output_norm.weight", x) @ _weight(reader, "token_embd.weight", vocab_ids).T


def _weight(reader: SlowReader, name: str, wanted: list[int] | None = None) -> np.ndarray:
    return reader.rows(name, wanted).astype(np.float16).astype(np.float64)


def _norm(reader: SlowReader, name: str, x: np.ndarray) -> np.ndarray:
    epsilon = reader.metadata["llama.attention.layer_norm_rms_epsilon"]
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * _weight(reader, name)[0]


def _attention(reader: SlowReader, prefix: str, x: np.ndarray) -> np.ndarray:
    """Return the heads' outputs side by side, one position and one head at a time."""
    num_heads = reader.metadata["llama.attention.head_count"]
    num_kv_heads = reader.metadata["llama.attention.head_count_kv"]
    base = reader.metadata["llama.rope.freq_base"]
    query, key, value = (x @ _weight(reader, f"{prefix}.attn_{part}.weight").T for part in "qkv")
    size = query.shape[1] // num_heads
    result = np.zeros_like(query)
    for head in range(num_heads):
        mine = slice(head * size, (head + 1) * size)
        of_group = head // (num_heads // num_kv_heads)
        shared = slice(of_group * size, (of_group + 1) * size)
        keys = np.stack([_rotated(row, i, base) for i, row in enumerate(key[:, shared])])
        for i, row in enumerate(query[:, mine]):
            scores = keys[: i + 1] @ _rotated(row, i, base) / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            result[i, mine] = weights / weights.sum() @ value[: i + 1, shared]
    return result


def _rotated(row: np.ndarray, position: int, base: float) -> np.ndarray:
    """Rotate the pairs (0, 1), (2, 3), ... of one head."""
    turned = np.empty_like(row)
    for i in range(0, len(row), 2):
        angle = position * base ** (-i / len(row))
        turned[i] = row[i] * np.cos(angle) - row[i + 1] * np.sin(angle)
        turned[i + 1] = row[i + 1] * np.cos(angle) + row[i] * np.sin(angle)
    return turned
