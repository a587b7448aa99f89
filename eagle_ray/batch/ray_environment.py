"""What Ray reads from the environment as it is imported, so what must be set before that.

Does not import Ray.

    >>> address = prepare("auto")
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
    """The address to connect to: "auto" is the cluster that RAY_ADDRESS names, as within a Ray job, else LOCAL.

    QUIET leaves what the user has set in the environment as it is. LOOPBACK does not: it keeps Ray on 127.0.0.1.
    """
    address = os.environ.get("RAY_ADDRESS", LOCAL) if address == "auto" else address
    for name, value in QUIET_VARIABLES.items():
        os.environ.setdefault(name, value)
    if address == LOCAL:
        os.environ.update(LOOPBACK_VARIABLES)
    return address
