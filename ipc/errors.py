"""The exceptions a user of Quire can meet, each naming what to change.

Must not know: where an error was raised or how it travels (messages.py carries it, this file names
it).
"""


class QuireError(Exception):
    """Base of every exception that Quire raises on purpose."""


class InvalidParameterError(QuireError, ValueError):
    """A value the user gave is out of range or unknown.

    `parameter` names it; the text gives the allowed range.
    """

    def __init__(self, parameter: str, problem: str):
        super().__init__(parameter, problem)
        self.parameter = parameter
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.parameter}: {self.problem}"


class NotEnoughMemoryError(InvalidParameterError):
    """The weights, or the KV cache of one sequence, do not fit the memory.

    The text gives the largest value that does, if there is one.
    """


class ModelLoadError(QuireError, RuntimeError):
    """The model's files are missing, corrupt, or of an architecture that Quire does not run."""


class EngineUsageError(QuireError, RuntimeError):
    """The engine was called from a fork of its process, or by two threads at once."""


class EnginePausedError(QuireError, RuntimeError):
    """The engine is paused or asleep, and what was asked of it needs it to go on: resume() or
    wake_up() first.
    """


class EngineDeadError(QuireError, RuntimeError):
    """The engine process is gone.

    Every waiter gets this, with the cause (exit code or signal, last words on stderr).
    """


class EngineStartError(EngineDeadError):
    """The engine process did not come up: it died, or missed its deadline.

    The text carries the child's own words.
    """


class RemoteTraceback(Exception):
    """The `__cause__` of an exception that happened in the engine process; prints that process's
    traceback.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
