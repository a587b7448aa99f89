"""Protocols for the settings that a job's rows read.

`config/job.py` is imported after this package, so the settings are declared here by their
attributes. A JobConfig is a RowSettings. Each protocol has exactly the attributes that are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from eagle_ray.text.chat_options import ChatOptions


class SamplingDefaults(Protocol):
    """Sampling parameters of rows that do not set them, as pairs of a name and a value."""

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...

    @property
    def n(self) -> int: ...


class ChatDefaults(Protocol):
    """Chat template options of rows that do not set them."""

    def options(self, own: Mapping[str, Any]) -> ChatOptions:
        """Return the options of a row. Raises ValueError.

        Args:
            own: values that the row sets.
        """
        ...


class StoredParts(Protocol):
    """Parts of a row that the output stores."""

    @property
    def store_prompt(self) -> bool: ...

    @property
    def store_token_ids(self) -> bool: ...


class StatisticsSettings(Protocol):
    """Detail of the statistics of drafts: summary or detailed."""

    @property
    def stats(self) -> str: ...


class RowSettings(Protocol):
    """The settings of a job that its rows read.

    Attributes:
        seed: seed of the noise of rows that set none.
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
    """The settings of a job or endpoint that computes embeddings.

    Attributes:
        prompt_name: name of the prompt of a text that names none; None is the target's default.
        dimensions: length of a vector; None is the full length.
        dtype: type of the numbers in a job's column.
    """

    @property
    def prompt_name(self) -> str | None: ...

    @property
    def dimensions(self) -> int | None: ...

    @property
    def dtype(self) -> str: ...
