"""Find the price of an endpoint's tokens: in the configuration, or in the package genai-prices.

    price_of(config.engine)
    # PriceConfig(input=0.15, cached=0.075, output=0.6), dollars for a million tokens

The package contains its prices, so nothing is fetched. The provider is found by `engine.base_url`.
If a price depends on the prompt's length, the highest one is used, so that a limit of dollars
holds.
"""

from __future__ import annotations

from typing import Any

from eagle_ray.config.engine_section import EngineConfig, PriceConfig
from eagle_ray.core.errors import ConfigError

MILLION = 1_000_000


def price_of(engine: EngineConfig) -> PriceConfig | None:
    """Return the price of the endpoint's tokens; None if none is configured.

    Raises ConfigError if it must be looked up and the package or its entry is missing.
    """
    if engine.price != "auto":
        return engine.price
    assert engine.base_url is not None and engine.model is not None, "engine.kind is http"
    prices = [_look_up(engine.model, url) for url in engine.base_url]
    if any(price != prices[0] for price in prices):
        raise ConfigError(
            "engine.price: auto, but the URLs of engine.base_url have different prices. Give the price"
        )
    return prices[0]


def _look_up(model: str, url: str) -> PriceConfig:
    try:
        from genai_prices import Usage, calc_price
    except ImportError:
        raise ConfigError(
            "engine.price: auto needs the package genai-prices, which is not installed: "
            "pip install 'eagle_ray[prices]', or give {input: A, cached: B, output: C}"
        ) from None

    def dollars(**tokens: int) -> float:
        usage = Usage(**tokens)
        return float(calc_price(usage, model, provider_api_url=url).total_price)

    try:
        prompt = dollars(input_tokens=MILLION)
        cached = dollars(input_tokens=MILLION, cache_read_tokens=MILLION)
        output = dollars(input_tokens=MILLION, output_tokens=MILLION) - prompt
    except LookupError:
        raise ConfigError(
            f"engine.price: auto, but genai-prices has no {model!r} at {url}. "
            "Give {input: A, cached: B, output: C} in dollars for a million tokens"
        ) from None
    return PriceConfig(input=prompt, cached=cached, output=round(output, 9))


def version_of_prices() -> str:
    """Return the package's name and version, which dates the prices."""
    from importlib.metadata import version

    return f"genai-prices {version('genai-prices')}"


def describe_price(engine: EngineConfig, price: PriceConfig) -> str:
    """Return a line about a price that was looked up."""
    parts: dict[str, Any] = price.model_dump()
    words = ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)
    return f"{words} dollars for a million tokens of {engine.model}, by {version_of_prices()}"
