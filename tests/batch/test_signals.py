"""SIGINT, SIGTERM and SIGHUP at any time: one line, exit code 130, and an output that can be gone on with."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from eagle_ray.batch.signals import check_not_interrupted, interrupt, interruptible
from tests.conftest import token_rows

COMMAND = [sys.executable, "-m", "eagle_ray.cli", "run"]


@pytest.mark.parametrize(
    ("number", "after_line", "after_s"),
    [
        (signal.SIGTERM, "reading the input", 0.0),
        (signal.SIGHUP, "getting Ray ready", 0.5),
        (signal.SIGTERM, "getting Ray ready", 1.5),  # within ray.init, which has a handler of its own
        pytest.param(signal.SIGINT, "getting Ray ready", 1.5, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "getting Ray ready", 0.0, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "getting Ray ready", 3.0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "getting Ray ready", 0.5, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "loading ", 0.0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "loading ", 2.0, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_is_one_line_and_130(make_job, tmp_path, number, after_line, after_s):
    config = make_job(token_rows(20), **{"execution.ray_address": "local"})
    (tmp_path / "job.yaml").write_text(config.model_dump_json())
    command, environment = [*COMMAND, "-c", str(tmp_path / "job.yaml")], os.environ | {"PYTHONPATH": os.getcwd()}
    driver = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    said = []
    for line in driver.stderr:
        said.append(line)
        if after_line in line:
            break
    time.sleep(after_s)
    driver.send_signal(number)
    said += driver.communicate(timeout=60)[1].splitlines(keepends=True)
    assert driver.returncode == 130, "".join(said)
    assert "Traceback" not in "".join(said) and said[-1].startswith("eagle-ray: interrupted")
    assert not Path(config.output.path, "_SUCCESS").exists()


IN_A_TEXT = """
import signal, sys
from eagle_ray.batch.signals import interruptible
try:
    with interruptible():
        exec("signal.raise_signal(signal.SIGTERM)")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_in_a_text_that_python_runs_does_not_change_the_exit_code(tmp_path):
    """As in the texts that dataclasses run while they are imported: without a remedy the code is that of SIGINT."""
    (tmp_path / "interrupted.py").write_text(IN_A_TEXT)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    assert subprocess.run([sys.executable, "-m", "interrupted"], env=environment).returncode == 130


@pytest.mark.slow
def test_a_sighup_that_nohup_ignores_stays_ignored(make_job, tmp_path):
    """A real process: the signal arrives before Ray starts, and the job goes on to its end."""
    config = make_job(token_rows(2), **{"execution.ray_address": "local"})
    (tmp_path / "job.yaml").write_text(config.model_dump_json())
    command, environment = (
        ["nohup", *COMMAND, "-c", str(tmp_path / "job.yaml")],
        os.environ | {"PYTHONPATH": os.getcwd()},
    )
    driver = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in driver.stderr:
        if "reading the input" in line:
            break
    driver.send_signal(signal.SIGHUP)
    said = driver.communicate(timeout=180)[1]
    assert driver.returncode == 0, said
    assert Path(config.output.path, "_SUCCESS").exists()


def test_only_the_first_interrupt_from_outside_is_heard():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            finally:
                os.kill(os.getpid(), signal.SIGINT)  # unheard
                last_words = "said"
        assert last_words == "said"
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def test_a_thread_may_interrupt_the_main_one_and_leaves_the_handlers_as_they_were():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(KeyboardInterrupt), interruptible():
        threading.Timer(0.05, interrupt).start()
        time.sleep(5)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_an_interrupt_that_a_library_lost_is_raised_again():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            check_not_interrupted()
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    check_not_interrupted()


def test_an_ignored_sigint_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
