"""EmbeddingEngine: packed prompts, chunks and the prefix cache change no bit of an embedding on a CPU."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle_ray.assembly.embedders import EmbedderBundle, build_embedder
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.core.pooling_state import PoolingState
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.embedding import EmbeddingEngine
from eagle_ray.kernels import cpu_ops
from eagle_ray.models.pooling import POSITIONS_PER_BLOCK, Pooler
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.storage.embedder_files import EmbedderFiles
from tests.support.embedders import reference, write_embedder

needs_cpp = pytest.mark.skipif(
    not cpu_ops.available(torch.device("cpu"), torch.float32),
    reason="rows have the same bits by the compiled operations",
)
WIDE = dict(hidden_size=512, intermediate_size=512, num_attention_heads=8, head_dim=64)
LENGTHS = [1, 2, 31, 32, 33, 64, 150, 300]


def prompts(seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    shared = [generator.randrange(300) for _ in range(70)]
    ids = [[generator.randrange(300) for _ in range(length)] for length in LENGTHS]
    return [*ids, shared + ids[0], shared + ids[2], shared + ids[4]]


def build(directory: Path, **args: object) -> EmbedderBundle:
    model = ModelConfig(target=str(directory), draft=None, dtype="float32")
    return build_embedder(model, EngineArgs(**args), threads=2)  # type: ignore[arg-type]


def embed(engine: EmbeddingEngine, ids: list[list[int]], first: int = 0) -> list[Tensor]:
    sequences = [
        Sequence(
            str(i),
            one,
            SamplingParams(),
            pooling=PoolingState(engine.pooler.files.width, first=first),
        )
        for i, one in enumerate(ids)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert all(sequence.error is None for sequence in sequences)
    return [sequence.pooling.vector for sequence in sequences]  # type: ignore[union-attr,misc]


@pytest.fixture(scope="module", params=["lasttoken", "mean"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("target") / "t", pooling=request.param, **WIDE)


@needs_cpp
def test_equal_bits_whatever_the_batch_the_chunks_and_the_order(directory: Path) -> None:
    bundle = build(directory, slots=1)
    alone = [embed(bundle.engine, [ids])[0] for ids in prompts()]
    assert len({tuple(vector.tolist()) for vector in alone}) == len(alone)
    for slots, prefill_tokens in ((8, 512), (3, 16), (2, 37)):
        other = build(directory, slots=slots, prefill_tokens=prefill_tokens)
        order = list(range(len(alone)))
        random.Random(slots).shuffle(order)
        vectors = embed(other.engine, [prompts()[i] for i in order])
        for i, vector in zip(order, vectors, strict=True):
            assert torch.equal(alone[i], vector), (slots, prefill_tokens, i)


def test_equal_to_transformers_and_pooling_written_out(directory: Path) -> None:
    vectors = embed(build(directory, slots=4, prefill_tokens=48).engine, prompts())
    for ids, vector in zip(prompts(), vectors, strict=True):
        torch.testing.assert_close(vector, reference(directory, ids), atol=1e-5, rtol=0)


def test_last_tokens_reuse_prefixes_and_means_do_not(directory: Path) -> None:
    engine = build(directory, slots=2).engine
    for ids in prompts()[-3:]:
        embed(engine, [ids])
    assert (engine.counters.num_reused_tokens > 0) == (engine.pooler.files.pooling == "lasttoken")


def test_the_longest_prompt_fits_and_a_longer_one_is_refused(directory: Path) -> None:
    engine = build(directory, slots=1).engine
    assert engine.max_model_len == 512
    [vector] = embed(engine, [[3] * 512])
    torch.testing.assert_close(vector, reference(directory, [3] * 512), atol=1e-5, rtol=0)
    too_long = Sequence("a", [3] * 513, SamplingParams(), pooling=PoolingState(8))
    with pytest.raises(RequestError, match="513 tokens: shorten it to at most 512"):
        engine.add(too_long)
    with pytest.raises(RequestError, match="token id 999 is not in"):
        engine.add(Sequence("b", [999], SamplingParams(), pooling=PoolingState(8)))
    with pytest.raises(RequestError, match="no tokens"):
        engine.add(Sequence("c", [], SamplingParams(), pooling=PoolingState(8)))
    assert not engine.has_work


@pytest.mark.parametrize("first", [0, 5, 32, 100, 200])
def test_mean_of_chunks_is_the_mean_in_one_order(first: int) -> None:
    pooler = Pooler(EmbedderFiles("mean", hidden_size=24))
    states = torch.randn(200, 24, generator=torch.Generator().manual_seed(first))
    counted = states.clone()
    counted[:first] = 0
    total = torch.zeros(24)  # the slow reference: block by block, row by row
    for start in range(0, 192, POSITIONS_PER_BLOCK):
        block = counted[start]
        for row in counted[start + 1 : start + POSITIONS_PER_BLOCK]:
            block = block + row
        total = total + block
    for row in counted[192:]:
        total = total + row
    expected = total / max(200 - first, 1)
    for sizes in ([200], [1] * 200, [7] * 28 + [4], [31, 33, 64, 72], [100, 100]):
        state = PoolingState(24, first=first)
        start = 0
        for chunk in states.split(sizes):
            pooler.add(state, start, chunk)
            start += len(chunk)
        assert torch.equal(pooler.finish(state, 200, states[-1]), expected)
