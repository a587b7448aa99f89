"""train: train a draft head for a target, in this process or on the workers of a Ray cluster.

    $ eagle-ray train --target org/model -i chats.jsonl -o runs/head --method eagle3 --steps 2000
    $ eagle-ray train -c configs/train_demo.yaml

With data.answers.by: target the target answers the prompts first, in a batch job below the output directory. With
data.user_turns.count it writes the prompts as well.
"""

from __future__ import annotations

import logging
from typing import Any

from eagle_ray.config import TrainConfig
from eagle_ray.report.text import number
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")


def train(config: TrainConfig) -> str:
    """Run the whole configuration and return the message for the end. Raises ConfigError."""
    paths = _paths(config)
    if config.training.workers > 1:
        record = _train_on_workers(config, paths)
    else:
        from eagle_ray.training.job.train_head import train_head

        record = train_head(config, paths)
    return ending(record)


def _train_on_workers(config: TrainConfig, paths: list[str]) -> dict[str, Any]:
    """Join or start the cluster, train on it, and leave it."""
    from eagle_ray.batch.driver.ray_environment import prepare_ray_environment

    address = prepare_ray_environment(config.training.ray_address)
    import ray

    from eagle_ray.batch.driver.cluster import connect
    from eagle_ray.training.job.data_parallel import train_on_workers

    was_connected = ray.is_initialized()
    connect(address)
    try:
        return train_on_workers(config, paths)
    finally:
        if not was_connected:
            ray.shutdown()


def ending(record: dict[str, Any]) -> str:
    """Return what was trained, and the line that says how to use it."""
    held_out = record["curves"].get("held_out", [])
    tau = held_out[-1][1]["tau"] if held_out else None
    output = StoragePath.of(record["config"]["output"]["path"]).display_path
    lines = [
        f"{record['config']['head']['method']} head of {number(record['num_parameters'])} parameters in {output} after "
        f"{number(record['num_steps'])} steps; report: {output}/report.html"
    ]
    if tau is not None:
        tree = record["config"]["evaluation"]
        lines.append(f"held-out tau {tau:.2f} ({tree['max_nodes']} nodes, {tree['max_depth']} levels, greedy)")
    return "\n".join([*lines, f"use it: {record['usage']}"])


def _paths(config: TrainConfig) -> list[str]:
    """Return the files to train on, after the target has answered if the configuration says so."""
    if config.data.answers.by == "target":
        from eagle_ray.cli.own_answers import answer_prompts

        return [answer_prompts(config)]
    paths = config.data.path
    return [paths] if isinstance(paths, str) else list(paths or ())
