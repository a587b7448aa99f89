"""StrictModel: a section of the configuration, and the types of values that sections share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[
    list[Name], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


class StrictModel(BaseModel):
    """Frozen section of the configuration that rejects unknown keys and values of another type ("3" for 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def priced_by(key: str, hint: str = "") -> Callable[[float | None, ValidationInfo], float | None]:
    """Return a validator for a limit in dollars: the price by which spending is computed must be set as well.

    Args:
        key: dotted key of the price.
        hint: end of the error, such as a key that may have been meant.
    """
    name = key.rpartition(".")[2]

    def check(value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get(name) is None:
            raise ValueError(f"{key} is not set, and says what is spent{hint}")
        return value

    return check
