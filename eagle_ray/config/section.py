"""StrictModel: a section of the configuration, and the types of values that sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[
    list[Name], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


class StrictModel(BaseModel):
    """Frozen section of the configuration that rejects unknown keys and values of another type ("3" for 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
