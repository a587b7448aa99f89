"""Run `python -m eagle_ray.cli` as the command eagle-ray."""

import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

from eagle_ray.batch.driver.signals import ignore_until_exit, interruptible
from eagle_ray.core.start_log import open_streams

EXIT_INTERRUPTED = 130  # job_errors has it, and imports much


def command() -> int:
    """Run the command of this process. It may be interrupted while its modules are imported, too."""
    open_streams()
    try:
        with interruptible():
            from eagle_ray.cli.main import main

            code = main()
    except KeyboardInterrupt:
        ignore_until_exit()
        with suppress(OSError):  # nothing reads it
            print("eagle-ray: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if "ray" in sys.modules:
        _end_at_once(code)
    return code


def _end_at_once(code: int) -> NoReturn:
    """End this process. Python would free what Ray has left, for a second. main has flushed stdout and ended Ray."""
    logging.shutdown()
    with suppress(OSError, ValueError):  # closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    raise SystemExit(command())
