"""Types of what requests hold, each with what a value must keep to."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field


def _utf8(text: str) -> str:
    """Half a surrogate pair, which JSON can spell, is no text."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_utf8)]
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1), AfterValidator(_utf8)]
Stops = Annotated[list[Stop], Field(max_length=64, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
