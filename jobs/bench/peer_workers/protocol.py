"""Answer questions line by line: a JSON object on stdin, a JSON object on stdout. Needs the standard library alone.

    python run_vllm.py '{"target": "...", "dtype": "fp32", ...}' <- {"ready": true, "versions":
    {"vllm": "0.32.0"}} -> {"batch": 8, "prompts": [[1, 17], [1, 20]], "max_tokens": 64} <-
    {"outputs": [[5, 4], [6, 7]], "seconds": 0.4, "cpu_seconds": 0.8, "all_cpu_seconds": 0.8,
    "extras": {}}

The worker ends when stdin ends or the process that started it does.
"""

import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from types import SimpleNamespace

PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)
LONGEST_REASON = 300  # characters of an error message


def serve(start, packages):
    """Load an engine with ``start(settings)`` and answer questions with the engine's ``generate`` until stdin ends.

    Args:
        start: returns an object with ``prepare(batch)``, which is not timed, and ``generate(batch,
            prompts, max_tokens)``, which returns one list of token ids per prompt. The object may
            have a dict ``extras``.
        packages: the packages whose versions are reported.
    """
    die_with_parent()
    answers = _own_stdout()
    engine = start(SimpleNamespace(**json.loads(sys.argv[1])))
    _write(
        answers,
        {"ready": True, "versions": {name: importlib.metadata.version(name) for name in packages}},
    )

    for line in sys.stdin:
        try:
            _write(answers, _answer(engine, **json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            _write(answers, {"error": f"{type(error).__name__}: {error}"[:LONGEST_REASON]})


def admit_and_step(prompts, batch, admit, step):
    """Keep ``batch`` requests running until all prompts are answered.

    Args:
        admit: takes a prompt's index and its token ids.
        step: runs one step and returns the output ids of each request that finished in it, by
            index.
    """
    waiting = list(enumerate(prompts))[::-1]
    running = 0
    outputs = [None] * len(prompts)

    while waiting or running:
        while waiting and running < batch:
            admit(*waiting.pop())
            running += 1
        for index, ids in step().items():
            outputs[index] = ids
            running -= 1
    return outputs


def die_with_parent():
    """Let Linux kill this process when the one that asks is killed, even in the middle of a turn."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _own_stdout():
    """Return stdout as a stream of its own, and send everything that libraries print to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _write(answers, message):
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _answer(engine, batch, prompts, max_tokens):
    asked = _cpu_seconds()
    engine.prepare(batch)
    cpu_seconds = _cpu_seconds()
    started = time.perf_counter()
    outputs = engine.generate(batch, prompts, max_tokens)
    seconds = time.perf_counter() - started
    return {
        "outputs": [[int(token) for token in ids] for ids in outputs],
        "seconds": seconds,
        "cpu_seconds": _cpu_seconds() - cpu_seconds,
        "all_cpu_seconds": _cpu_seconds() - asked,
        "extras": getattr(engine, "extras", {}),
    }


def _cpu_seconds():
    times = os.times()
    return times.user + times.system
