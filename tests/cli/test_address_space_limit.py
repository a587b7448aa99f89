"""A limit on address space that is too small is one line and a code, before any library aborts over it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from eagle_ray.cli import main as cli
from eagle_ray.cli.main import check_address_space, out_of_memory_words
from eagle_ray.runs.job_errors import ClusterUnfit
from eagle_ray.storage import path

KB = 1024
LIMITED = """
import resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from eagle_ray.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("limit_kb", [100_000, 300_000, 1_000_000, 2_000_000])
@pytest.mark.parametrize(
    "command", [["run", "-i", "embedded:prompts", "-o", "OUT"], ["demo", "-o", "OUT"], ["serve"]]
)
def test_a_limit_that_is_too_small_is_one_line_and_exit_2(tmp_path, command, limit_kb):
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit_kb * KB), *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("eagle-ray: ulimit -v: ") and done.stderr.count("\n") == 1
    assert "Ray needs 3.5 GB. Raise it (ulimit -v unlimited)" in done.stderr
    assert done.stdout == "" and not (tmp_path / "out").exists()


def test_commands_that_only_read_need_less():
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(300_000 * KB), "report", "x"],
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2
        and "pyarrow needs 0.5 GB" in done.stderr
        and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("limit_gb", "says"), [(None, ""), (7.1, ""), (4.0, "4.0 GB of address space"), (3.4, None)]
)
def test_a_limit_is_refused_warned_of_or_ample(monkeypatch, limit_gb, says):
    limit = resource.RLIM_INFINITY if limit_gb is None else int(limit_gb * cli.GB)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    if says is None:
        with pytest.raises(ClusterUnfit, match=r"3\.4 GB of address space, and Ray needs 3\.5 GB"):
            check_address_space("Ray")
    else:
        assert (says in (said := check_address_space("Ray"))) and bool(said) == bool(says)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        ImportError("libarrow.so.2600: failed to map segment from shared object"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 1 bytes\nmore"
        ),
    ],
)
def test_out_of_memory_in_a_command_is_one_line_and_exit_code_5(monkeypatch, capsys, error):
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(path, "named_path", fail)
    assert cli.main(["status", "x"]) == 5
    said = capsys.readouterr().err
    assert said.startswith("eagle-ray: out of memory (") and said.count("\n") == 1


def test_other_errors_are_not_taken_for_it():
    assert out_of_memory_words(RuntimeError("shapes do not match")) == ""
