"""Small GGUF files for tests: metadata and tensors, each quantised value by value.

    write_gguf(path, toy_metadata(), {"output_norm.weight": (F32, array)})

Nothing here is shared with eagle_ray.gguf, so that a mistake there is not made here too.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
BLOCK = 32
ALIGNMENT = 32
TOY_WORDS = [
    "\u0120a",
    "\u0120b",
    "ab",
]  # of the toy tokenizer's vocabulary, each made by one merge
TOY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
)


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, np.ndarray]]
) -> None:
    """Write a file of version 3. tensors: type and float32 values by name."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _typed(value)
    data = b""
    for name, (type_id, values) in tensors.items():
        header += _string(name) + struct.pack("<I", values.ndim)
        header += b"".join(struct.pack("<Q", size) for size in reversed(values.shape))
        header += struct.pack("<IQ", type_id, len(data))
        data = _padded(
            data + b"".join(_encode(block, type_id) for block in _blocks(values, type_id))
        )
    path.write_bytes(_padded(header) + data)


def toy_metadata(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a Llama of two layers with a byte-level tokenizer. changes: keys with _ for a dot."""
    letters = byte_letters()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, *TOY_WORDS]
    return {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["\u0120 a", "\u0120 b", "a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TOY_TEMPLATE,
    } | changes


def toy_tensors(metadata: dict[str, Any], seed: int = 0) -> dict[str, tuple[int, np.ndarray]]:
    """Return random tensors of every type for this metadata, with a tied lm_head."""
    rng = np.random.default_rng(seed)
    hidden, feed_forward = metadata["llama.embedding_length"], metadata["llama.feed_forward_length"]
    vocab_size = len(metadata["tokenizer.ggml.tokens"])
    kv_size = (
        hidden * metadata["llama.attention.head_count_kv"] // metadata["llama.attention.head_count"]
    )

    def weight(type_id: int, *shape: int) -> tuple[int, np.ndarray]:
        return type_id, rng.normal(0, 0.2, shape).astype(np.float32)

    tensors = {"token_embd.weight": weight(Q8_0, vocab_size, hidden)}
    for layer in range(metadata["llama.block_count"]):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": weight(F32, hidden),
            f"blk.{layer}.attn_q.weight": weight(Q4_1, hidden, hidden),
            f"blk.{layer}.attn_k.weight": weight(Q4_1, kv_size, hidden),
            f"blk.{layer}.attn_v.weight": weight(Q4_0, kv_size, hidden),
            f"blk.{layer}.attn_output.weight": weight(F16, hidden, hidden),
            f"blk.{layer}.ffn_norm.weight": weight(F32, hidden),
            f"blk.{layer}.ffn_gate.weight": weight(Q4_1, feed_forward, hidden),
            f"blk.{layer}.ffn_up.weight": weight(BF16, feed_forward, hidden),
            f"blk.{layer}.ffn_down.weight": weight(Q4_1, hidden, feed_forward),
        }
    return tensors | {"output_norm.weight": weight(F32, hidden)}


def scripted_tensors(
    metadata: dict[str, Any], script: list[int]
) -> dict[str, tuple[int, np.ndarray]]:
    """Return tensors of a model that writes the rest of a script of token ids after its first one.

    Each id occurs once. The model needs as many hidden numbers as tokens; its layers add nothing.
    """
    hidden, num_tokens = metadata["llama.embedding_length"], len(metadata["tokenizer.ggml.tokens"])
    head = np.zeros((num_tokens, hidden), np.float32)
    head[script[1:], script[:-1]] = 1.0
    shapes = {name: values.shape for name, (_, values) in toy_tensors(metadata).items()}
    tensors = {
        name: (F32, np.full(shape, float("norm" in name), np.float32))
        for name, shape in shapes.items()
    }
    embedding = np.eye(num_tokens, hidden, dtype=np.float32)
    return tensors | {"token_embd.weight": (F32, embedding), "output.weight": (F32, head)}


def byte_letters() -> list[str]:
    """Return the letter that byte-level BPE writes for each byte: itself if printable, else one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)
    ]


def _blocks(values: np.ndarray, type_id: int) -> list[list[float]]:
    flat = values.reshape(-1).tolist()
    size = BLOCK if type_id in (Q4_0, Q4_1, Q8_0) else 1
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def _encode(block: list[float], type_id: int) -> bytes:
    if type_id == F32:
        return struct.pack("<f", block[0])
    if type_id == F16:
        return struct.pack("<e", block[0])
    if type_id == BF16:
        return struct.pack("<f", block[0])[2:]
    largest = max(block, key=abs)
    if type_id == Q8_0:
        scale = abs(largest) / 127 or 1.0
        return struct.pack("<e32b", scale, *(round(value / scale) for value in block))
    if type_id == Q4_0:
        scale = largest / -8 or 1.0
        return struct.pack("<e", scale) + _nibbles(
            [min(15, round(value / scale) + 8) for value in block]
        )
    scale = (max(block) - min(block)) / 15 or 1.0
    return struct.pack("<ee", scale, min(block)) + _nibbles(
        [round((value - min(block)) / scale) for value in block]
    )


def _nibbles(numbers: list[int]) -> bytes:
    return bytes(numbers[i] | numbers[i + 16] << 4 for i in range(16))


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    """Return the type id and the value."""
    if isinstance(value, list):
        items = [_typed(item) for item in value]
        return (
            struct.pack("<I", 9)
            + items[0][:4]
            + struct.pack("<Q", len(items))
            + b"".join(i[4:] for i in items)
        )
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    return struct.pack("<If", 6, value)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % ALIGNMENT)


SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
ROW_BYTES = {
    0: (1, 4),
    1: (1, 2),
    30: (1, 2),
    2: (32, 18),
    3: (32, 20),
    8: (32, 34),
}  # values and bytes of a block


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
        self.tensors = {
            name: (dimensions, kind, start + at) for name, dimensions, kind, at in entries
        }

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


def llama_logits(
    reader: SlowReader, ids: list[int], num_layers: int, vocab_ids: list[int]
) -> np.ndarray:
    """Return float64 logits [ids, vocab_ids] of the first num_layers layers with a tied lm_head.

    Weights are rounded to fp16, as conversion does. Heads keep the file's order: rotary pairs are
    adjacent.
    """
    x = _weight(reader, "token_embd.weight", ids)
    for layer in range(num_layers):
        prefix = f"blk.{layer}"
        normed = _norm(reader, f"{prefix}.attn_norm.weight", x)
        x = (
            x
            + _attention(reader, prefix, normed) @ _weight(reader, f"{prefix}.attn_output.weight").T
        )
        normed = _norm(reader, f"{prefix}.ffn_norm.weight", x)
        gate = normed @ _weight(reader, f"{prefix}.ffn_gate.weight").T
        up = normed @ _weight(reader, f"{prefix}.ffn_up.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ _weight(reader, f"{prefix}.ffn_down.weight").T
    return (
        _norm(reader, "output_norm.weight", x) @ _weight(reader, "token_embd.weight", vocab_ids).T
    )


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
