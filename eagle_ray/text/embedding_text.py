"""EmbeddingText: token ids of a text to embed, as sentence-transformers makes them.

    text = EmbeddingText(tokenizer, read_embedder(directory), max_tokens=512)
    text.encode("Paris is a city", prompt_name="query")      # PromptIds(ids=[...], num_left_out=0)

A prompt is put before the text, and both are tokenized together, with the special tokens that the
tokenizer adds: some models end every text with EOS, and read the embedding there. A text that is
longer than max_tokens is cut before these special tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.storage.embedder_files import EmbedderFiles
from eagle_ray.text.tokenizer import Tokenizer

CHARS_PER_TOKEN = 32  # far more than texts have


@dataclass(frozen=True, slots=True)
class PromptIds:
    """Token ids of a text, and the number of first ids that belong to a prompt which the mean leaves out."""

    ids: list[int]
    num_left_out: int = 0


class EmbeddingText:
    """The tokenizer of an embedder, with its prompts.

    Args:
        tokenizer: tokenizer of the target.
        max_tokens: maximum tokens of a text, its prompt and special tokens included.
    """

    def __init__(self, tokenizer: Tokenizer, files: EmbedderFiles, max_tokens: int):
        self.files = files
        self.max_tokens = max_tokens
        # Truncation is a state of the tokenizer, which other threads may use.
        self._hf_tokenizer = copy.deepcopy(tokenizer.hf_tokenizer)
        self._backend: Any = getattr(self._hf_tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_padding()
            self._backend.enable_truncation(
                max_tokens, direction=self._hf_tokenizer.truncation_side
            )
        self._num_prompt_tokens: dict[str, int] = {}  # by prompt

    def encode(self, text: str, prompt_name: str | None = None) -> PromptIds:
        """Return the ids of a text with the prompt of this name before it; None is the default prompt.

        Raises RequestError for a name that the target does not have, and for a text without tokens.
        """
        try:
            prompt = self.files.prompt(prompt_name)
        except ValueError as error:
            raise RequestError(
                "unknown_prompt_name", f"prompt_name: {error}", "prompt_name"
            ) from None
        ids = self._ids(self._beginning(prompt + text))
        if not ids:
            raise RequestError("prompt_empty", "the text has no tokens: write one")
        is_left_out = prompt and self.files.pooling == "mean" and not self.files.includes_prompt
        return PromptIds(ids, self._length(prompt) if is_left_out else 0)

    def _beginning(self, text: str) -> str:
        """Return as much of a long text as is certain to be read: encoding all of it takes gigabytes.

        Its first half fills all tokens, so that no token that is kept depends on what follows.
        """
        half = CHARS_PER_TOKEN * self.max_tokens
        if len(text) <= 2 * half or self._hf_tokenizer.truncation_side != "right":
            return text
        is_enough = len(self._ids(text[:half])) >= self.max_tokens
        return text[: 2 * half] if is_enough else text

    def _ids(self, text: str) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text).ids)
        return list(self._hf_tokenizer.encode(text, truncation=True, max_length=self.max_tokens))

    def _length(self, prompt: str) -> int:
        """Return the tokens of a prompt alone, without a special token at their end."""
        if prompt not in self._num_prompt_tokens:
            ids = self._ids(prompt)
            ends = set(self._hf_tokenizer.all_special_ids)
            self._num_prompt_tokens[prompt] = len(ids) - (ids[-1] in ends)
        return self._num_prompt_tokens[prompt]
