"""Steps and accepted tokens of a run by the budget of a step.

Only runs with ``speculative.stats: detailed`` store the columns that this needs.

    budgets(read)      # {'budget': [1, 5, 13], 'steps': [40, 210, 96], 'accepted': [0, 377, 301]}
"""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.report.summary import ReadColumns

COLUMNS = ["per_step_budget", "per_step_accepted"]


def budgets(read: ReadColumns) -> dict[str, list[int]] | None:
    """Return lists with one entry per budget in ascending order, or None if no row has per-step statistics.

    budget: verify rows of one sequence in one step, including its root.
    steps: number of steps with this budget.
    accepted: accepted draft tokens, including those that a stop condition discards.
    """
    steps: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for table in read(COLUMNS):
        taken = pa.Table.from_arrays([pc.list_flatten(table[name]) for name in COLUMNS], COLUMNS)
        sums = taken.group_by("per_step_budget").aggregate([("per_step_accepted", "sum"), ([], "count_all")])
        for row in sums.to_pylist():
            steps[row["per_step_budget"]] += row["count_all"]
            accepted[row["per_step_budget"]] += row["per_step_accepted_sum"]
    if not steps:
        return None
    given = sorted(steps)
    return {"budget": given, "steps": [steps[n] for n in given], "accepted": [accepted[n] for n in given]}
