"""With a grammar, outputs under trees are those of plain decoding with the same grammar, token for token."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jsonschema
import pytest

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import SpeculativeConfig
from eagle_ray.core import grammar_state, parser_budget
from eagle_ray.core.errors import RequestError
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.core.reasoning_budget import ReasoningIds
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine import controlled_sequences
from eagle_ray.engine import engine as engine_module
from eagle_ray.engine.reference import reference_decode
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.grammar import GrammarCompiler
from jobs.bench.simulated_costs import SimulatedPlanner, flat
from tests.support.engines import (
    SAMPLING,
    SOME_TREES,
    assert_equal,
    mostly_slow,
    some_prompts,
    weights_for,
)
from tests.support.schemas import LimitedMatcher
from tests.support.tokenizers import toy_tokenizer
from tests.support.toy_models import head3, llama, llama_engine, run, sequence_of, word_ids

EOS, VOCAB = 2, 97
TEXT = toy_tokenizer()
SHORT = {"type": "string", "maxLength": 4}
ITEM = {
    "type": "object",
    "properties": {
        "name": SHORT,
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["ab", "na"]}, "maxItems": 2},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {"item": {"$ref": "#/$defs/item"}, "ok": {"type": "boolean"}},
    "required": ["item", "ok"],
    "additionalProperties": False,
    "$defs": {"item": ITEM},
}
CHOICE = {"choice": ["name", "na12", "ab{"]}
FORMS = [
    {"json_schema": ITEM},
    CHOICE,
    {"json_schema": NESTED},
    {"regex": r"[a-n]{3}(12)+x?"},
    {"grammar": 'start: pair ("," pair)*\npair: /[a-d]{1,3}/ ":" NUMBER\nNUMBER: /[1-9][0-9]?/'},
    {"json_object": True},
    {"regex": "[a-c]{4}"},  # after a token
    {},
]
AFTER = 17


def compiler() -> GrammarCompiler:
    return GrammarCompiler(TEXT.to_str, VOCAB, [EOS])


def engine_with_grammars(*sizes: int, **options: object):
    engine = llama_engine(*sizes, **options)
    engine.grammars = compiler()
    return engine


def some_structured(count: int, max_tokens: int = 32) -> list[SamplingParams]:
    """Every kind of grammar, greedy and sampled in turn, some with controls, and every eighth sequence without any."""
    params = []
    for i in range(count):
        form = FORMS[i % len(FORMS)]
        controls = {"frequency_penalty": 0.5, "bad_words": ["8"]} if i % 5 == 4 else {}
        own = SAMPLING[i // 3 % len(SAMPLING)]
        params.append(SamplingParams(max_tokens=max_tokens, seed=i, **form, **controls, **own))
    return params


def specs_of(params: list[SamplingParams], late: str = "[a-c]{4}") -> list[GrammarSpec | None]:
    """What the outputs must be; the regular expression `late` begins after a token."""
    specs = [GrammarSpec.of(p) for p in params]
    return [replace(spec, after=AFTER) if spec and spec.source == late else spec for spec in specs]


def plain_outputs(
    prompts: list[list[int]], params: list[SamplingParams], late: str = "[a-c]{4}"
) -> list:
    model, grammars = llama(), compiler()
    model.set_attn_implementation("sdpa")
    eos = frozenset([EOS])
    return [
        reference_decode(model, ids, p, eos, grammars, word_ids(p), spec)
        for ids, p, spec in zip(prompts, params, specs_of(params, late), strict=True)
    ]


@pytest.fixture(scope="module")
def oracle():
    prompts, params = some_prompts(32, seed=3), some_structured(32)
    return prompts, params, plain_outputs(prompts, params)


FAST = [(1, "plain"), (1, "12 nodes"), (10, "chain"), (10, "60 nodes")]


@pytest.mark.parametrize(("num_slots", "tree"), mostly_slow(FAST, (1, 10), SOME_TREES))
def test_every_tree_and_batch_equals_plain_decoding(oracle, tree, num_slots):
    prompts, params, plain = (some[: 8 * num_slots] for some in oracle)
    sequences = run(
        engine_with_grammars(num_slots, *SOME_TREES[tree]), prompts, params, specs_of(params)
    )
    assert_equal(sequences, plain)
    if tree == "60 nodes":
        assert sum(s.stats.num_accepted_draft_tokens for s in sequences if s.grammar) > 0


@pytest.mark.parametrize(
    ("overlap", "tree"),
    mostly_slow([(False, "plain"), (True, "12 nodes")], (False, True), ("plain", "12 nodes")),
)
def test_replayed_steps_equal_plain_decoding(oracle, tree, overlap, monkeypatch):
    monkeypatch.setattr(parser_budget, "TOKEN_S", 60.0)  # a slow machine has no slow grammar here
    prompts, params, plain = oracle
    engine = engine_with_grammars(6, *SOME_TREES[tree], graphs=True, overlap=overlap)
    assert_equal(run(engine, prompts, params, specs_of(params)), plain)
    assert engine.graphs.num_replayed > 0
    assert engine.counters.num_ahead >= overlap * (engine.counters.num_steps - 2)


@pytest.mark.parametrize("tree", SOME_TREES)
def test_the_forced_end_of_a_reasoning_begins_the_grammar(tree):
    """It would hardly come by itself: the target never saw the token."""
    prompts, reasoning = some_prompts(12, seed=4), ReasoningIds((), ((AFTER,),))
    params = [
        SamplingParams(
            max_tokens=20,
            seed=i,
            regex="[a-c]{4}",
            thinking_budget=i % 5,
            **SAMPLING[i % len(SAMPLING)],
        )
        for i in range(12)
    ]
    specs, model, grammars = specs_of(params), llama(), compiler()
    plain = [
        reference_decode(model, ids, p, frozenset([EOS]), grammars, spec=spec, reasoning=reasoning)
        for ids, p, spec in zip(prompts, params, specs, strict=True)
    ]
    sequences = run(
        engine_with_grammars(5, *SOME_TREES[tree]), prompts, params, specs, [reasoning] * 12
    )
    assert_equal(sequences, plain)
    for s in sequences:
        num_thought = s.output_ids.index(AFTER)
        assert num_thought <= s.sampling.thinking_budget and s.finish_reason == "stop"
        assert re.fullmatch("[a-c]{4}", TEXT.decode(s.output_ids[num_thought + 1 : -1]))


def test_outputs_are_what_their_grammars_say(oracle):
    prompts, params, _ = oracle
    num_complete = 0
    for s in run(engine_with_grammars(16, 60, 6, 10), prompts, params, specs_of(params)):
        if s.grammar_spec is None:
            continue
        assert s.grammar.is_complete or s.finish_reason == "length"
        if s.finish_reason == "stop" and s.grammar_spec.after is None:
            num_complete += 1
            check(s.grammar_spec, TEXT.decode(s.output_ids[:-1]))
    assert num_complete > 12  # of 24


def check(spec: GrammarSpec, text: str) -> None:
    if spec.kind == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(spec.source))
    elif spec.kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif spec.kind == "choice":
        assert text in json.loads(spec.source)
    elif spec.kind == "regex":
        assert re.fullmatch(spec.source, text)
    else:
        assert re.fullmatch(r"[a-d]{1,3}:[1-9][0-9]?(,[a-d]{1,3}:[1-9][0-9]?)*", text)


def test_a_grammar_after_a_token_leaves_what_comes_before_free():
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=i, choice=["abna"]) for i in range(24)
    ]
    prompts, late = some_prompts(24, seed=8), '["abna"]'
    sequences = run(engine_with_grammars(8, 12, 4, 4), prompts, params, specs_of(params, late))
    assert_equal(sequences, plain_outputs(prompts, params, late))
    begun = [s for s in sequences if AFTER in s.output_ids]
    assert len(begun) > 3
    assert all(s.output_ids.count(EOS) == (s.finish_reason == "stop") for s in sequences)
    for s in begun:
        rest = s.output_ids[s.output_ids.index(AFTER) + 1 :]
        assert "abna".startswith(TEXT.decode(rest))
        assert s.grammar.is_complete == (TEXT.decode(rest) == "abna")


def test_preempted_sequences_keep_their_place():
    prompts = [(ids * 25)[: 20 + i] for i, ids in enumerate(some_prompts(9))]
    pattern = "([a-d]12){15,16}"
    params = [
        SamplingParams(max_tokens=50, temperature=0.9, seed=i, regex=pattern) for i in range(9)
    ]
    engine = engine_with_grammars(4, 8, 3, 4, kv_tokens=160)
    assert_equal(run(engine, prompts, params), plain_outputs(prompts, params))
    assert engine.counters.num_preemptions > 0


@pytest.mark.parametrize("tree", SOME_TREES)
def test_controls_that_leave_no_token_fail_that_sequence_alone(tree):
    conflict = SamplingParams(max_tokens=20, choice=["na12"], min_tokens=12)
    params = [conflict, replace(conflict, min_tokens=0), SamplingParams(max_tokens=20)]
    sequences = run(engine_with_grammars(3, *SOME_TREES[tree]), [[5, 6], [5, 6], [7]], params)
    assert [s.error and s.error.code for s in sequences] == ["grammar_conflict", None, None]
    assert sequences[0].finish_reason is None and sequences[1].finish_reason == "stop"
    assert TEXT.decode(sequences[1].output_ids) == "na12"


PATTERNS = [
    "ab[0-9]x",
    "(ab?12)+x",
    "[a-f]{3,5}",
    "name?(12|ab)*",
    "[a-c0-9]{1,6}[xyz]",
    "(na){2}|abc",
]
DRAFTED_BY = [
    "suffix",
    "ngram",
    "eagle2",
    "eagle2 uniform",
    "eagle2+suffix",
    "medusa",
    "dflash",
    "auto",
]


def stop_check_of(stops: list[str]) -> Callable[[list[int]], int | None]:
    """Return a check that decodes every prefix of the output."""
    return lambda ids: next(
        (n for n in range(1, len(ids) + 1) if any(s in TEXT.decode(ids[:n]) for s in stops)), None
    )


def some_conflicting(count: int, seed: int) -> list[tuple[SamplingParams, list[str]]]:
    """Grammars with controls that often leave no token, and with every way to end before that; with stop strings."""
    rng = random.Random(seed)
    cases = []
    for i in range(count):
        pattern = rng.choice(PATTERNS)
        used = [t for t in range(3, VOCAB) if re.fullmatch("[a-fmnex-z0-9]+", TEXT.decode([t]))]
        allowed = [
            *rng.sample(used, rng.randint(len(used) // 2, len(used))),
            *([EOS] if rng.random() < 0.5 else []),
        ]
        params = SamplingParams(
            allowed_token_ids=rng.choice([None, allowed, allowed]),
            bad_words=[
                " ".join([str(token)] * rng.randint(1, 2))
                for token in rng.sample(used, rng.choice([0, 0, 2]))
            ],
            min_tokens=rng.choice([0, 0, 0, 1, 3]),
            temperature=i % 2,
            seed=i,
            max_tokens=rng.choice([3, 4, 5, 12]),
            logprobs=True,
            top_logprobs=2,
            stop_token_ids=rng.sample(used, rng.choice([0, 0, 3])),
            regex=pattern,
        )
        cases.append((params, rng.sample(["b", "b1", "1", "c", "a", "x"], rng.choice([0, 1, 2]))))
    return cases


def outcome_of(sequence: Sequence) -> tuple:
    """Return everything about a finished sequence that no draft may change."""
    places = len(sequence.output_ids), len(sequence.output_logprobs), len(sequence.output_tops)
    if sequence.error is not None:
        return sequence.output_ids, sequence.finish_reason, sequence.error.code, places
    return sequence.output_ids, sequence.finish_reason, None, places, sequence.grammar.is_complete


def outcomes(
    method: str, cases: list[tuple[SamplingParams, list[str]]], num_layers: int
) -> list[tuple]:
    name, _, budget = method.partition(" ")
    weights = None
    if name == "eagle3":
        weights = head3()
    elif name not in ("none", "suffix", "ngram"):
        weights = weights_for(name)
    speculative = SpeculativeConfig(
        method=name, budget=budget or "global", max_nodes=12, max_depth=4, top_k=4
    )
    engine = build_engine(
        llama(num_hidden_layers=num_layers), weights, speculative, EngineArgs(4, 128)
    )
    engine.grammars = compiler()
    sequences, heard = [], {}
    for i, ((params, stops), ids) in enumerate(
        zip(cases, some_prompts(len(cases), seed=2), strict=True)
    ):
        sequence = sequence_of(str(i), ids, params)
        sequence.stop_check = stop_check_of(stops) if stops else None
        sequence.listener = lambda s=sequence: heard.update({s: list(s.output_ids)})
        engine.add(sequence)
        sequences.append(sequence)
    while engine.has_work:
        engine.step()
    assert all(heard.get(s, []) == s.output_ids for s in sequences)
    assert engine.counters.num_output_tokens == sum(len(s.output_ids) for s in sequences)
    for s in sequences:
        made = (
            1 + s.stats.num_steps + s.stats.num_accepted_draft_tokens - s.stats.num_discarded_tokens
        )
        assert len(s.output_ids) == made
    return [outcome_of(s) for s in sequences]


@cache
def plain_outcomes(count: int, seed: int, num_layers: int) -> list[tuple]:
    return outcomes("none", some_conflicting(count, seed), num_layers)


def check_conflicting(method: str, count: int, seed: int) -> None:
    num_layers = 7 if method == "eagle3" else 2  # its head reads three of them
    plain = plain_outcomes(count, seed, num_layers)
    drafted = outcomes(method, some_conflicting(count, seed), num_layers)
    assert {i: (a, b) for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b} == {}
    assert {(reason, error) for _, reason, error, *_ in plain} == {
        ("stop", None),
        ("length", None),
        (None, "grammar_conflict"),
    }


MERGED = ["ngram", "eagle2+suffix"]  # of whose sources auto merges all


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.slow] * (m in MERGED)) for m in DRAFTED_BY]
)
def test_an_output_that_ends_before_its_dead_end_is_no_error(method):
    check_conflicting(method, 32, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [*DRAFTED_BY, "eagle3", "hydra", "draft_model", "eagle1", "sequoia"]
)
def test_outputs_that_end_before_their_dead_ends_are_no_errors(method):
    check_conflicting(method, 1000, seed=1)


@pytest.mark.parametrize("tree", SOME_TREES)
def test_parser_limit_fails_only_an_output_that_reaches_it(tree, monkeypatch):
    """The parser is made to fail after every "b": outputs without one are as they were."""

    class FailingMatcher(LimitedMatcher):
        def try_consume_tokens(self, tokens):
            if self.failed:
                return 0
            self.failed = TEXT.token_to_id("b") in tokens
            return self.real.try_consume_tokens(tokens)

    params = [
        SamplingParams(max_tokens=20, temperature=1.0, seed=i, regex="[a-f]{8}") for i in range(16)
    ]
    prompts = some_prompts(16, seed=4)
    plain = plain_outputs(prompts, params)
    engine = engine_with_grammars(5, *SOME_TREES[tree])
    compiled = engine.grammars.compile_matcher
    monkeypatch.setattr(
        engine.grammars, "compile_matcher", lambda spec: FailingMatcher(compiled(spec))
    )
    sequences = run(engine, prompts, params)
    fails = [TEXT.token_to_id("b") in p.ids for p in plain]
    assert 0 < sum(fails) < 16
    assert [s.error is not None for s in sequences] == fails
    assert {s.error.code for s in sequences if s.error} == {"grammar_limit"}
    assert all(
        s.output_ids == p.ids
        for s, p, fail in zip(sequences, plain, fails, strict=True)
        if not fail
    )


def test_forced_tokens_are_drafted_without_a_trained_head(monkeypatch):
    """The toy's head is random: nearly all that it gains comes from the grammar, and it changes no token."""
    params = [SamplingParams(max_tokens=40, choice=["abna12name:abna12name:xyz"])]
    fitted = run(engine_with_grammars(1, 12, 4, 4), [[5, 6]], params)[0]
    monkeypatch.setattr(engine_module.GrammarChains, "of", lambda batch, most_tokens: None)
    unfitted = run(engine_with_grammars(1, 12, 4, 4), [[5, 6]], params)[0]
    assert (
        fitted.output_ids == unfitted.output_ids
        and TEXT.decode(fitted.output_ids) == "abna12name:abna12name:xyz"
    )
    assert fitted.stats.num_steps < 0.7 * unfitted.stats.num_steps


def test_tokens_of_earlier_outputs_are_drafted_in_open_grammars():
    """White space and the order of fields are guessed from the first output, and a chain is a step without the head."""
    params = [SamplingParams(max_tokens=40, regex="(ab?12x?){6}")] * 4
    prompts = [[5, 6]] * 4
    sequences = run(engine_with_grammars(1, 12, 4, 4), prompts, params)
    assert_equal(sequences, plain_outputs(prompts, params))
    first, *others = (s.stats.num_steps for s in sequences)
    assert max(others) < first
    assert max(s.draft_forwards for s in sequences[1:]) < sequences[0].draft_forwards


@pytest.mark.parametrize("num_slots", [1, 5])
def test_grammars_draft_in_steps_that_are_planned_without_drafts(oracle, num_slots):
    """The head costs as much as the target, so the planner turns drafts off; what grammars predict costs only rows."""
    prompts, params, plain = (some[:24] for some in oracle)
    dear = flat(head_share=1.0)
    engine = engine_with_grammars(num_slots, 12, 4, 4)
    engine.planner = SimulatedPlanner(BudgetPlanner(TreeBounds(12, 4, 4), dear), dear)
    assert_equal(run(engine, prompts, params, specs_of(params)), plain)
    chains = [o for o in engine.planner.outcomes if not o.plan.is_drafting and o.num_accepted]
    assert len(chains) > 10 and all(o.depth == 0 for o in chains)
    assert all(o.num_rows > o.batch_size for o in chains)


def test_grammar_that_cannot_compile_is_refused_before_a_slot():
    engine = engine_with_grammars(1)
    with pytest.raises(RequestError, match=r"^regex: "):
        engine.add(Sequence("a", [5], SamplingParams(regex="(")))
    with pytest.raises(RequestError, match=r"^choice: the target has no tokenizer"):
        llama_engine(1).add(Sequence("a", [5], SamplingParams(**CHOICE)))
    with pytest.raises(RequestError, match="ignore_eos must be false with choice"):
        Sequence("a", [5], SamplingParams(**CHOICE, ignore_eos=True))
    assert not engine.has_work


def test_a_step_without_grammars_calls_nothing_of_them(monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError("a step without grammars does work for them")

    monkeypatch.setattr(grammar_state.GrammarState, "path_masks", fail)
    monkeypatch.setattr(grammar_state.GrammarState, "sync", fail)
    monkeypatch.setattr(controlled_sequences, "DeviceToHost", fail)
    run(engine_with_grammars(3, 12, 4, 4), [[5], [6]], [SamplingParams(max_tokens=8)] * 2)
