"""NullTokenizer: the tokenizer of a target without one: it takes token ids, and its answers are token ids.

>>> NullTokenizer().decode_with_special([5])
'token_id:5'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from eagle_ray.core.errors import RequestError
from eagle_ray.text.chat_format import ChatFormat
from eagle_ray.text.chat_options import NO_OPTIONS, ChatOptions
from eagle_ray.text.output_text import DEFAULT_TEXT, StopSearch, TextOptions
from eagle_ray.text.tokenizer import Tokenizer


class NullTokenizer(Tokenizer):
    """Has no text: it refuses what needs words, and a decoded output is empty."""

    def __init__(self) -> None:
        self.chat_format = ChatFormat()

    def encode(self, prompt: str, add_special_tokens: bool = True) -> NoReturn:
        raise RequestError("no_tokenizer", "the target has no tokenizer: give token ids, without stop strings")

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: ChatOptions = NO_OPTIONS,
    ) -> NoReturn:
        self.encode("")

    def with_markers(self) -> Tokenizer:
        return self

    def prompt_end(self, prompt_ids: Sequence[int]) -> str:
        return ""

    def special_marker_ids(self) -> dict[str, int]:
        return {}

    def reasoning_end_id(self) -> NoReturn:
        self.encode("")

    def token_strings(self, ids: Sequence[int]) -> NoReturn:
        self.encode("")

    def word_ids(self, word: str) -> NoReturn:
        raise RequestError("no_tokenizer", "the target has no tokenizer, so 'bad_words' cannot be used")

    def stop_searches(self, stops: Sequence[str]) -> list[StopSearch]:
        if stops:
            self.encode("")
        return []

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def decode_with_special(self, ids: Sequence[int]) -> str:
        return " ".join(f"token_id:{i}" for i in ids)

    def final_text(self, output_ids: Sequence[int], stops: Sequence[str], options: TextOptions = DEFAULT_TEXT) -> str:
        return ""

    def info(self) -> dict[str, Any]:
        return {"tokenizer_class": None}
