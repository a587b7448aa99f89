"""RequestColumns: the columns of the input that requests are made of.

>>> columns = RequestColumns(ColumnPath.of("id"), {"prompt": ColumnPath.of("question")})
>>> "question" in columns.fully_used
True
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_ray.requests.columns import ColumnPath
from eagle_ray.requests.row_schema import ROW_FIELDS
from eagle_ray.requests.template import PromptTemplate

PROMPTS = ("prompt", "messages", "prompt_token_ids")  # columns with prompts that need no configuration


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """The columns to read.

    Attributes:
        prompts: a row sets one of them (prompt, messages, prompt_token_ids, turns); none with a template.
        template: makes the prompt instead.
    """

    id: ColumnPath
    prompts: dict[str, ColumnPath]
    template: PromptTemplate | None = None

    @property
    def prompt_paths(self) -> list[ColumnPath]:
        """Return every path that prompts are made of."""
        return [*self.prompts.values(), *(self.template.fields if self.template is not None else ())]

    @property
    def needed(self) -> list[str]:
        """Return the columns that requests are made of."""
        read = [name for path in (self.id, *self.prompt_paths) for name in path.names]
        return read + [field.name for field in ROW_FIELDS]

    @property
    def fully_used(self) -> set[str]:
        """Return columns that are not passed through. ``turns[0]`` uses only a part of turns, so turns is passed
        through. Columns of a template are passed through, too.
        """
        return {path.text for path in (self.id, *self.prompts.values())} | {field.name for field in ROW_FIELDS}
