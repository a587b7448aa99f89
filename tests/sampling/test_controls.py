"""Controls change logits as transformers' processors and the slow reference do, at every path of a tree."""

import random
from collections.abc import Iterable

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from eagle_ray.core.control_state import ControlState, WordIds, has_controls
from eagle_ray.core.errors import RequestError
from eagle_ray.core.grammar_state import pack_tokens, unpack_tokens
from eagle_ray.core.reasoning_budget import ReasoningIds
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.reference import controlled_logits
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.adjustments import Adjustments

VOCAB = 53
Controls = tuple[SamplingParams, WordIds]
ENDS = frozenset([2, 7])


def adjusted_logits(
    logits: torch.Tensor, controls: Controls, prompt: list[int], output: list[int], path: list[int]
) -> torch.Tensor:
    """Return one row's logits after the engine's adjustments: `output` is committed, `path` is drafted."""
    state = ControlState(*controls, prompt, ENDS, len(logits))
    state.sync(output[: len(output) // 2])
    state.sync(output)
    result = logits.clone()[None]
    Adjustments.of([(state, [path])]).apply(result)
    return result[0]


def random_ids(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]


def some_controls(bad_words: Iterable[Iterable[int]] = (), **values: object) -> Controls:
    return SamplingParams(**values), tuple(tuple(word) for word in bad_words)


def random_controls(rng: random.Random) -> Controls:
    some = [rng.randrange(VOCAB) for _ in range(6)]
    controls = some_controls(
        presence_penalty=rng.choice([0.0, 1.5, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.75, -1.0]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.7]),
        logit_bias=rng.choice([None, {some[0]: 3.5, some[1]: -100.0}]),
        allowed_token_ids=rng.choice([None, list(range(3, VOCAB, 2)), [*range(20), 44]]),
        bad_words=rng.choice([(), [[some[2]], some[3:5]], [some[:3], [some[5]]]]),
        min_tokens=rng.choice([0, 3, 20]),
    )
    return controls if has_controls(*controls) else some_controls(presence_penalty=1.0)


def test_paths_are_adjusted_as_committed_tokens_are():
    rng = random.Random(0)
    for _ in range(300):
        controls, prompt, tokens = (
            random_controls(rng),
            random_ids(rng, 1, 12),
            random_ids(rng, 0, 10),
        )
        cut = rng.randint(0, len(tokens))
        logits = torch.randn(VOCAB) * 4
        result = adjusted_logits(logits, controls, prompt, tokens[:cut], tokens[cut:])
        torch.testing.assert_close(
            result, controlled_logits(logits, *controls, prompt, tokens, ENDS)
        )


@pytest.mark.parametrize("num_paths", [500, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_forced_token_is_a_function_of_the_path(num_paths):
    """Of three tokens, so that markers overlap themselves and each other."""
    rng, num_forced = random.Random(2), 0
    for _ in range(num_paths):
        some = lambda low, high: tuple(rng.randrange(3) for _ in range(rng.randint(low, high)))  # noqa: E731
        openings = tuple({some(1, 2) for _ in range(rng.choice([0, 0, 1, 2]))})
        markers = ReasoningIds(openings, tuple({some(1, 3) for _ in range(rng.randint(1, 2))}))
        params = SamplingParams(
            thinking_budget=rng.randint(0, 6), allowed_token_ids=rng.choice([None, [0, 1, 2, 9]])
        )
        tokens, logits = list(some(0, 9)), torch.randn(VOCAB)
        cut, words = rng.randint(0, len(tokens)), ((0, 1), (2, 0, 2))
        state = ControlState(params, words, [5], ENDS, VOCAB, reasoning=markers)
        state.sync(tokens[: cut // 2])
        state.sync(tokens[:cut])
        result = logits.clone()[None].repeat(2, 1)
        Adjustments.of([(state, [[], tokens[cut:]])]).apply(result)
        for row, output in zip(result, (tokens[:cut], tokens), strict=True):
            expected = controlled_logits(logits, params, words, [5], output, ENDS, markers)
            torch.testing.assert_close(row, expected)
            num_forced += int(expected.isfinite().sum()) == 1
    assert num_forced > num_paths // 3


def test_rows_of_several_sequences_are_adjusted_each_by_its_own():
    rng = random.Random(1)
    cases = [(random_controls(rng), random_ids(rng, 1, 9), random_ids(rng, 0, 9)) for _ in range(5)]
    paths = [[[], [4], [4, 4], [9]], [[]], [[], [3], [3, 11]], [[]], [[], [1]]]
    states = []
    for controls, prompt, output in cases:
        states.append(ControlState(*controls, prompt, ENDS, VOCAB))
        states[-1].sync(output)
    logits = torch.randn(sum(map(len, paths)), VOCAB) * 4
    expected = [
        controlled_logits(logits[0], *controls, prompt, [*output, *path], ENDS)
        for (controls, prompt, output), each in zip(cases, paths, strict=True)
        for path in each
    ]
    rows = logits[:1].repeat(len(logits), 1)
    Adjustments.of(list(zip(states, paths, strict=True))).apply(rows)
    torch.testing.assert_close(rows, torch.stack(expected))


@pytest.mark.parametrize("seed", range(20))
def test_the_adjustments_are_those_of_transformers(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    prompt, output = random_ids(rng, 4, 12), random_ids(rng, 0, 8)
    words = [[rng.randrange(3, VOCAB)], [prompt[-1], 9], [*(prompt + output)[-2:], 11], [5, 6, 7]]
    allowed, bias = list(range(3, VOCAB)), {4: 2.5, 9: -1.5}
    processors = LogitsProcessorList(
        [
            hf.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
            hf.RepetitionPenaltyLogitsProcessor(1.4),
            hf.NoBadWordsLogitsProcessor(words, eos_token_id=[2]),
            hf.MinNewTokensLengthLogitsProcessor(len(prompt), 5, [2, 7]),
            hf.PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1),
        ]
    )
    controls = some_controls(
        repetition_penalty=1.4,
        logit_bias=bias,
        allowed_token_ids=allowed,
        bad_words=words,
        min_tokens=5,
    )
    logits = torch.randn(VOCAB) * 4
    expected = processors(torch.tensor([prompt + output]), logits.clone()[None])[0]
    cut = rng.randint(0, len(output))
    torch.testing.assert_close(
        adjusted_logits(logits, controls, prompt, output[:cut], output[cut:]), expected
    )


def test_counting_penalties_are_openais():
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, over output tokens alone."""
    controls = some_controls(presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.ones(VOCAB)
    result = adjusted_logits(logits, controls, [3, 3, 3], [4, 5, 4], [4, 6])
    assert (result - 1).nonzero().flatten().tolist() == [4, 5, 6]
    assert result[[4, 5, 6]].tolist() == [1 - 1.25, 1 - 0.75, 1 - 0.75]


def test_words_yield_before_no_token_is_left():
    controls = some_controls(allowed_token_ids=[5, 6], bad_words=[[5, 5], [5, 6]])
    assert adjusted_logits(
        torch.zeros(VOCAB), controls, [5], [], []
    ).isfinite().nonzero().flatten().tolist() == [5, 6]
    assert adjusted_logits(torch.zeros(VOCAB), controls, [9], [], [6]).isfinite().sum() == 2


def test_a_mask_has_a_bit_for_each_token():
    ids = [0, 31, 32, 52]
    mask = pack_tokens(ids, VOCAB)
    assert mask.dtype == "int32" and mask.shape == (2,)
    assert unpack_tokens(torch.from_numpy(mask)[None], VOCAB)[0].nonzero().flatten().tolist() == ids


def test_nothing_asked_for_is_no_controls():
    assert not has_controls(SamplingParams(), ())
    assert not has_controls(SamplingParams(thinking_budget=0), ())
    assert has_controls(SamplingParams(thinking_budget=0), (), ReasoningIds((), ((4,),)))
    assert not has_controls(
        SamplingParams(repetition_penalty=1, logit_bias={4: 0.0}, bad_words=[], min_tokens=0), ()
    )


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(allowed_token_ids=[5]), "bad_words forbid every one of allowed_token_ids"),
        (dict(max_tokens=4, min_tokens=5), "min_tokens must be at most max_tokens (4), got 5"),
        (dict(ignore_eos=True, regex="a"), "ignore_eos must be false with regex"),
    ],
)
def test_parameters_that_contradict_one_another_are_refused(values, message):
    with pytest.raises(RequestError) as error:
        Sequence("a", [5], SamplingParams(**values), bad_word_ids=((5,),))
    assert error.value.code == "invalid_sampling" and str(error.value).startswith(message)
