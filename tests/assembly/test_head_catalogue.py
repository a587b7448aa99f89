"""The catalogue of published heads: its file, which heads a target gets by name, card or shapes, and their order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_ray.assembly.head_catalogue import (
    METHOD_ORDER,
    SHAPE_KEYS,
    CatalogueHead,
    CatalogueTarget,
    Match,
    Relation,
    TargetFacts,
    catalogue,
    in_order,
    matches,
    of_family,
)
from eagle_ray.assembly.target_facts import facts_in
from eagle_ray.config import load_config
from eagle_ray.families import FAMILIES, WRAPPERS
from eagle_ray.methods.method import METHODS

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*-*.yaml"))
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}


def test_every_entry_is_whole():
    for target in catalogue():
        assert target.heads and target.family, target.id
        assert set(target.shape) == set(SHAPE_KEYS) or target.refused, target.id
        for head in target.heads:
            assert head.method in METHODS and head.method in METHOD_ORDER, head.id
            assert head.tau is None or (1 < head.tau < 16 and head.source), head.id
    ids = [head.id for target in catalogue() for head in target.heads]
    assert len(ids) == len(set(ids))
    families = [target.family.lower() for target in catalogue()]
    assert len(families) == len(set(families))


def test_no_target_that_runs_is_refused():
    texts = {name for wrapper in WRAPPERS.values() for name in wrapper.text_families}
    known = FAMILIES.keys() | WRAPPERS.keys() | texts
    shaped = [target for target in catalogue() if target.shape]
    assert [target.id for target in shaped if target.refused] == []
    assert {str(target.shape["model_type"]) for target in shaped} <= known
    ids = {target.id for target in shaped}
    assert ids >= {"Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_published_configuration_is_in_it(path):
    model = load_config(path, env={}).model
    [found] = [match for match in matches(TargetFacts.named(model.target))]
    assert found.relation is Relation.SAME
    assert model.draft in [head.id for head in found.target.heads]


@pytest.mark.parametrize(
    "name, target, relation",
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", Relation.SAME),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B", Relation.SAME),
        ("Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B", Relation.SAME),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", Relation.SAME),
        ("Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", Relation.SAME),
        ("org/Hermes-3-Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", Relation.NAME),
        ("unsloth/Qwen3-8B-GGUF", "Qwen/Qwen3-8B", Relation.COPY),
        ("org/Qwen3-4B-unsloth-bnb-4bit", "Qwen/Qwen3-4B", Relation.COPY),
        ("org/llama-3.3-70b-instruct-awq", "meta-llama/Llama-3.3-70B-Instruct", Relation.COPY),
        (
            "org/Llama-3.1-8B-Instruct-quantized.w4a16",
            "meta-llama/Llama-3.1-8B-Instruct",
            Relation.COPY,
        ),
        ("org/vicuna-7B-v1.5-GPTQ", "lmsys/vicuna-7b-v1.3", Relation.NAME),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B", Relation.NAME),
        ("unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-20b", Relation.SAME),
        ("embedded:smollm2", "embedded:smollm2", Relation.SAME),
    ],
)
def test_a_name_finds_its_target(name, target, relation):
    [match] = matches(TargetFacts.named(name))
    assert (match.target.id, match.relation) == (target, relation)


@pytest.mark.parametrize(
    "name", ["org/model", "Qwen/Qwen3-80B", "Qwen3", "Llama", "", "x/Qwen3-8Bx"]
)
def test_what_is_no_name_finds_nothing(name):
    assert matches(TargetFacts.named(name)) == []


def write_target(path: Path, card: str = "", **config: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(LLAMA_8B | config))
    if card:
        (path / "README.md").write_text(f"---\n{card}\n---\n# A model\n")
    return path


@pytest.mark.parametrize(
    "card, relation",
    [
        ("base_model: meta-llama/Llama-3.1-8B-Instruct", Relation.FINE_TUNE),
        ("base_model:\n- meta-llama/Llama-3.1-8B", Relation.FINE_TUNE),
        (
            "base_model: [meta-llama/Llama-3.1-8B-Instruct]\nbase_model_relation: quantized",
            Relation.COPY,
        ),
    ],
)
def test_a_card_says_what_a_fine_tune_was_made_from(tmp_path, card, relation):
    facts = facts_in("m", write_target(tmp_path / "m", card))
    [match] = matches(facts)
    assert (match.target.id, match.relation) == ("meta-llama/Llama-3.1-8B-Instruct", relation)
    expected = "its heads fit" if relation is Relation.COPY else "acceptance will be lower"
    assert expected in match.note


def test_a_config_says_where_it_was_loaded_from(tmp_path):
    saved = write_target(tmp_path / "m", _name_or_path="meta-llama/Llama-3.1-8B-Instruct")
    [match] = matches(facts_in("m", saved))
    assert match.relation is Relation.SAVED and "if it was trained since" in match.note


def test_without_a_card_the_shapes_decide_and_a_name_among_them(tmp_path):
    found = matches(facts_in("m", write_target(tmp_path / "m")))
    assert {match.target.family for match in found} >= {"Llama-3-8B", "Llama-3.1-8B"}
    assert {match.relation for match in found} == {Relation.SHAPE}
    named = facts_in("m", write_target(tmp_path / "my-llama-3.1-8b-chat"))
    [match] = matches(named)
    assert (match.target.family, match.relation) == ("Llama-3.1-8B", Relation.SHAPE_AND_NAME)


def test_a_card_does_not_help_where_the_shapes_are_others(tmp_path):
    card = "base_model: meta-llama/Llama-3.1-8B-Instruct"
    pruned = write_target(tmp_path / "m", card, num_hidden_layers=16)
    assert matches(facts_in("m", pruned)) == []


def write_gemma(path: Path, **text: object) -> Path:
    """Write a config of Gemma 3 27B, whose text_config says no vocab_size."""
    shape = {"model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62}
    path.mkdir()
    config = {"model_type": "gemma3", "text_config": shape | text}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_key_that_a_config_lacks_makes_no_difference(tmp_path):
    [match] = matches(facts_in("m", write_gemma(tmp_path / "gemma")))
    assert (match.target.id, match.relation) == ("google/gemma-3-27b-it", Relation.SHAPE)
    named = facts_in("google/gemma-3-27b-it", write_gemma(tmp_path / "gemma-3-27b-it"))
    assert [match.relation for match in matches(named)] == [Relation.SAME]
    assert matches(facts_in("m", write_gemma(tmp_path / "other", vocab_size=9))) == []


def test_a_config_without_sizes_has_no_shape(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert matches(facts_in("m", tmp_path)) == []


@pytest.mark.parametrize(
    "card", ["base_model: {a: b}", "- a\n- b", "base_model: [1, 2]", "a: [", ""]
)
def test_a_card_without_a_name_says_nothing(tmp_path, card):
    assert facts_in("m", write_target(tmp_path / "m", card)).base_models == ()


def test_the_hub_cache_names_its_repository(tmp_path):
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "0123"
    [match] = matches(facts_in(str(snapshot), write_target(snapshot)))
    assert (match.target.id, match.relation) == ("Qwen/Qwen3-8B", Relation.SAME)


def test_families_are_found_by_their_names():
    assert [target.id for target in of_family("llama 3.1 8b")] == [
        "meta-llama/Llama-3.1-8B-Instruct"
    ]
    assert [target.id for target in of_family("Qwen3-4B")] == ["Qwen/Qwen3-4B"]
    assert len(of_family("qwen3")) > 5 and of_family("nothing") == []
    for spelling in ("gemma3", "Gemma 3", "gemma-3"):
        assert [target.id for target in of_family(spelling)] == ["google/gemma-3-27b-it"]
    assert of_family("gpt_oss") == of_family("gpt-oss") != []
    assert of_family("日本") == of_family("-") == of_family("") == []


def test_the_order_is_what_loads_the_relation_tau_and_the_method():
    heads = (
        CatalogueHead("a/medusa", "medusa", "Medusa"),
        CatalogueHead("a/eagle2", "eagle2", "EAGLE"),
        CatalogueHead("a/dflash", "dflash", "z-lab"),
        CatalogueHead("a/eagle3", "eagle3", "EAGLE-3"),
        CatalogueHead("a/known", "eagle2", "EAGLE", tau=2.0),
        CatalogueHead("a/better", "dflash", "z-lab", tau=3.0),
        CatalogueHead("a/refused", "eagle3", "EAGLE-3", tau=9.0, refused="a layout"),
    )
    own = Match(CatalogueTarget("a/t", "t", heads), Relation.SAME)
    other = CatalogueHead("b/best", "eagle3", "EAGLE-3", tau=8.0)
    relative = Match(CatalogueTarget("b/t", "u", (other,)), Relation.FINE_TUNE)
    order = [candidate.head.id for candidate in in_order([relative, own])]
    own_order = ["better", "known", "eagle3", "dflash", "eagle2", "medusa"]
    assert order == [*(f"a/{name}" for name in own_order), "b/best", "a/refused"]


def test_a_target_that_does_not_run_refuses_its_heads():
    target = CatalogueTarget("a/t", "t", (CatalogueHead("a/h", "eagle3", "E"),), refused="images")
    [candidate] = in_order([Match(target, Relation.SAME)])
    assert candidate.refused == "target: images"
