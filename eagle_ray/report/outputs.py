"""Output token ids of every row of a run, by row key, for comparisons of two runs.

outputs(read)["q-1", 0]      # [17, 4, 2]
"""

from __future__ import annotations

from eagle_ray.report.summary import ReadColumns

Key = tuple[str, int]  # id_of_turn, sample_index
Output = list[int] | None  # token ids; None for an error row
COLUMNS = ["request_id", "turn_index", "sample_index", "status", "output_token_ids"]


def outputs(read: ReadColumns) -> dict[Key, Output]:
    """Return the output token ids of each row. Raises ValueError if the run stored no token ids."""
    found: dict[Key, Output] = {}
    for table in read(COLUMNS):
        for row in table.to_pylist():
            if row["status"] == "ok" and row["output_token_ids"] is None:
                raise ValueError("no token ids were stored (output.store_token_ids), so outputs cannot be compared")
            found[id_of_turn(row["request_id"], row["turn_index"]), row["sample_index"]] = row["output_token_ids"]
    return found


def id_of_turn(request_id: str, turn_index: int | None) -> str:
    """Return the request's id, and the turn with it if it is a later one of a conversation."""
    return f"{request_id}, turn {turn_index}" if turn_index else request_id
