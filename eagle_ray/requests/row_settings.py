"""RowSettings: what the rows of a job read of its configuration (`config/job.py`), which stands above this package.

A JobConfig is one. Each protocol has the attributes that are read, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from eagle_ray.text.chat_options import ChatOptions


class SamplingDefaults(Protocol):
    """Parameters of sampling of rows that do not set them: pairs of a name and a value."""

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...

    @property
    def n(self) -> int: ...


class ChatDefaults(Protocol):
    """Options of chat templates of rows that do not set them."""

    def options(self, own: Mapping[str, Any]) -> ChatOptions:
        """Return the options of a row with these values of its own. Raises ValueError."""
        ...


class StoredParts(Protocol):
    """Parts of rows that the output keeps."""

    @property
    def store_prompt(self) -> bool: ...

    @property
    def store_token_ids(self) -> bool: ...


class StatisticsSettings(Protocol):
    """How much is told of drafts: summary or detailed."""

    @property
    def stats(self) -> str: ...


class RowSettings(Protocol):
    """The settings of a job that its rows read.

    Attributes:
        seed: key of the noise of rows that set none.
    """

    @property
    def sampling(self) -> SamplingDefaults: ...

    @property
    def chat(self) -> ChatDefaults: ...

    @property
    def output(self) -> StoredParts: ...

    @property
    def speculative(self) -> StatisticsSettings: ...

    @property
    def seed(self) -> int: ...


class EmbeddingSettings(Protocol):
    """The settings of embeddings.

    Attributes:
        prompt_name: prompt before a text that names none; None for the target's default.
        dimensions: numbers of an embedding; None for all.
        dtype: type of the numbers in a column.
    """

    @property
    def prompt_name(self) -> str | None: ...

    @property
    def dimensions(self) -> int | None: ...

    @property
    def dtype(self) -> str: ...
