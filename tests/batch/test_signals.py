"""SIGINT, SIGTERM and SIGHUP at any time: one line, exit code 130, and an output that can be gone on with."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from eagle_ray.batch.driver.signals import (
    AGAIN_S,
    FROM_OUTSIDE,
    accept_interrupt,
    check_not_interrupted,
    interrupt,
    interruptible,
    time_limit,
)
from tests.support.jobs import exit_code, small_job, token_rows

COMMAND = [sys.executable, "-m", "eagle_ray.cli", "run"]


@pytest.fixture(autouse=True)
def heard_sighup() -> Iterator[None]:
    """What this process starts inherits a SIGHUP that nohup ignores."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "after_line", "after_s"),
    [
        (signal.SIGTERM, "reading the input", 0.0),
        (signal.SIGHUP, "getting Ray ready", 0.5),
        (
            signal.SIGTERM,
            "getting Ray ready",
            1.5,
        ),  # within ray.init, which has a handler of its own
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
    command, environment = (
        [*COMMAND, "-c", str(tmp_path / "job.yaml")],
        os.environ | {"PYTHONPATH": os.getcwd()},
    )
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


@pytest.fixture(scope="module")
def finished(ray_session, tmp_path_factory) -> str:
    """The output of a small job."""
    config = small_job(tmp_path_factory.mktemp("finished"), token_rows(2), **{"report.html": False})
    assert exit_code(config) == 0
    return config.output.path


@pytest.mark.parametrize("number", FROM_OUTSIDE)
def test_interrupt_in_arrows_pandas_import_is_one_line_and_130(finished, number):
    """Its compiled code swallows the exception. A later signal of an impatient user changes nothing."""
    command = [sys.executable, "-m", "eagle_ray.cli", "export", finished, "--to", "csv"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    export = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    maps = Path(f"/proc/{export.pid}/maps")
    while export.poll() is None and "pandas/_libs" not in maps.read_text():
        time.sleep(0.002)
    for _ in range(3):
        export.send_signal(number)
        time.sleep(0.05)
    said = export.communicate(timeout=60)[1]
    assert (export.returncode, said) == (130, "eagle-ray: interrupted\n")


IMPORTED = """
import signal, sys
from eagle_ray.cli.__main__ import command

class Finder:
    def find_spec(self, name, *_):
        if name == "eagle_ray.cli.main":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.exit(command())
"""


def test_interrupt_during_command_import_is_one_line_and_130():
    ended = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "eagle-ray: interrupted\n")


IN_A_TEXT = """
import signal, sys
from eagle_ray.batch.driver.signals import interruptible
try:
    with interruptible():
        exec("signal.raise_signal(signal.SIGTERM)")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_interrupt_inside_exec_ends_with_exit_code_130(tmp_path):
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
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in driver.stderr:
        if "reading the input" in line:
            break
    driver.send_signal(signal.SIGHUP)
    said = driver.communicate(timeout=180)[1]
    assert driver.returncode == 0, said
    assert Path(config.output.path, "_SUCCESS").exists()


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (*FROM_OUTSIDE, signal.SIGUSR1, signal.SIGALRM)]


@pytest.mark.parametrize("number", FROM_OUTSIDE)
def test_a_later_signal_does_not_cut_off_what_cleans_up(number):
    before, words = handlers(), []
    with pytest.raises(KeyboardInterrupt), interruptible():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for_interrupt()
        finally:
            os.kill(os.getpid(), number)
            time.sleep(3 * AGAIN_S)  # nor does the interrupt that is raised again
            with suppress(ValueError):  # an error of its own that it handles
                raise ValueError
            words.append("said")
    assert words == ["said"] and handlers() == before


def test_thread_interrupts_main_thread_and_handlers_are_restored():
    before = handlers()
    with pytest.raises(KeyboardInterrupt), interruptible():
        threading.Timer(0.05, interrupt).start()
        wait_for_interrupt()
    assert handlers() == before


def swallow_interrupt(raised: type[BaseException] | None = None) -> None:
    """Lose the exception as compiled code does that imports a module, or raise another one in its place."""
    with suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_interrupt()
    if raised is not None:
        raise raised("partially initialized module")


def wait_for_interrupt() -> None:
    time.sleep(60)
    raise AssertionError("no interrupt came")


class InterruptedFinalizer:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_interrupt()


def finalize_object() -> None:
    InterruptedFinalizer()


@pytest.mark.parametrize("swallow", [swallow_interrupt, finalize_object])
def test_interrupt_lost_by_a_library_is_raised_again_silently(swallow, capsys):
    before = handlers()
    with pytest.raises(KeyboardInterrupt), interruptible():
        swallow()
        wait_for_interrupt()
    assert handlers() == before and capsys.readouterr().err == ""


@pytest.mark.parametrize("how", [time.sleep, check_not_interrupted])
def test_every_lost_interrupt_is_raised_again(how):
    with pytest.raises(KeyboardInterrupt), interruptible():
        for _ in range(3):
            swallow_interrupt()
        wait_for_interrupt() if how is time.sleep else how()
    check_not_interrupted()


@pytest.mark.parametrize(
    "raised", [AttributeError, SystemError, ImportError, SystemExit, pa.ArrowCancelled]
)
def test_what_a_half_imported_module_raises_is_the_interrupt(raised):
    with pytest.raises(KeyboardInterrupt), interruptible():
        swallow_interrupt(raised)
    with pytest.raises(raised), interruptible():
        raise raised("not interrupted")


def test_interrupt_is_raised_even_if_the_work_ends_normally():
    with pytest.raises(KeyboardInterrupt), interruptible():
        swallow_interrupt()


def test_an_interrupt_that_was_caught_for_good_is_over():
    before = handlers()
    with interruptible():
        with pytest.raises(KeyboardInterrupt), interruptible():
            swallow_interrupt()
        os.kill(os.getpid(), signal.SIGTERM)  # unheard
        time.sleep(2 * AGAIN_S)
    with interruptible(), suppress(KeyboardInterrupt):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for_interrupt()
        except KeyboardInterrupt:
            accept_interrupt()
        time.sleep(2 * AGAIN_S)
    assert handlers() == before


def test_an_interrupt_is_heard_where_another_is_being_handled():
    """As in a notebook's cell that was interrupted and calls a job to clean up."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt), interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for_interrupt()


def test_a_wait_has_an_end_that_is_no_interrupt():
    before = handlers()
    with interruptible():
        with pytest.raises(TimeoutError), time_limit(0.05):
            wait_for_interrupt()
        with pytest.raises(TimeoutError), time_limit(0.05), suppress(KeyboardInterrupt):
            wait_for_interrupt()
        with time_limit(60):
            pass
        time.sleep(2 * AGAIN_S)
    with pytest.raises(KeyboardInterrupt), interruptible(), time_limit(60):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_interrupt()
    assert handlers() == before


def test_an_ignored_sigint_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
