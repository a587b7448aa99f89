"""Check the process's limit on address space (``ulimit -v``) before a library aborts because of it.

Below what they need, pyarrow, torch and Ray end the process with a traceback or an abort in C++, or hang.

    $ (ulimit -v 1000000; eagle-ray demo)
    eagle-ray: ulimit -v: this shell limits a process to 1.0 GB of address space, and Ray needs 3.5 GB. Raise it ...
"""

from __future__ import annotations

import re
import resource

from eagle_ray.runs.job_errors import ClusterUnfit

# Least address space with which a command ended well, measured on 2 cores with the embedded pair: `run` ended well with
# 3.58 GB and not with 3.07 GB, `compare` of methods with 3.07 GB and not with 2.56 GB, `report` with 0.51 GB, not 0.31.
NEEDED_GB = {"Ray": 3.5, "torch": 3.0, "pyarrow": 0.5}
AMPLE = 2.0  # times what is needed: larger models and machines with more cores take more than was measured
GB = 10**9
REMEDY = "Raise it (ulimit -v unlimited), or start the command where no such limit is set"
OUT_OF_MEMORY = re.compile(
    r"failed to map segment|can't start new thread|can(no|')t allocate memory|bad_alloc", re.IGNORECASE
)


def check_address_space(library: str) -> str:
    """Return a warning if the limit may be too small for the library, "" if it is ample or absent.

    Raises ClusterUnfit if the limit is below what the library needs.
    """
    limit = _limit_gb()
    needed = NEEDED_GB[library]
    if limit is None or limit >= AMPLE * needed:
        return ""
    said = f"ulimit -v: this shell limits a process to {limit:.1f} GB of address space, and {library} needs"
    if limit < needed:
        raise ClusterUnfit(f"{said} {needed} GB. {REMEDY}.")
    return f"{said} {needed} GB or more. If memory runs out: {REMEDY[0].lower()}{REMEDY[1:]}."


def out_of_memory_words(error: Exception) -> str:
    """Return one line for an error that reports exhausted memory, "" for other errors."""
    reason = str(error).strip().partition("\n")[0]
    if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(reason):
        return ""
    limit = _limit_gb()
    said = f"out of memory ({reason or type(error).__name__})"
    if limit is None:
        return f"{said}. Free memory on this machine, or use a larger one."
    return f"{said}: this shell limits a process to {limit:.1f} GB of address space (ulimit -v). {REMEDY}."


def _limit_gb() -> float | None:
    """Return the soft limit in GB, or None."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit / GB
