"""Cores, memory and disks, with a made-up system around them where it matters."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil

from eagle_ray.doctor import system
from eagle_ray.doctor.system import disks, free_memory, num_cores


def limits(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        (directory / name.replace("_", ".", 1)).write_text(text)
    return directory


def test_a_containers_limits_count(tmp_path):
    cgroup = limits(
        tmp_path, cpu_max="150000 100000\n", memory_max="1000000\n", memory_current="400000\n"
    )
    assert num_cores(cgroup) == min(2, len(os.sched_getaffinity(0)))
    assert free_memory(cgroup) == 600_000


def test_without_limits_the_machine_counts(tmp_path, monkeypatch):
    cgroup = limits(tmp_path, cpu_max="max 100000\n", memory_max="max\n", memory_current="1\n")
    assert num_cores(cgroup) == len(os.sched_getaffinity(0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2048 << 10))
    assert free_memory(cgroup) == 2048 << 10


def test_a_full_disk_says_where_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "MIN_OUTPUT", 1 << 60)
    monkeypatch.setattr(system, "FULL_DISK", 0.0)
    monkeypatch.setattr(system, "MIN_SHARED", 1 << 60)
    output, temporary, shared, cache = disks(str(tmp_path / "a" / "b"), str(tmp_path), tmp_path)
    assert str(tmp_path) in output.says and "output.path" in output.problem
    assert (
        "RAY_TMPDIR" in temporary.advice and "--shm-size" in shared.advice and cache.level == "ok"
    )


def test_an_output_in_s3_is_nobodys_disk(tmp_path):
    assert disks("s3://bucket/run", str(tmp_path), tmp_path)[0].level == "ok"
