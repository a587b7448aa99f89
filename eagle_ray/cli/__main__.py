"""Run `python -m eagle_ray.cli` as the command eagle-ray."""

import sys

from eagle_ray.batch.driver.signals import ignore_until_exit, interruptible

INTERRUPTED = 130  # job_errors has it, and imports much


def command() -> int:
    """Run the command of this process. It may be interrupted while its modules are imported, too."""
    try:
        with interruptible():
            from eagle_ray.cli.main import main

            return main()
    except KeyboardInterrupt:
        ignore_until_exit()
        print("eagle-ray: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(command())
