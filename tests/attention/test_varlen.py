"""Prompts in one launch: what torch's flash attention on a GPU is handed, against one prompt after the other."""

import sys
from types import SimpleNamespace

import pytest
import torch

from eagle_ray.attention import prefill_metadata, varlen
from eagle_ray.attention.metadata import AttentionParams, causal_attention
from eagle_ray.attention.prefill_metadata import PrefillMetadata
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.kv_cache import KVCache

HEADS, KV_HEADS, DIM = 4, 2, 8
CHUNKS = {"whole": ([0, 0, 0], [5, 1, 40]), "later": ([0, 33, 64], [5, 1, 40])}


def flash(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale,
    window_size,
    enable_gqa,
    num_splits,
):
    """Return what torch.nn.attention.varlen documents, one sequence after the other."""
    assert enable_gqa and num_splits == 1 and window_size[1] == 0
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (cu_seq_q.diff().max(), cu_seq_k.diff().max()) == (max_q, max_k)
    window = None if window_size[0] < 0 else window_size[0] + 1
    attention, outs = AttentionParams(0, scale, window), []
    for i in range(len(cu_seq_q) - 1):
        rows, seen = slice(*cu_seq_q[i : i + 2]), slice(*cu_seq_k[i : i + 2])
        parts = (query[rows], key[seen], value[seen])
        outs.append(
            causal_attention(*(x.transpose(0, 1)[None] for x in parts), attention)[0].transpose(
                0, 1
            )
        )
    return torch.cat(outs)


@pytest.fixture
def launches(monkeypatch):
    """Flash attention wherever it is asked for; the number of its calls."""
    calls = []

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1),
                    enable_gqa=False, num_splits=None):  # fmt: skip
        calls.append(1)
        options = dict(
            scale=scale, window_size=window_size, enable_gqa=enable_gqa, num_splits=num_splits
        )
        return flash(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)

    monkeypatch.setitem(
        sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=varlen_attn)
    )
    varlen.launch_options.cache_clear()
    yield calls
    varlen.launch_options.cache_clear()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("firsts", [[0, 0, 0], [0, 10, 64]], ids=["all", "from the middle"])
@pytest.mark.parametrize("name", CHUNKS)
def test_one_launch_computes_what_one_by_one_does(name, firsts, window, launches, monkeypatch):
    starts, lengths = CHUNKS[name]
    firsts = [min(pair) for pair in zip(firsts, starts, strict=True)]
    torch.manual_seed(0)
    cache = KVCache(BlockManager(3, 128), 1, KV_HEADS, DIM, torch.float32, "cpu")
    for slot in range(3):
        assert cache.blocks.reserve(slot, 128)
    cache.keys.copy_(torch.randn(cache.keys.shape))
    cache.values.copy_(torch.randn(cache.values.shape))
    rows = [torch.randn(1, n, sum(lengths), DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
    attention = AttentionParams(0, DIM**-0.5, window)
    layout = PrefillMetadata(cache, [2, 0, 1], firsts, starts, lengths)
    expected = layout.attend(*rows, attention)
    assert not launches
    monkeypatch.setattr(prefill_metadata, "supports_varlen", lambda *_: True)
    torch.testing.assert_close(layout.attend(*rows, attention), expected)
    assert len(launches) == 1


def test_what_torch_refuses_is_asked_once(launches, monkeypatch, messages):
    """Of a release that wants as many key heads as query heads, say."""
    monkeypatch.setattr(varlen, "failures", [])
    refused = SimpleNamespace(
        varlen_attn=lambda *args, scale: raise_(RuntimeError("only as many\nmore"))
    )
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", refused)
    varlen.launch_options.cache_clear()
    monkeypatch.setattr(varlen, "launch_options", lambda window: {})
    cache = KVCache(BlockManager(1, 64), 1, KV_HEADS, DIM, torch.float32, "cpu")
    assert cache.blocks.reserve(0, 64)
    rows = [torch.randn(1, n, 9, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
    layout, attention = PrefillMetadata(cache, [0], [0], [0], [9]), AttentionParams(0, DIM**-0.5)
    expected = layout.attend(*rows, attention)
    monkeypatch.setattr(prefill_metadata, "supports_varlen", lambda *_: True)
    assert torch.equal(layout.attend(*rows, attention), expected)
    monkeypatch.undo()
    assert [m for m in messages if "one by one" in m and "only as many" in m] == messages != []


def raise_(error: Exception) -> None:
    raise error


def test_where_it_cannot_be_used(monkeypatch):
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(3, 4, 128))
    plain = AttentionParams(0, 1.0)
    assert varlen.supports_varlen(on_gpu, 128, plain)
    assert not varlen.supports_varlen(on_gpu, 64, plain)
    assert not varlen.supports_varlen(on_gpu, 128, AttentionParams(0, 1.0, softcap=3.0))
    assert not varlen.supports_varlen(
        SimpleNamespace(**vars(on_gpu) | {"dtype": torch.float32}), 128, plain
    )
    assert not varlen.supports_varlen(torch.zeros(3, 4, 128, dtype=torch.bfloat16), 128, plain)
    monkeypatch.setattr(varlen, "failures", ["refused before"])
    assert not varlen.supports_varlen(on_gpu, 128, plain)


def test_this_torch_knows_all_that_is_asked_of_it():
    """The names are those of the real function: nothing here calls it without a GPU."""
    varlen.launch_options.cache_clear()
    assert varlen.launch_options(9) == {
        "enable_gqa": True,
        "num_splits": 1,
        "window_size": (8, 0),
    }
    assert varlen.launch_options(None)["window_size"] == (-1, 0)
