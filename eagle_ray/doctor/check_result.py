"""Finding: the result of one check, with advice if something should be done.

ok       packages   torch 2.13.0, transformers 5.23.0, ...
problem  memory     a worker takes 17.3 GiB and cuda:0 has 15.2 GiB free
                    -> set execution.slots to 5 or less
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """Attributes:
    part: what was checked.
    says: the result as text.
    facts: the result for programs.
    problem: what to do, if a job would fail.
    advice: what to do, if a job would be slower than possible.
    """

    part: str
    says: str
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    advice: str | None = None

    @property
    def level(self) -> str:
        """Return problem, advice or ok."""
        return "problem" if self.problem else "advice" if self.advice else "ok"

    @property
    def text(self) -> str:
        """Return a line, and a second one with the advice."""
        todo = [f"{'':20}-> {line}" for line in (self.problem, self.advice) if line]
        return "\n".join([f"{self.level:<9}{self.part:<11}{self.says}", *todo])


def findings_text(findings: Iterable[Finding]) -> str:
    """Return all findings, and how many need action."""
    findings = list(findings)
    counts = [sum(finding.level == level for finding in findings) for level in ("problem", "advice")]
    total = "nothing is wrong" if not any(counts) else f"problems: {counts[0]}, advice: {counts[1]}"
    return "\n".join([*(finding.text for finding in findings), total])


def findings_json(findings: Iterable[Finding]) -> str:
    """Return a list of objects with level and every field."""
    return json.dumps([{"level": finding.level, **asdict(finding)} for finding in findings], indent=2)
