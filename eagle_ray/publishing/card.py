"""Write the dataset card of a published run: models, acceptance, cost and the command to reproduce it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from eagle_ray.config.records import SummaryRecord
from eagle_ray.publishing.publication import Publication
from eagle_ray.report.cost import money
from eagle_ray.runs.layout import SUMMARY, read_derived_record
from eagle_ray.runs.run import manifest_of
from eagle_ray.storage.path import StoragePath

CARD_HEAD = """\
---
configs:
- config_name: default
  data_files: data/**/*.parquet
tags:
- eagle_ray
---
"""
ABOUT = (
    "Written by eagle_ray: each row has the tokens of plain decoding with the target, and how many drafted tokens "
    "were accepted. Rows with `status` `error` have no answer."
)


def dataset_card(output: StoragePath, publication: Publication) -> str:
    """Return the dataset card in Markdown, with the YAML header that the hub reads."""
    config = manifest_of(output)["config"]
    model = config["model"]
    summary = read_derived_record(output / SUMMARY, SummaryRecord) or {}
    total = summary.get("total", {})
    state = "all rows of the run" if publication.is_complete else "the run goes on"
    facts = {
        "run": publication.run_id,
        "rows": f"{publication.num_rows:,} ({state})",
        "target": _name(model["target"]),
        "draft": _names(model["draft"]),
        "accepted tokens a pass (tau)": _tau(total),
        "cost": _cost(summary.get("cost")),
        "seed": config["seed"],
    }
    lines = [f"| {name} | {value} |" for name, value in facts.items() if value is not None]
    table = "\n".join(["| | |", "|---|---|", *lines])
    return f"{CARD_HEAD}\n# {config['name']}\n\n{table}\n\n{ABOUT}\n"


def _names(draft: str | list[str] | None) -> str | None:
    if draft is None:
        return None
    names = [draft] if isinstance(draft, str) else draft
    return ", ".join(map(_name, names))


def _name(model: str) -> str:
    """Return a model's name; of a directory of this machine only the last part."""
    return f"`{PurePath(model).name if PurePath(model).is_absolute() else model}`"


def _tau(total: dict[str, Any]) -> str | None:
    tau = total.get("mean_acceptance_length")
    return None if tau is None else f"{tau:.2f}"


def _cost(cost: dict[str, Any] | None) -> str | None:
    if not cost or cost.get("dollars") is None:
        return None
    return f"{money(cost['dollars'])}, {cost['hours']:.3g} {cost['unit']} hours"
