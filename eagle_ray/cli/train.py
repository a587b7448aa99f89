"""train: train a draft head for a target, in this process or on a Ray cluster.

    $ eagle-ray train --target org/model -i chats.jsonl -o runs/head --method eagle3 --steps 2000
    $ eagle-ray train -c configs/train_demo.yaml

With data.answers.by: target the target answers the prompts first. With data.user_turns.count it
writes the prompts as well. Both are ordinary jobs below the output directory: they run on the
cluster that ray_address names, and resume after a kill.

    output.path/
      user_turns/       batch job: the target continues its chat template where a user's words begin (Magpie)
      prompts.jsonl     what the target is asked
      answers/          batch job: what it answers; training reads its Parquet files
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from eagle_ray.assembly.hub import load_tokenizer
from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.batch.driver.ray_environment import prepare_ray_environment
from eagle_ray.config import JobConfig, TrainConfig, load_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.json_text import dump_json
from eagle_ray.report.text import number
from eagle_ray.runs.layout import DATA
from eagle_ray.runs.part_files import read_tables
from eagle_ray.storage.path import StoragePath
from eagle_ray.training.job.conversations import TextSource, prompts_of, user_turn_prefix

log = logging.getLogger("eagle_ray")
PROMPTS_FILE = "prompts.jsonl"
ANSWERS = "answers"
USER_TURNS = "user_turns"
MIN_PROMPT_CHARS = 8  # a shorter text is rarely a question
Row = dict[str, Any]


def train(config: TrainConfig) -> str:
    """Run all steps of a training configuration and return the final message. Raises ConfigError."""
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
    """Return a summary of the training, and the command that uses the trained head."""
    held_out = record["curves"].get("held_out", [])
    tau = held_out[-1][1]["tau"] if held_out else None
    output = StoragePath.of(record["config"]["output"]["path"]).display_path
    lines = [
        f"{record['config']['head']['method']} head of {number(record['num_parameters'])} parameters in {output} after "
        f"{number(record['num_steps'])} steps; report: {output}/report.html"
    ]
    if tau is not None:
        tree = record["config"]["evaluation"]
        lines.append(
            f"held-out tau {tau:.2f} ({tree['max_nodes']} nodes, {tree['max_depth']} levels, greedy)"
        )
    return "\n".join([*lines, f"use it: {record['usage']}"])


def _paths(config: TrainConfig) -> list[str]:
    """Return the files to train on, after the target has answered if the configuration says so."""
    if config.data.answers.by == "target":
        return [answer_prompts(config)]
    paths = config.data.path
    return [paths] if isinstance(paths, str) else list(paths or ())


def answer_prompts(config: TrainConfig) -> str:
    """Let the target answer the prompts and return the run's directory. Raises ConfigError without any prompt.

    A Ray session that the jobs start is ended with them.
    """
    prepare_ray_environment(config.training.ray_address)
    import ray

    was_connected = ray.is_initialized()
    try:
        return _answer_prompts(config)
    finally:
        if not was_connected:
            ray.shutdown()


def _answer_prompts(config: TrainConfig) -> str:
    output = StoragePath.of(config.output.path)
    prompts = output / PROMPTS_FILE
    if not prompts.exists() or config.output.if_exists == "overwrite":
        rows = (
            _user_turns(config, output) if config.data.user_turns.count else _given_prompts(config)
        )
        lines = [dump_json(row, ensure_ascii=False) + "\n" for row in rows]
        if not lines:
            raise ConfigError(
                "data.path: there is no prompt to answer. Give rows with messages or prompt"
            )
        prompts.write_atomic("".join(lines).encode())
    answers = config.data.answers
    sampling = {
        "sampling.temperature": answers.temperature,
        "sampling.max_tokens": answers.max_tokens,
    }
    job = batch_job(config, prompts, output / ANSWERS, sampling)
    log.info("the target answers the prompts of %s into %s", prompts.display_path, job.output.path)
    complete_job(job)
    return job.output.path


def batch_job(
    config: TrainConfig, source: StoragePath, output: StoragePath, sampling: dict[str, Any]
) -> JobConfig:
    """Return the configuration of a batch job in which the target answers the rows of `source`."""
    target = config.model
    answers = config.data.answers
    values = {
        "name": f"{config.name}-{output.name}",
        "input.path": str(source),
        "output.path": str(output),
        "model.target": target.target,
        "model.dtype": target.dtype,
        "model.device": target.device,
        "model.chat_template": target.chat_template,
        "model.draft": answers.draft,
        "speculative.method": "none" if answers.draft is None else "eagle2",
        "execution.ray_address": config.training.ray_address,
        "execution.slots": answers.slots,
        "report.html": False,
        "seed": config.training.seed,
        "logging.level": config.logging.level,
        "logging.progress_every_s": config.logging.progress_every_s,
    }
    return load_config(None, env={}, overrides=values | sampling)


def _given_prompts(config: TrainConfig) -> Iterator[Row]:
    paths = config.data.path
    source = TextSource(
        [paths] if isinstance(paths, str) else list(paths or ()), config.data.format
    )
    for index, row in enumerate(prompts_of(source.rows())):
        if index == config.data.limit:
            return
        yield row


def _user_turns(config: TrainConfig, output: StoragePath) -> Iterator[Row]:
    """Run a job in which the target writes user turns, as in Magpie, and yield the different ones as prompts."""
    tokenizer = load_tokenizer(config.model.model_config_for(draft=None))
    if tokenizer is None:
        raise ConfigError(
            f"data.user_turns: {config.model.target} has no tokenizer, so it has no chat template"
        )
    turns = config.data.user_turns
    source = output / f"{USER_TURNS}.jsonl"
    ids = tokenizer.encode(user_turn_prefix(tokenizer), add_special_tokens=False)
    rows = ({"id": f"user-{number:07d}", "prompt_token_ids": ids} for number in range(turns.count))
    source.write_atomic("".join(dump_json(row) + "\n" for row in rows).encode())
    sampling = {
        "sampling.temperature": turns.temperature,
        "sampling.top_p": turns.top_p,
        "sampling.max_tokens": turns.max_tokens,
    }
    job = batch_job(config, source, output / USER_TURNS, sampling)
    log.info("the target writes %d user turns", turns.count)
    complete_job(job)
    tables = read_tables(
        StoragePath.of(job.output.path) / DATA, ["request_id", "text", "finish_reason"]
    )
    yield from distinct_turns(row for table in tables for row in table.to_pylist())


def distinct_turns(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield distinct prompts from the user turns that the target wrote, in the order of their ids.

    Unfinished and very short turns are left out.
    """
    texts: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: row["request_id"]):
        text = (row["text"] or "").strip()
        if row["finish_reason"] == "stop" and len(text) >= MIN_PROMPT_CHARS:
            texts.setdefault(text, row["request_id"])
    for text, request_id in texts.items():
        yield {"id": request_id, "messages": [{"role": "user", "content": text}]}
