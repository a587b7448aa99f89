"""NullTokenizer: the tokenizer of a target that has none.

    >>> NullTokenizer().decode_with_special([5])
    'token_id:5'

It refuses all operations that need text, and decodes outputs to an empty text.
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
    """A tokenizer that refuses all operations that need text, and decodes to an empty text.

    Since it refuses messages, methods that only their answers need are missing.
    """

    def __init__(self) -> None:
        self.chat_format = ChatFormat()

    @property
    def has_text(self) -> bool:
        return False

    def special_id(self, role: str) -> int | None:
        return None

    def encode(self, prompt: str, add_special_tokens: bool = True) -> NoReturn:
        raise _no_tokenizer("prompt")

    def encode_document(self, text: str, add_special_tokens: bool = True) -> NoReturn:
        raise _no_tokenizer("prompt")

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: ChatOptions = NO_OPTIONS,
    ) -> NoReturn:
        raise _no_tokenizer("messages")

    def word_ids(self, word: str) -> NoReturn:
        raise RequestError(
            "no_tokenizer", "the target has no tokenizer, so 'bad_words' cannot be used"
        )

    def stop_searches(self, stops: Sequence[str]) -> list[StopSearch]:
        if stops:
            raise _no_tokenizer("stop")
        return []

    def with_markers(self) -> Tokenizer:
        return self

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def token_text(self, token: int) -> str:
        return self.decode_with_special([token])

    def decode_with_special(self, ids: Sequence[int]) -> str:
        return " ".join(f"token_id:{i}" for i in ids)

    def final_text(
        self, output_ids: Sequence[int], stops: Sequence[str], options: TextOptions = DEFAULT_TEXT
    ) -> str:
        return ""

    def info(self) -> dict[str, Any]:
        return {"tokenizer_class": None}


def _no_tokenizer(name: str) -> RequestError:
    return RequestError(
        "no_tokenizer", f"the target has no tokenizer, so {name!r} cannot be used: give token ids"
    )
