"""The records of eagle_ray/families.py agree with transformers and with everything that is made of them."""

import inspect
from importlib import import_module

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from eagle_ray.families import BY_CLASS, FAMILIES, Family
from eagle_ray.gguf.architectures import OF_MODEL_TYPE
from eagle_ray.models import decoder
from eagle_ray.models.experts import MIXTURE_OF_BLOCK
from eagle_ray.models.packed_linear import MERGED
from eagle_ray.parallel.shard import MIXTURES, MODEL_TYPES
from tests.support.families import COVERED

OWN = {name: family for name, family in FAMILIES.items() if family.layer is not None}


def modeling_names(family: Family) -> set[str]:
    """Return the names of the classes beside transformers' class of the family's causal LM."""
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family.model_type]]
    module = import_module(causal_lm.__module__)
    return {name for name, _ in inspect.getmembers(module, inspect.isclass)}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_record_names_the_class_that_transformers_has(name):
    assert FAMILIES[name].model_type == name
    assert FAMILIES[name].causal_lm == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]


def test_classes_are_of_one_family_each():
    assert len(BY_CLASS) == len(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_is_left_out_of_has_a_reason(name):
    """No list of families is longer than another by an oversight: each is made of a record, which says why not."""
    family = FAMILIES[name]
    assert bool(family.why_transformers) == (family.layer is None)
    assert bool(family.why_whole) == (family.layer is not None and not family.is_divided)
    assert bool(family.why_dense) or family.is_dense or family.layer is None
    assert family.layer is not None or (family.mixture is None and not family.why_whole)


@pytest.mark.parametrize("name", OWN)
def test_a_family_of_our_own_forward_is_everywhere(name):
    family = OWN[name]
    classes = modeling_names(family)
    modules = {f"{family.prefix}{part}" for part in ("Attention", "MLP")}
    assert modules & classes <= MERGED.keys() and f"{family.prefix}Attention" in classes
    assert (name in MODEL_TYPES) == (not family.why_whole)
    has_window = f"{family.prefix}Attention" in decoder.CONFIG_WINDOWS
    assert has_window == family.layer.has_config_window
    if family.mixture is not None:
        assert family.mixture.block in classes
        assert MIXTURE_OF_BLOCK[family.mixture.block] == family.mixture
        assert (name in MIXTURES) == family.is_divided
    assert name in {config.model_type for config in COVERED.values()}


def test_nothing_is_made_of_other_families():
    assert set(MODEL_TYPES) <= OWN.keys() and set(MIXTURES) <= set(MODEL_TYPES)
    assert MIXTURE_OF_BLOCK.keys() == {
        family.mixture.block for family in OWN.values() if family.mixture
    }
    prefixes = {family.prefix for family in OWN.values()} | {"Head"}  # of draft heads
    assert {name.removesuffix("Attention").removesuffix("MLP") for name in MERGED} == prefixes


def test_gguf_files_are_read_of_supported_families():
    assert OF_MODEL_TYPE.keys() <= FAMILIES.keys()
