"""The two ways things go wrong: with one request, or with the engine itself.

Anything else that is raised is a bug and is not caught, but where one row must not end a job (``batch/worker.py``) nor
one sequence that the engine cannot add everybody else's (``engine/async_engine.py``).
"""


class RequestError(Exception):
    """This request cannot be answered; every other one can.

    code: a short stable name such as ``prompt_too_long`` (the ``error_code`` column, OpenAI's ``code``).
    """

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code

    def __reduce__(self):
        return type(self), (self.code, str(self))


class EngineError(Exception):
    """The engine can no longer answer anything: its process should end."""


def one_line(error: BaseException) -> str:
    """Return another library's error message in one line."""
    return " ".join(str(error).split())
