"""Two gloo workers of Ray Train: the numbers of one process, and a resume after a lost worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagle_ray.training.job.data_parallel import train_on_workers
from eagle_ray.training.job.train_head import train_head
from eagle_ray.training.job.train_state import TrainState

SETTINGS = {"head.method": "eagle3", "optimizer.kind": "adamw", "training.shard_tokens": 40}


@pytest.mark.slow
def test_two_workers_give_the_numbers_of_one(ray_session, make_config, answers, tmp_path):
    one = train_head(make_config(**SETTINGS), [str(answers)])
    config = make_config(
        **SETTINGS, **{"training.workers": 2, "output.path": str(tmp_path / "two")}
    )
    two = train_on_workers(config, [str(answers)])
    assert two["num_documents"] == one["num_documents"]
    for (step, mine, _), (other_step, theirs, _) in zip(
        one["curves"]["steps"], two["curves"]["steps"], strict=True
    ):
        assert step == other_step and mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert two["curves"]["held_out"][-1][1]["tau"] >= 1
    assert (tmp_path / "two" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_lost_worker_resumes_from_the_checkpoint(
    ray_session, make_config, answers, tmp_path, monkeypatch
):
    """Worker 0 ends like a killed process after the checkpoint of step 2, once."""
    config = make_config(**SETTINGS, **{"training.workers": 2})
    flag = tmp_path / "died"
    save = TrainState.save

    def save_and_die(state, output, keep):
        save(state, output, keep)
        if not Path(flag).exists():
            Path(flag).touch()
            os._exit(1)

    import eagle_ray.training.job.data_parallel as module

    train = module.train_worker

    def train_and_die(settings):
        TrainState.save = save_and_die
        train(settings)

    monkeypatch.setattr(module, "train_worker", train_and_die)
    record = train_on_workers(config, [str(answers)])
    assert flag.exists() and [step for step, _, _ in record["curves"]["steps"]] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
