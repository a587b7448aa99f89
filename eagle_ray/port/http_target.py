"""Target: where requests are sent, and the key that goes with them.

Target(("https://api.example.com/v1",), "openai", ApiKey("..."))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle_ray.config.engine_section import PriceConfig


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The API key of an endpoint. Its repr shows stars, so that no log has the key."""

    value: str = ""

    def __repr__(self) -> str:
        return "ApiKey(***)"

    @property
    def headers(self) -> dict[str, str]:
        """Return the authorization header of a request, a bearer token; no header without a key."""
        return {"authorization": f"Bearer {self.value}"} if self.value else {}

    def hidden_in(self, text: str) -> str:
        """Return the text with stars in place of the key, for logs and rows."""
        return text.replace(self.value, "***") if self.value else text


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint that requests are sent to.

    Attributes:
        urls: base URLs of its servers, without a slash at their ends.
        dialect: how it spells requests, such as openai (`dialects.py`).
        key: API key that is sent with requests.
        version: version of the endpoint's software, or None.
        price: dollars per token; None if unknown.
        max_model_len: maximum tokens of a prompt and its output together; None if unknown.
    """

    urls: Sequence[str]
    dialect: str
    key: ApiKey = field(default_factory=ApiKey)
    version: str | None = None
    price: PriceConfig | None = None
    max_model_len: int | None = None
