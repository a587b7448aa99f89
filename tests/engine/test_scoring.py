"""Scores of continuations: those of one plain pass over each whole text, in the same bits however rows are divided."""

import math
import random

import pytest
import torch

from eagle_ray.core.continuations import Continuation, ContinuationScores
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine import scoring
from eagle_ray.kernels import cpu_ops
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.requests.scored_documents import scored_document
from eagle_ray.text.null_tokenizer import NullTokenizer
from tests.support.extent import extent
from tests.support.toy_models import llama, llama_engine, run

NOTHING = SamplingParams(max_tokens=0)
needs_kernels = pytest.mark.skipif(
    not cpu_ops.available(torch.device("cpu"), torch.float32),
    reason="without the compiled operations sums depend on the number of rows",
)


def scored(name: str, prompt: list[int], paths: list[list[int]]) -> Sequence:
    scores = ContinuationScores([Continuation(path) for path in paths])
    return Sequence(name, prompt, NOTHING, scoring=scores)


def finish(engine, sequences):
    """Run sequences to their ends, and return their scores."""
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert all(
        s.error is None and s.finish_reason == "length" and not s.output_ids for s in sequences
    )
    return [[each.score for each in s.scoring.results()] for s in sequences]


def some_rows(count: int, seed: int = 0, longest: int = 12):
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(3, 97) for _ in range(rng.randint(low, high))]

    rows = []
    for _ in range(count):
        start = ids(0, 3)
        paths = [start + ids(0, longest) for _ in range(rng.randint(1, 6))]
        rows.append((ids(1, 40), [*paths, [], paths[0]]))
    return rows


def sequences_of(rows):
    return [scored(str(i), prompt, paths) for i, (prompt, paths) in enumerate(rows)]


def plain_scores(model, prompt, paths):
    """Return each score from a pass of transformers' own model over the whole text, and whether argmaxes agree."""
    scores, greedy = [], []
    for path in paths:
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + path])).logits[0].float().log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(path) - 1)
        scores.append(sum(float(log_probs[i, t]) for i, t in zip(places, path, strict=True)))
        greedy.append([int(log_probs[i].argmax()) for i in places] == path)
    return scores, greedy


@pytest.mark.parametrize("tree", [(0, 0, 0), (8, 3, 3)])
@pytest.mark.parametrize("max_rows", [512, 3])
def test_scores_are_those_of_one_plain_pass(tree, max_rows, monkeypatch):
    monkeypatch.setattr(scoring, "MAX_SCORED_ROWS", max_rows)
    rows = some_rows(12)
    sequences = sequences_of(rows)
    found = finish(llama_engine(4, *tree), sequences)
    model = llama()
    for (prompt, paths), scores, sequence in zip(rows, found, sequences, strict=True):
        expected, greedy = plain_scores(model, prompt, paths)
        assert scores == pytest.approx(expected, abs=1e-4)
        assert [each.is_greedy for each in sequence.scoring.results()] == greedy


def test_a_greedy_continuation_is_what_is_generated():
    prompt = [5, 9, 33]
    [plain] = run(llama_engine(1), [prompt], [SamplingParams(max_tokens=8, ignore_eos=True)])
    other = [*plain.output_ids[:7], (plain.output_ids[7] + 1) % 97]
    sequence = scored("a", prompt, [plain.output_ids, other])
    finish(llama_engine(1), [sequence])
    assert [each.is_greedy for each in sequence.scoring.results()] == [True, False]


@needs_kernels
@pytest.mark.parametrize("tree", [(0, 0, 0), (8, 3, 3)])
def test_bits_depend_on_nothing_else(tree, monkeypatch):
    rows = some_rows(extent(16, 32), seed=1)
    rows += [(rows[0][0] + [7], rows[1][1]), (rows[0][0] + [7, 8], rows[2][1])]
    alone = [finish(llama_engine(1, *tree, packed=True), sequences_of([row]))[0] for row in rows]

    for num_slots in (1, 8, 32):
        engine = llama_engine(num_slots, *tree, packed=True)
        assert finish(engine, sequences_of(rows)) == alone
        # Again, from the prefix cache, in another order.
        order = random.Random(num_slots).sample(range(len(rows)), len(rows))
        shuffled = finish(engine, sequences_of([rows[i] for i in order]))
        assert shuffled == [alone[i] for i in order]

    engine = llama_engine(4, *tree, packed=True, prefill_tokens=7)
    for max_rows in (1, 5, 64):
        monkeypatch.setattr(scoring, "MAX_SCORED_ROWS", max_rows)
        assert finish(engine, sequences_of(rows)) == alone
    monkeypatch.undo()

    one_by_one = [
        [finish(engine, [scored("x", prompt, [path])])[0][0] for path in paths]
        for prompt, paths in rows[:6]
    ]
    assert one_by_one == alone[:6]


@needs_kernels
@pytest.mark.parametrize("tree", [(0, 0, 0), (8, 3, 3)])
def test_scored_and_generated_rows_share_a_batch(tree):
    rows = some_rows(10, seed=2)
    alone = finish(llama_engine(1, *tree, packed=True), sequences_of(rows))
    prompts = [prompt for prompt, _ in rows[:5]]
    params = [SamplingParams(max_tokens=30, ignore_eos=True)] * 5
    expected = [s.output_ids for s in run(llama_engine(1, *tree, packed=True), prompts, params)]

    engine = llama_engine(4, *tree, packed=True)
    generated = [
        Sequence(f"g{i}", p, q) for i, (p, q) in enumerate(zip(prompts, params, strict=True))
    ]
    sequences = sequences_of(rows)
    for i, sequence in enumerate(sequences):
        engine.add(sequence)
        if i < len(generated):
            engine.add(generated[i])
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert [[each.score for each in s.scoring.results()] for s in sequences] == alone
    assert [s.output_ids for s in generated] == expected


def test_a_score_waits_for_no_generation():
    engine = llama_engine(2)
    long = Sequence("long", [5, 6], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.add(long)
    engine.step()
    short = scored("short", [7, 8, 9], [[4, 5], [4, 6, 7]])
    engine.add(short)
    engine.step()
    engine.step()
    assert short.scoring.is_complete and short.finish_reason == "length"
    assert len(long.output_ids) < 10


def test_a_small_row_does_not_wait_for_a_large_one(monkeypatch):
    """And a large one not for the small rows that join in each step, although they fill the passes."""
    monkeypatch.setattr(scoring, "MAX_SCORED_ROWS", 8)
    rng = random.Random(2)
    engine = llama_engine(4)
    large = scored("large", [5, 6], [[rng.randrange(3, 97) for _ in range(9)] for _ in range(8)])
    engine.add(large)
    engine.step()
    engine.step()
    paths = [[rng.randrange(3, 97) for _ in range(9)]]
    small = [scored(f"small{i}", [7, 8], paths) for i in range(60)]
    ended = []
    for i in range(200):
        if i < len(small):
            engine.add(small[i])
        engine.step()
        ended += [
            s.request_id for s in [large, *small] if s.finish_reason and s.request_id not in ended
        ]
    assert ended.index("small0") < 3
    assert 3 < ended.index("large") < len(small)
    assert len(ended) == 61 and not engine.has_work


def test_rows_are_those_of_the_trie_and_no_more():
    """At most 1.05 times the tokens of the context and all continuations; one-token answers take no row."""
    engine = llama_engine(1)
    context = list(range(3, 63))
    [sequence] = [scored("a", context, [[7], [8], [9], [10]])]
    finish(engine, [sequence])
    assert engine.counters.num_prefill_tokens + sequence.scoring.num_verified == 60
    rng = random.Random(0)
    paths = [[rng.randrange(3, 97) for _ in range(15)] for _ in range(4)]
    sequence = scored("b", [4, *context], paths)
    finish(engine, [sequence])
    assert sequence.scoring.num_verified <= 4 * 14
    assert engine.counters.num_prefill_tokens == 60 + 61


def windowed(name: str, ids: list[int], stride: int, max_length: int = 64) -> list[Sequence]:
    return [
        Sequence(f"{name}/0", context, NOTHING, scoring=scores)
        for context, scores in scored_document(ids, NullTokenizer(), max_length, stride)
    ]


@needs_kernels
def test_documents_have_the_bits_of_their_windows(monkeypatch):
    """A simple oracle scores one token at a time. Bits depend on no batch, no order and no division into passes."""
    rng = random.Random(7)
    documents = [[rng.randrange(3, 97) for _ in range(size)] for size in (1, 2, 65, 66, 150)]
    model = llama()
    alone = {}
    engine = llama_engine(1, packed=True)
    for stride in (64, 20):
        for document in documents:
            sequences = windowed("a", document, stride)
            alone[stride, len(document)] = [scores[0] for scores in finish(engine, sequences)]
        document = documents[-1]
        total = 0.0
        for end in range(2, len(document) + 1):
            # The window that scores the last token: it ends where the first one does, or strides later.
            behind = max(0, end - 1 - 64)
            last = min(len(document), 65 + -(-behind // stride) * stride)
            ids = torch.tensor([document[max(0, last - 65) : end]])
            with torch.no_grad():
                logits = model(ids[:, :-1]).logits[0, -1].float()
            total += float(logits.log_softmax(-1)[ids[0, -1]])
        assert math.fsum(alone[stride, len(document)]) == pytest.approx(total, abs=1e-4 * 150)

    engine = llama_engine(8, 8, 3, 3, packed=True)
    every = [s for stride in (64, 20) for d in documents for s in windowed("b", d, stride)]
    expected = [score for stride in (64, 20) for d in documents for score in alone[stride, len(d)]]
    order = rng.sample(range(len(every)), len(every))
    found = finish(engine, [every[i] for i in order])
    assert [scores[0] for scores in found] == [expected[i] for i in order]
    monkeypatch.setattr(scoring, "MAX_SCORED_ROWS", 7)
    again = finish(engine, windowed("c", documents[-1], 20))
    assert [scores[0] for scores in again] == alone[20, 150]


def test_few_blocks_suffice():
    """Sequences wait for blocks, or take smaller parts; what never fits is refused."""
    rows = some_rows(8, seed=3, longest=60)
    expected = finish(llama_engine(4), sequences_of(rows))
    engine = llama_engine(4, kv_tokens=128)
    assert [pytest.approx(e, abs=1e-3) for e in expected] == finish(engine, sequences_of(rows))
    with pytest.raises(RequestError, match=r"at most 129 together \(model.max_model_len is 128\)"):
        engine.add(scored("x", [5] * 100, [[6] * 40]))
    full = scored("full", [5] * 100, [[6] * 29])
    finish(engine, [full])
    with pytest.raises(RequestError, match=r"^continuations: token id 97 is not in the target's"):
        engine.add(scored("y", [5], [[97]]))
    with pytest.raises(RequestError, match=r"^the prompt: token id 98 is not in the target's"):
        engine.add(scored("z", [98], [[5]]))


def test_a_preempted_score_begins_again():
    engine = llama_engine(2)
    sequence = scored("a", [5, 6, 7], [[4, 5, 8], [9, 4, 4]])
    [expected] = finish(llama_engine(2), [scored("a", [5, 6, 7], [[4, 5, 8], [9, 4, 4]])])
    engine.add(sequence)
    for chunk in engine.scheduler.chunks():
        assert chunk.is_last
    engine.scheduler.preempt(sequence)
    while engine.has_work:
        engine.step()
    assert [each.score for each in sequence.scoring.results()] == pytest.approx(expected, abs=1e-4)


def test_an_aborted_score_frees_its_slot(monkeypatch):
    monkeypatch.setattr(scoring, "MAX_SCORED_ROWS", 1)
    engine = llama_engine(1)
    sequence = scored("a", [5, 6, 7], [[4, 5, 8], [9, 4, 4]])
    engine.add(sequence)
    engine.step()
    assert not sequence.scoring.is_complete
    engine.abort(sequence)
    assert not engine.has_work
    finish(engine, sequences_of(some_rows(2)))


def test_choices_are_scored_before_their_sequence_decodes():
    """As alone, and the output is what it is without scores."""
    prompts = [prompt for prompt, _ in some_rows(6, seed=5)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [s.output_ids for s in run(llama_engine(3, 8, 3, 3), prompts, [params] * 6)]
    paths = [[4, 5, 8], [4, 9], [11]]
    alone = finish(llama_engine(1), [scored(str(i), p, paths) for i, p in enumerate(prompts)])
    for limit in (12, 1):
        engine = llama_engine(3, 8, 3, 3)
        sequences = [
            Sequence(
                str(i),
                prompt,
                SamplingParams(max_tokens=limit, ignore_eos=True),
                scoring=ContinuationScores([Continuation(path) for path in paths]),
            )
            for i, prompt in enumerate(prompts)
        ]
        for sequence in sequences:
            engine.add(sequence)
        while engine.has_work:
            engine.step()
            engine.scheduler.check_integrity()
        assert [s.output_ids for s in sequences] == [ids[:limit] for ids in expected]
        for sequence, scores in zip(sequences, alone, strict=True):
            found = [each.score for each in sequence.scoring.results()]
            assert found == pytest.approx(scores, abs=1e-3)


def test_steps_ahead_wait_for_scored_choices():
    """With graphs and overlap, where a sequence joins a batch that is launched ahead."""
    prompts = [prompt for prompt, _ in some_rows(6, seed=6)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [s.output_ids for s in run(llama_engine(3, 8, 3, 3), prompts, [params] * 6)]
    engine = llama_engine(3, 8, 3, 3, graphs=True, overlap=True)
    sequences = []
    for i, prompt in enumerate(prompts):
        scores = ContinuationScores([Continuation([4, 5, 8]), Continuation([4, 9])])
        sequences.append(Sequence(str(i), prompt, params, scoring=scores if i % 2 else None))
        engine.add(sequences[-1])
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert [s.output_ids for s in sequences] == expected
    assert all(s.scoring.is_complete for s in sequences[1::2])


def test_a_pass_has_no_more_rows_than_a_step_has_of_prompts():
    engine = llama_engine(2, prefill_tokens=16)
    rng = random.Random(4)
    paths = [[rng.randrange(3, 97) for _ in range(20)] for _ in range(4)]
    sequences = [scored("a", [5, 6], paths), scored("b", [7, 8], paths)]
    for sequence in sequences:
        engine.add(sequence)
    done = 0
    sizes = []
    while engine.has_work:
        engine.step()
        before, done = done, sum(sequence.scoring.num_verified for sequence in sequences)
        sizes.append(done - before)
    assert done >= 2 * 4 * 18 and max(sizes) <= 16


@pytest.mark.parametrize("is_choice", [False, True])
def test_scores_that_are_no_numbers_are_an_error(is_choice):
    engine = llama_engine(2)
    with torch.no_grad():
        engine.target.model.get_input_embeddings().weight[13] = torch.nan
    params = SamplingParams(max_tokens=4, ignore_eos=True) if is_choice else NOTHING
    scores = ContinuationScores([Continuation([13, 4]), Continuation([5])])
    bad = Sequence("bad", [7, 8, 9], params, scoring=scores)
    engine.add(bad)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert bad.error.code == "not_finite" and "Set model.dtype to float32" in str(bad.error)
    finish(engine, [scored("good", [7, 8, 9], [[4, 5], [5]])])
