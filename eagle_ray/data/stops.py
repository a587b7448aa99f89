"""Why a job stops before it is done, each with the exit code that says so.

What is wrong with a configuration is a ConfigError (2); what is wrong with one row is an error row and stops nothing.
"""


class JobStopped(Exception):
    """The job ends here; the same command may go on from what stands in the output directory."""

    exit_code = 5


class TooManyErrors(JobStopped):
    """More error rows than execution.max_error_rate allows."""

    exit_code = 4


class ClusterError(JobStopped):
    """The cluster, its devices or its workers cannot do this job."""


class OutputBusy(JobStopped):
    """Another live driver holds the output directory: the same command works once it has ended."""


class Overtaken(JobStopped):
    """A newer attempt owns the output directory now: this writer must publish nothing more."""


class Incomplete(JobStopped):
    """The files do not hold every id that the input has."""


class OutputMismatch(JobStopped):
    """The output directory belongs to another configuration or input."""

    exit_code = 6


class OutputDamaged(OutputMismatch):
    """A file of the output cannot be read back."""
