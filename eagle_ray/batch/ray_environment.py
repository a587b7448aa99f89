"""Environment variables that Ray reads at import, so they must be set before it. Does not import Ray.

>>> address = prepare_ray_environment("auto")
>>> from eagle_ray.batch.cluster import connect
>>> connect(address)
"""

from __future__ import annotations

import os

LOCAL = "local"
RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set for the driver of a Ray job
QUIET_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no network at run time
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning at each start
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # else Ray's core logs an error about Ray Data's own actors at each start
}
LOOPBACK_VARIABLES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"
}  # else Ray takes 127.0.0.1 for the machine's own address


def prepare_ray_environment(address: str) -> str:
    """Set the variables and return the address to connect to, as ray_address does.

    QUIET keeps variables that the user has set. LOOPBACK overrides them: it keeps Ray on 127.0.0.1.
    """
    address = ray_address(address)
    for name, value in QUIET_VARIABLES.items():
        os.environ.setdefault(name, value)
    if address == LOCAL:
        os.environ.update(LOOPBACK_VARIABLES)
    return address


def ray_address(address: str) -> str:
    """Return the address to connect to: "auto" is RAY_ADDRESS's cluster, as within a Ray job, or else LOCAL."""
    return os.environ.get("RAY_ADDRESS", LOCAL) if address == "auto" else address
