"""With controls, outputs under trees are those of plain decoding with the same controls, token for token."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from eagle_ray.core.control_state import ControlState, has_controls
from eagle_ray.core.errors import RequestError
from eagle_ray.core.reasoning_budget import ReasoningIds
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine import controlled_sequences
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.reference import PlainOutput, reference_decode
from eagle_ray.models import graphs as graphs_module
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.adjustments import Adjustments
from tests.support.engines import SAMPLING, SOME_TREES, assert_equal, mostly_slow, some_prompts
from tests.support.extent import extent
from tests.support.operations import watched_step
from tests.support.toy_models import llama, llama_engine, run, sequence_of, word_ids

EOS = 2
VOCAB = 97
CONTROLS = {
    "presence": dict(presence_penalty=2.0),
    "frequency": dict(frequency_penalty=1.5, presence_penalty=-0.5),
    "repetition": dict(repetition_penalty=1.5),
    "bias": dict(logit_bias={5: 4.0, 9: -100.0, EOS: 2.0}),
    "allowed": dict(allowed_token_ids=[EOS, *range(10, 30)]),
    "words": dict(
        bad_words=["5", "11 12", "40 41 42", *(f"{token} {token}" for token in range(3, VOCAB))]
    ),
    "min_tokens": dict(min_tokens=12, logit_bias={EOS: 60.0}),
    "all": dict(
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={7: 3.0, EOS: 8.0},
        allowed_token_ids=list(range(60)),
        bad_words=["8", "7 7"],
        min_tokens=6,
    ),
}


def some_controlled(count: int, max_tokens: int = 14) -> list[SamplingParams]:
    """Every control, and every ninth sequence without any; 36 have each in every way of sampling."""
    params = []
    for i in range(count):
        values = [*CONTROLS.values(), {}][i % (len(CONTROLS) + 1)]
        sampling = SAMPLING[(i + i // (len(CONTROLS) + 1)) % len(SAMPLING)]
        stops = (17, 33) if i % 4 == 3 else ()
        params.append(
            SamplingParams(
                max_tokens=max_tokens, seed=i, stop_token_ids=stops, **values, **sampling
            )
        )
    return params


def plain_outputs(
    prompts: list[list[int]], params: list[SamplingParams], model: LlamaForCausalLM
) -> list[PlainOutput]:
    model.set_attn_implementation("sdpa")
    eos = frozenset([EOS])
    cases = zip(prompts, params, strict=True)
    return [reference_decode(model, ids, p, eos, bad_word_ids=word_ids(p)) for ids, p in cases]


@pytest.fixture(scope="module")
def oracle():
    prompts, params = some_prompts(36, seed=3), some_controlled(36)
    return prompts, params, plain_outputs(prompts, params, llama())


FAST = [(1, "chain"), (1, "12 nodes"), (5, "60 nodes"), (32, "plain")]


@pytest.mark.parametrize(("num_slots", "tree"), mostly_slow(FAST, (1, 5, 32), SOME_TREES))
def test_every_tree_and_batch_equals_plain_decoding(oracle, tree, num_slots):
    prompts, params, plain = (some[: 9 * num_slots] for some in oracle)
    sequences = run(llama_engine(num_slots, *SOME_TREES[tree]), prompts, params)
    assert_equal(sequences, plain)
    if tree == "60 nodes":
        assert sum(s.stats.num_accepted_draft_tokens for s in sequences if s.controls) > 0


@pytest.mark.parametrize(
    "tree", [pytest.param(t, marks=[pytest.mark.slow] * (t != "60 nodes")) for t in SOME_TREES]
)
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_replayed_steps_equal_plain_decoding(oracle, tree, overlap):
    prompts, params, plain = oracle
    engine = llama_engine(6, *SOME_TREES[tree], graphs=True, overlap=overlap)
    assert_equal(run(engine, prompts, params), plain)
    assert engine.graphs.num_replayed > 0
    assert engine.counters.num_ahead >= overlap * (engine.counters.num_steps - 2)


@pytest.mark.parametrize("tree", ["plain", "12 nodes"])
def test_both_halves_of_a_step_with_controls_are_replayed(oracle, tree, monkeypatch):
    """The second reads the first one's results in place: it is recorded again when the first one is."""
    prompts, params, plain = (some[:18] for some in oracle)
    engine, kinds = llama_engine(6, *SOME_TREES[tree], graphs=True, overlap=True), Counter()
    run_pass = engine.graphs.run
    monkeypatch.setattr(
        engine.graphs, "run", lambda key, *rest: kinds.update([key[0]]) or run_pass(key, *rest)
    )
    assert_equal(run(engine, prompts, params), plain)
    num_unread = kinds["second half"] + kinds["verify"] - engine.counters.num_steps
    assert 0 <= num_unread <= 1 and kinds["second half"] > 10

    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 2)
    forgetful = llama_engine(6, *SOME_TREES[tree], graphs=True, overlap=True, fused=True)
    assert_equal(run(forgetful, prompts, params), plain)
    assert forgetful.graphs.num_captured > 2


def test_logprobs_are_those_of_the_targets_own_logits(oracle):
    """As vLLM's, whose logprobs_mode is raw_logprobs by default."""
    prompts, params, _ = (some[:9] for some in oracle)
    asked = [replace(p, logprobs=True, top_logprobs=2) for p in params]
    model = llama()
    for graphs in (False, True):
        for sequence in run(llama_engine(9, 12, 4, 4, graphs=graphs), prompts, asked):
            ids = torch.tensor([sequence.token_ids])
            with torch.inference_mode():
                expected = model(ids).logits[0].log_softmax(-1)[len(sequence.prompt_ids) - 1 : -1]
            own = expected.gather(1, torch.tensor(sequence.output_ids)[:, None])[:, 0]
            assert sequence.output_logprobs == pytest.approx(own.tolist(), abs=1e-3)
            assert [top[0][1] for top in sequence.output_tops] == pytest.approx(
                expected.amax(1).tolist(), abs=1e-3
            )


def test_a_first_half_that_cannot_be_captured_runs_once_a_step(oracle, monkeypatch):
    controlled = [i for i, p in enumerate(oracle[1]) if has_controls(p, word_ids(p))][:6]
    prompts, params, plain = ([some[i] for i in controlled] for some in oracle)
    engine, num_passes = llama_engine(1, graphs=True), Counter()
    may_capture, verify = engine.graphs.may_capture, engine.target.verify
    monkeypatch.setattr(
        engine.graphs, "may_capture", lambda key: key[0] != "forward" and may_capture(key)
    )
    monkeypatch.setattr(
        engine.target, "verify", lambda *args: num_passes.update(["target"]) or verify(*args)
    )
    assert_equal(run(engine, prompts, params), plain)
    assert num_passes["target"] == engine.counters.num_steps


@pytest.mark.parametrize("tree", ["plain", "12 nodes"])
def test_logprobs_are_recorded_although_steps_before_had_none(oracle, tree):
    prompts, (first, *_) = oracle[0][:4], some_controlled(4)
    params = [
        replace(first, ignore_eos=True, logprobs=i > 0, top_logprobs=2 * (i == 2), min_tokens=3)
        for i in range(4)
    ]
    plain = run(llama_engine(1), prompts, params)
    for one, other in zip(
        run(llama_engine(1, *SOME_TREES[tree], graphs=True), prompts, params), plain, strict=True
    ):
        assert one.output_ids == other.output_ids
        assert one.output_logprobs == pytest.approx(other.output_logprobs, abs=1e-4)
        assert [[i for i, _ in top] for top in one.output_tops] == [
            [i for i, _ in top] for top in other.output_tops
        ]


@pytest.fixture(scope="module")
def outgrowing():
    """Sequences that together outgrow the space of their engine."""
    num = extent(5, 9)
    prompts = [(ids * 25)[: 20 + i] for i, ids in enumerate(some_prompts(num))]
    params = [replace(p, ignore_eos=True) for p in some_controlled(num, max_tokens=50)]
    return prompts, params, plain_outputs(prompts, params, llama())


@pytest.mark.parametrize("graphs", [False, True])
def test_preempted_sequences_keep_their_counts(outgrowing, graphs):
    prompts, params, plain = outgrowing
    engine = llama_engine(4, 8, 3, 4, kv_tokens=128, graphs=graphs, overlap=graphs)
    assert_equal(run(engine, prompts, params), plain)
    assert engine.counters.num_preemptions > 0


@pytest.fixture(scope="module")
def long_prompts():
    header = some_prompts(1, seed=9)[0] * 70
    prompts, params = (
        [header[:70] * (i % 2) + ids for i, ids in enumerate(some_prompts(18))],
        some_controlled(18),
    )
    params = [replace(p, max_tokens=8, min_tokens=min(p.min_tokens, 5)) for p in params]
    return prompts, params, plain_outputs(prompts, params, llama())


@pytest.mark.parametrize("graphs", [False, True])
def test_chunked_prompts_and_shared_prefixes_change_no_output(long_prompts, graphs):
    prompts, params, plain = long_prompts
    engine = llama_engine(3, 12, 4, 4, prefill_tokens=17, graphs=graphs, overlap=graphs)
    assert_equal(run(engine, prompts, params), plain)


def test_outputs_obey_their_controls(oracle):
    prompts, params, _ = oracle
    for s in run(llama_engine(16, 60, 6, 10), prompts, params):
        sampling = s.sampling
        ends = {EOS, *sampling.stop_token_ids}
        assert not ends.intersection(s.output_ids[:-1])
        assert len(s.output_ids) > sampling.min_tokens or s.finish_reason == "length"
        assert sampling.allowed_token_ids is None or set(s.output_ids) <= set(
            sampling.allowed_token_ids
        )
        ids = s.token_ids
        for end in range(len(s.prompt_ids) + 1, len(ids) + 1):
            assert not any(
                tuple(ids[max(0, end - len(word)) : end]) == word for word in s.bad_word_ids
            )


def test_a_step_without_controls_calls_nothing_of_them(monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError("a step without controls does work for them")

    for owner, name in (
        (Adjustments, "of"),
        (Adjustments, "apply"),
        (ControlState, "__init__"),
        (ControlState, "sync"),
    ):
        monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(controlled_sequences, "DeviceToHost", fail)
    monkeypatch.setattr(controlled_sequences, "to_device", fail)
    assert watched_step(llama_engine(3, 12, 4, 4)) == ([], ["numpy"])


THINKING = [
    ReasoningIds((), ((17,),)),
    ReasoningIds((), ((17, 33, 17), (17, 34))),
    ReasoningIds(((5,), (6, 7)), ((17, 33),)),
]  # markers of one and of several tokens, opened by the prompt or by the output


@pytest.fixture(scope="module")
def bounded():
    """Sequences with a bounded reasoning, some with other controls, and every seventh without a bound."""
    prompts, markers, params, model = (
        some_prompts(21, seed=11),
        [THINKING[i % 3] for i in range(21)],
        [],
        llama(),
    )
    for i in range(21):
        own = dict(
            logit_bias={5: 9.0, 17: 4.0, 33: 3.0},
            bad_words=["5 5", "33 17"],
            min_tokens=4 * (i % 2),
        )
        budget = [0, 1, 2, 4, 9, 30, None][i % 7]
        sampling = SAMPLING[i // 3 % len(SAMPLING)]
        params.append(
            SamplingParams(max_tokens=16, seed=i, thinking_budget=budget, **own, **sampling)
        )
    model.set_attn_implementation("sdpa")
    plain = [
        reference_decode(model, ids, p, frozenset([EOS]), bad_word_ids=word_ids(p), reasoning=ids_)
        for ids, p, ids_ in zip(prompts, params, markers, strict=True)
    ]
    return prompts, params, markers, plain


BOUNDED = [(False, "plain"), (False, "60 nodes"), (True, "chain"), (True, "12 nodes")]


@pytest.mark.parametrize(("is_replayed", "tree"), mostly_slow(BOUNDED, (False, True), SOME_TREES))
def test_reasoning_closes_under_every_tree_as_in_plain_decoding(bounded, tree, is_replayed):
    prompts, params, markers, plain = bounded
    engine = llama_engine(5, *SOME_TREES[tree], graphs=is_replayed, overlap=is_replayed)
    sequences = run(engine, prompts, params, reasonings=markers)
    assert_equal(sequences, plain)
    if tree == "60 nodes":
        assert sum(s.stats.num_accepted_draft_tokens for s in sequences) > 0


def test_reasoning_has_at_most_as_many_tokens_as_it_may(bounded):
    prompts, params, markers, _ = bounded
    num_closed = 0
    for s in run(llama_engine(16, 60, 6, 10), prompts, params, reasonings=markers):
        budget, ids = s.sampling.thinking_budget, tuple(s.output_ids)
        openings = [opening for opening in s.reasoning.openings if ids[: len(opening)] == opening]
        if budget is None or (s.reasoning.openings and not openings):
            continue
        thought = ids[len(openings[0]) if openings else 0 :]
        ends = [
            i
            for i in range(len(thought))
            if any(thought[i : i + len(closing)] == closing for closing in s.reasoning.closings)
        ]
        most = min(ends, default=len(thought))
        assert most <= budget or not ends
        assert (
            ends
            or len(thought) < budget + len(s.reasoning.closings[0])
            or s.finish_reason == "stop"
        )
        num_closed += bool(ends)
    assert num_closed > len(prompts) // 2


@pytest.mark.parametrize(
    ("controls", "message"),
    [
        (
            dict(allowed_token_ids=[5, 17]),
            "thinking_budget: allowed_token_ids lacks 33, which ends the reasoning. Add",
        ),
        (
            dict(bad_words=["33"]),
            "thinking_budget: bad_words forbid token id 33, which ends the reasoning. Leave",
        ),
        (
            dict(stop_token_ids=[33], min_tokens=5),
            "thinking_budget: min_tokens forbids token id 33, which ends the",
        ),
    ],
)
def test_controls_that_forbid_the_end_of_reasoning_are_refused(controls, message):
    with pytest.raises(RequestError) as error:
        params = SamplingParams(thinking_budget=3, **controls)
        llama_engine(1).add(sequence_of("a", [5], params, reasoning=THINKING[2]))
    assert error.value.code == "invalid_sampling" and str(error.value).startswith(message)


def test_a_marker_that_the_target_lacks_is_refused():
    sequence = sequence_of(
        "a", [5], SamplingParams(thinking_budget=3), reasoning=ReasoningIds((), ((VOCAB,),))
    )
    with pytest.raises(
        RequestError, match="thinking_budget: token id 97 is not in the target's vocabulary of 97"
    ):
        llama_engine(1).add(sequence)


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


def num_operations(engine: Engine, *penalties: float) -> int:
    """Return the tensor operations of one step of three sequences, besides those in flight in the engine."""
    for i, penalty in enumerate(penalties):
        params = SamplingParams(max_tokens=50, ignore_eos=True, presence_penalty=penalty)
        engine.add(Sequence(str(i), [5, 6 + i], params))
    engine.step()
    with CountOperations() as operations:
        engine.step()
    return operations.num


def test_only_a_batch_with_controls_has_operations_for_them():
    """The count of a batch without controls stays what it is when others with controls have come and gone."""
    fresh = num_operations(llama_engine(3), 0, 0, 0)
    used = llama_engine(3)
    run(used, [[5]], [SamplingParams(max_tokens=3, presence_penalty=1.0)])
    assert num_operations(used, 0, 0, 0) == fresh
    assert num_operations(llama_engine(3), 0, 1.0, 0) > fresh


def test_neighbours_with_controls_change_nothing(oracle):
    prompts, params, _ = (some[:27] for some in oracle)
    beside = run(llama_engine(9, 12, 4, 4), prompts, params)
    free = [i for i, p in enumerate(params) if not has_controls(p, word_ids(p))]
    alone = run(llama_engine(9, 12, 4, 4), [prompts[i] for i in free], [params[i] for i in free])
    assert [beside[i].output_ids for i in free] == [s.output_ids for s in alone]


@pytest.mark.parametrize(
    "controls, stops, message",
    [
        (
            dict(logit_bias={VOCAB: 1.0}),
            (),
            "logit_bias: token id 97 is not in the target's vocabulary of 97",
        ),
        (dict(allowed_token_ids=[5, 200]), (), "allowed_token_ids: token id 200 is not in"),
        (
            dict(allowed_token_ids=[EOS, 5], min_tokens=1),
            (5,),
            "min_tokens: allowed_token_ids holds only",
        ),
    ],
)
def test_controls_that_the_target_cannot_take_are_refused(controls, stops, message):
    params = SamplingParams(**controls, stop_token_ids=stops)
    with pytest.raises(RequestError) as error:
        llama_engine(1).add(Sequence("a", [5], params))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("graphs", [False, True])
def test_aborted_and_added_sequences_do_not_mix_their_counts(graphs):
    rng, model = random.Random(0), llama()
    engine = llama_engine(3, 12, 4, 4, graphs=graphs, overlap=graphs)
    prompts, params = some_prompts(20, seed=5), some_controlled(20)
    sequences = [
        sequence_of(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))
    ]
    waiting, done = list(sequences), []
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop())
        done += engine.step()
        if rng.random() < 0.2 and (
            running := [s for s in sequences if s.status.value == "running"]
        ):
            engine.abort(rng.choice(running))
    plain = plain_outputs([s.prompt_ids for s in done], [s.sampling for s in done], model)
    assert_equal(done, plain)
