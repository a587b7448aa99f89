"""Answer the bundled prompts in a job, then ask DuckDB how many tokens a pass of the target brought in each category.

    python examples/batch_acceptance.py runs/example      # kill it and run it again: only what is missing is answered

`pandas.read_parquet("runs/example/data")` reads the same files. Every column:
eagle_ray/batch/COLUMNS.md.
"""

from __future__ import annotations

import sys
from typing import Any

from eagle_ray import run_job

SETTINGS = {
    "input.path": "embedded:prompts",  # a file, a directory, a glob or an address in S3
    "model.target": "embedded:tiny",  # a hub's id or a directory; model.draft is its head
    "sampling.max_tokens": 64,
}
BY_CATEGORY = """
    select category, count(*) as answers, avg(mean_acceptance_length) as tau
    from read_parquet($files)
    where status = 'ok'
    group by category
    order by tau desc
"""


def answer(output: str, **settings: Any) -> None:
    """Run the job, or what is missing of it. settings: keys of configs/KEYS.md."""
    run_job({**SETTINGS, "output.path": output, **settings})


def acceptance(output: str) -> list[tuple[str, int, float]]:
    """Return the category, the number of answers and the mean tokens for each pass, the best category first."""
    import duckdb

    return duckdb.execute(BY_CATEGORY, {"files": f"{output}/data/*.parquet"}).fetchall()


def main(output: str) -> None:
    answer(output)
    for category, answers, tau in acceptance(output):
        print(f"{category:16} {answers:4} answers {tau:6.2f} tokens a pass")


if __name__ == "__main__":
    main(*sys.argv[1:])
