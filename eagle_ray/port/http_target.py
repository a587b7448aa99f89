"""Target: where requests are sent, and the key that goes with them.

Target(("https://api.example.com/v1",), "openai", ApiKey("..."))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle_ray.config.engine_section import PriceConfig


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that no text shows: its repr has stars."""

    value: str = ""

    def __repr__(self) -> str:
        return "ApiKey(***)"

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of a request."""
        return {"authorization": f"Bearer {self.value}"} if self.value else {}

    def hidden_in(self, text: str) -> str:
        """Return the text without the key."""
        return text.replace(self.value, "***") if self.value else text


@dataclass(frozen=True, slots=True)
class Target:
    """What requests are sent to.

    Attributes:
        urls: base URLs, without a slash at their ends.
        version: version of the endpoint's software, or None.
        price: dollars for its tokens; None if they are not known.
        max_model_len: tokens of a prompt and its output together, or None if that is not told.
    """

    urls: Sequence[str]
    dialect: str
    key: ApiKey = field(default_factory=ApiKey)
    version: str | None = None
    price: PriceConfig | None = None
    max_model_len: int | None = None
