"""What the comparison says of a method is what its engine did, and its rounds are fair."""

import pytest

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.reference import reference_decode
from eagle_ray.evaluation.draft_methods import default_names, parse_methods
from eagle_ray.evaluation.method_comparison import (
    MIN_ROUNDS,
    BenchmarkPrompt,
    Equivalence,
    compare,
    figures,
    rounds,
)
from eagle_ray.evaluation.timing import run_requests
from eagle_ray.report.intervals import difference_interval
from eagle_ray.requests.parameters import SamplingParams
from tests.support.toy_models import head, llama

TREE = SpeculativeConfig(method="eagle2", max_nodes=8, max_depth=3, top_k=4, budget="uniform")


def question(task: str, i: int) -> BenchmarkPrompt:
    return BenchmarkPrompt(
        task,
        lambda: Sequence(f"{task}-{i}", [5 + i, 9, 23 + i], SamplingParams(max_tokens=10, seed=i)),
    )


def equivalence_of(answers, plain):
    return Equivalence(
        len(plain), sum(a.output_ids == b.output_ids for a, b in zip(answers, plain, strict=True))
    )


@pytest.fixture(scope="module")
def turns():
    model, eagle = llama(), head()
    ways = {"plain": SpeculativeConfig(method="none"), "eagle2": TREE}
    questions = [question(task, i) for i, task in enumerate(["a", "b", "a", "a"])]
    found = []
    for temperature in (0.0, 1.0):
        engines = {
            name: build_engine(model, eagle, way, EngineArgs(2, 64)) for name, way in ways.items()
        }
        found += rounds(engines, questions, temperature)
    return found


def test_every_method_answers_each_question_once_per_temperature(turns):
    assert [turn.group for turn in turns] == [*"aab"] * 2
    for i, turn in enumerate(turns):
        asked = [[s.request_id for s in answers] for answers in turn.answers.values()]
        assert asked[0] == asked[1] and len(asked[0]) <= 2
        assert all(s.sampling.temperature == float(i >= 3) for s in turn.answers["eagle2"])
        assert equivalence_of(turn.answers["eagle2"], turn.answers["plain"]).num_equal == len(
            asked[0]
        )
    assert [s.request_id for turn in turns[:3] for s in turn.answers["plain"]] == [
        "a-0",
        "a-2",
        "a-3",
        "b-1",
    ]


def test_no_drafter_remembers_the_answers_of_the_warm_up():
    model = llama()
    ways = {
        "plain": SpeculativeConfig(method="none"),
        "suffix": SpeculativeConfig(method="suffix", budget="uniform"),
    }
    engines = {
        name: build_engine(model, None, way, EngineArgs(1, 64)) for name, way in ways.items()
    }
    [turn] = rounds(engines, [question("a", 0)], 0.0)
    again = question("a", 0).at(0.0)
    run_requests(engines["suffix"], [again])
    assert len(again.output_ids) == len(turn.answers["suffix"][0].output_ids) == 10
    assert (
        turn.answers["suffix"][0].stats.num_steps > again.stats.num_steps
    )  # by now it has seen the answer


def test_no_round_finds_its_prompts_in_the_cache(turns):
    assert all(
        s.num_reused == 0 for turn in turns for answers in turn.answers.values() for s in answers
    )


def test_figures_are_the_engines_counts(turns):
    greedy = turns[:3]
    numbers = figures(greedy, "eagle2", "plain", None, equivalence_of)
    answers = [s for turn in greedy for s in turn.answers["eagle2"]]
    accepted, steps = (
        sum(getattr(s.stats, n) for s in answers)
        for n in ("num_accepted_draft_tokens", "num_steps")
    )
    assert numbers["tau"] == pytest.approx(1 + accepted / steps) and numbers["steps"] == steps
    assert sum(numbers["accepted_by_depth"]) * steps == pytest.approx(accepted)
    assert (
        sum(numbers["verified_by_depth"])
        == pytest.approx(numbers["nodes_per_step"])
        == pytest.approx(8)
    )
    assert numbers["questions"] == numbers["identity"]["num_equal"] == 4
    assert numbers["tokens"] == sum(len(s.output_ids) for s in answers)
    speeds = [t.samples["plain"].seconds / t.samples["eagle2"].seconds for t in greedy]
    assert min(speeds) * 0.99 <= numbers["speed_up"]["mean"] <= max(speeds) * 1.01
    assert numbers["calibration_error"]["drafted"] > 0 and numbers["tau_less"] is None


def test_plain_decoding_is_one_token_a_pass_and_is_itself(turns):
    turns = turns * MIN_ROUNDS
    numbers = figures(turns, "plain", "plain", "eagle2", equivalence_of)
    assert (
        numbers["tau"] == 1
        and numbers["nodes_per_step"] == 0
        and numbers["calibration_error"]["drafted"] is None
    )
    assert numbers["speed_up"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert numbers["tau_less"]["of"] == "eagle2" and numbers["tau_less"]["high"] <= 0


def test_few_rounds_or_questions_have_no_interval(turns):
    few, enough = (
        figures(turns[:1] * n, "eagle2", "plain", "plain", equivalence_of)
        for n in (MIN_ROUNDS - 1, MIN_ROUNDS)
    )
    assert few["speed_up"]["low"] is few["speed_up"]["high"] is None
    assert 0 < enough["speed_up"]["low"] <= enough["speed_up"]["high"] < float("inf")
    one_round = figures(turns[:1], "eagle2", "plain", "plain", equivalence_of)["tau_less"]
    assert one_round["low"] is one_round["high"] is None


def test_sampled_difference_is_near_tie_only_if_it_is_reachable():
    model, params = llama(), SamplingParams(temperature=0.9, seed=3, max_tokens=6)
    model.set_attn_implementation("sdpa")
    plain = reference_decode(model, [5, 9], params, frozenset())
    other = [*plain.ids[:2], (plain.ids[2] + 1) % 97]
    assert plain.reachable[2] == {plain.ids[2]}
    assert compare(model, [[5, 9]], [other], [plain.ids], [params]) == Equivalence(1, 0, 0)
    assert compare(model, [[5, 9]], [plain.ids], [plain.ids], [params]) == Equivalence(1, 1, 0)


def test_a_difference_of_pooled_means_and_its_interval():
    pairs = [((3 * i, i), (i, i)) for i in range(1, 30)]
    difference = difference_interval(pairs)
    assert difference.mean == difference.low == difference.high == 2
    noisy = difference_interval([((i % 5, 1), (2, 1)) for i in range(50)])
    assert noisy.low < noisy.mean < noisy.high and abs(noisy.mean) < 1e-9


def test_ways_by_name():
    model, tree = ModelConfig(), SpeculativeConfig(method="eagle2")
    names = default_names(tree)
    ways = {way.name: way for way in parse_methods(names, model, tree)}
    assert next(iter(ways)) == "plain" and len(ways) == 1 + len(names)
    assert ways["plain"].drafts == () and ways["eagle2"].drafts == ("embedded:tiny",)
    published = ways["eagle2"].speculative
    assert (published.budget, published.ranking, published.max_nodes) == (
        "uniform",
        "published",
        60,
    )
    assert ways["ours"].speculative == tree
    assert parse_methods(["eagle2=/elsewhere"], model, tree)[1].drafts == ("/elsewhere",)
    merged = parse_methods(["eagle2+draft_model=/a+/b", "none", "auto"], model, tree)
    assert [way.name for way in merged] == ["plain", "eagle2+draft_model=/a+/b", "auto"]
    assert merged[1].model(model).draft == ["/a", "/b"]
    assert merged[2].speculative.budget == tree.budget and merged[2].drafts == ("embedded:tiny",)
    assert parse_methods(["eagle2:7"], model, tree)[1].speculative.max_nodes == 7
    held = {
        name: ways[name].reference
        for name in ("eagle1", "eagle2-without-value", "eagle2-without-reranking")
    }
    assert (
        list(held.values()) == ["eagle2:25", "eagle2", "eagle2:50"]
        and set(held.values()) <= ways.keys()
    )
    assert "eagle2" not in default_names(SpeculativeConfig(method="none"))


@pytest.mark.parametrize(
    "name, says",
    [
        ("eagel2", "did you mean eagle2"),
        ("suffix+suffix", "different ways"),
        ("eagle2:x", "number of nodes"),
    ],
)
def test_a_name_that_is_no_method_is_refused(name, says):
    with pytest.raises(ConfigError, match=rf"--methods: .*{says}"):
        parse_methods([name], ModelConfig(), SpeculativeConfig())


def test_a_method_without_its_draft_says_what_to_give():
    with pytest.raises(
        ConfigError, match=r"eagle2 needs an EAGLE head: set model\.draft, or give eagle2=DIRECTORY"
    ):
        parse_methods(["eagle2"], ModelConfig(target="org/name"), SpeculativeConfig(method="none"))
