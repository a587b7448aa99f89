"""NoText: the words of a target without a tokenizer: it takes token ids, and its answers are token ids.

>>> NoText().spell([5])
'token_id:5'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from eagle_ray.errors import RequestError


class NoText:
    """What `text.Text` offers, as far as there is any."""

    def encode(self, prompt: str, add_special_tokens: bool = True) -> NoReturn:
        raise RequestError("no_tokenizer", "the target has no tokenizer: give token ids, without stop strings")

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> NoReturn:
        self.encode("")

    def stop_check(self, stops: Sequence[str]) -> None:
        if stops:
            self.encode("")

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def spell(self, ids: Sequence[int]) -> str:
        return " ".join(f"token_id:{i}" for i in ids)

    def text_of(self, output_ids: Sequence[int], stops: Sequence[str]) -> str:
        return ""

    def growing(self, stops: Sequence[str]) -> NoText:
        return self

    def grow(self, ids: Sequence[int]) -> str:
        return ""

    def end(self, output_ids: Sequence[int]) -> str:
        return ""

    def described(self) -> dict[str, Any]:
        return {"tokenizer_class": None}
