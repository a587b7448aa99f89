"""Prices of endpoints: given, looked up, or refused by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from eagle_ray.config import load_config
from eagle_ray.config.engine_section import EngineConfig, PriceConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.port.prices import describe_price, price_of

OPENAI = "https://api.openai.com/v1"


def engine_of(**engine: Any) -> EngineConfig:
    usual = {"kind": "http", "base_url": OPENAI, "model": "gpt-4o-mini", "price": "auto"}
    overrides = {f"engine.{name}": value for name, value in (usual | engine).items()}
    overrides |= {"input.path": "in.jsonl", "output.path": "out"}
    return load_config(None, env={}, overrides=overrides).engine


def test_a_price_that_is_given_counts() -> None:
    price = {"input": 1.0, "cached": None, "output": 2.0}
    assert price_of(engine_of(price=price)) == PriceConfig(**price)
    assert price_of(engine_of(price=None)) is None


def test_auto_is_what_the_package_knows_of_model_and_url() -> None:
    genai_prices = pytest.importorskip("genai_prices")
    engine = engine_of()
    price = price_of(engine)
    assert price is not None and price.cached is not None
    usage = genai_prices.Usage(input_tokens=1000, cache_read_tokens=400, output_tokens=50)
    known = genai_prices.calc_price(usage, "gpt-4o-mini", provider_api_url=OPENAI).total_price
    dollars = (600 * price.input + 400 * price.cached + 50 * price.output) / 1e6
    assert dollars == pytest.approx(float(known))
    assert "dollars for a million tokens of gpt-4o-mini, by genai-prices " in describe_price(
        engine, price
    )


def test_the_highest_of_prices_by_length_counts() -> None:
    genai_prices = pytest.importorskip("genai_prices")
    url = "https://generativelanguage.googleapis.com/v1beta/openai"
    price = price_of(engine_of(base_url=url, model="gemini-2.5-pro"))
    assert price is not None
    for tokens in (1000, 150_000, 300_000):
        usage = genai_prices.Usage(input_tokens=tokens, output_tokens=100)
        known = genai_prices.calc_price(usage, "gemini-2.5-pro", provider_api_url=url).total_price
        assert (tokens * price.input + 100 * price.output) / 1e6 >= float(known) * 0.999999


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"model": "nope"}, "has no 'nope' at https://api.openai.com/v1"),
        ({"base_url": "http://127.0.0.1:8000/v1"}, "has no 'gpt-4o-mini' at http://127.0.0.1:8000"),
        ({"base_url": [OPENAI, "https://api.groq.com/openai/v1"]}, "engine.price: auto, but"),
    ],
)
def test_a_price_that_is_not_known_is_refused(engine: dict[str, Any], words: str) -> None:
    pytest.importorskip("genai_prices")
    with pytest.raises(ConfigError, match=r"engine\.price: auto") as caught:
        price_of(engine_of(max_dollars=1.0, **engine))
    assert words in str(caught.value)


def test_without_the_package_auto_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    with pytest.raises(ConfigError, match=r"pip install 'eagle_ray\[prices\]'"):
        price_of(engine_of())
