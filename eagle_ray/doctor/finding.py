"""Finding: the result of one check of the doctor.

    ok       packages   torch 2.13.0, transformers 5.23.0, ...
    problem  memory     a worker takes 17.3 GiB and cuda:0 has 15.2 GiB free
                        -> set execution.slots to 5 or less

Programs read its facts, people its text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        part: subject of the check.
        says: result as text.
        facts: result for programs.
        problem: remedy, if a job would fail.
        advice: remedy, if a job would be slower than possible.
    """

    part: str
    says: str
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    advice: str | None = None

    @property
    def level(self) -> str:
        """Return problem, advice or ok."""
        if self.problem:
            return "problem"
        return "advice" if self.advice else "ok"

    @property
    def text(self) -> str:
        """Return the finding as one line, with the remedy on a second line if there is one."""
        todo = [f"{'':20}-> {line}" for line in (self.problem, self.advice) if line]
        return "\n".join([f"{self.level:<9}{self.part:<11}{self.says}", *todo])
