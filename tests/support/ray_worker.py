"""What the tests' raylet runs to start a worker: it asks the warm process for one, and ends.

A script of its own with few imports, since each worker pays for them. Without the warm process, or
for a worker that is not plain, it runs what Ray would have run.
"""

import json
import os
import runpy
import socket
import sys

ADDRESS = "EAGLE_RAY_TEST_WARM_RAY"  # the warm process's socket
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
FIRST_JOB = "01000000"  # whose workers the warm process forks
STREAMS = [0, 1, 2]


def main() -> None:
    arguments = [part for part in sys.argv[1:] if not part.startswith((CONTEXT, LANGUAGE))]
    if not is_plain(sys.argv[1:]) or not asks_for(arguments):
        import ray._private.workers.setup_worker as setup

        sys.argv[0] = setup.__file__
        runpy.run_path(setup.__file__, run_name="__main__")


def is_plain(options: list[str]) -> bool:
    """Return whether a Python worker is wanted that runs as every other."""
    contexts = [part.removeprefix(CONTEXT) for part in options if part.startswith(CONTEXT)]
    values = [value for context in contexts for value in json.loads(context or "{}").items()]
    usual = {"py_executable": sys.executable}
    languages = [
        part for part in options if part.startswith(LANGUAGE) and part != f"{LANGUAGE}PYTHON"
    ]
    is_first = os.environ.get("RAY_JOB_ID") == FIRST_JOB
    return (
        is_first
        and not languages
        and all(not value or usual.get(name) == value for name, value in values)
    )


def asks_for(arguments: list[str]) -> bool:
    """Return whether the warm process has forked a worker with these arguments and what else this process has."""
    asked = [arguments, dict(os.environ), os.getcwd(), os.nice(0)]
    data = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as warm:
        try:
            warm.connect("\0" + os.environ[ADDRESS])
            socket.send_fds(warm, [len(data).to_bytes(4, "big")], STREAMS)
            warm.sendall(data)
            return bool(warm.recv(1))  # forked
        except (KeyError, OSError):
            return False


if __name__ == "__main__":
    main()
