"""The exceptions of Quire's public interface. Each names what to change.

Must not know: where an error is raised, or how messages.py carries it.
"""


class QuireError(Exception):
    """Base class of Quire's exceptions."""


class InvalidParameterError(QuireError, ValueError):
    """A value given by the user is out of range or unknown.

    `parameter` names it; the text gives the allowed range.
    """

    def __init__(self, parameter: str, problem: str):
        super().__init__(parameter, problem)
        self.parameter = parameter
        self.problem = problem

    def add_source(self, source: str) -> None:
        """Says where the value was written, such as "environment QUIRE_PORT"."""
        self.problem += f" (from the {source})"

    def __str__(self) -> str:
        return f"{self.parameter}: {self.problem}"


class NotEnoughMemoryError(InvalidParameterError):
    """The weights, or the KV cache of one sequence, do not fit the memory.

    The text gives the largest value that fits, if there is one.
    """


class ModelLoadError(QuireError, RuntimeError):
    """The model's files are missing, corrupt, or of an unsupported architecture."""


class EngineUsageError(QuireError, RuntimeError):
    """The engine was called from a fork of its process, or by two threads at once."""


class EnginePausedError(QuireError, RuntimeError):
    """The engine is paused or asleep and cannot do this; call resume() or wake_up() first."""


class EngineDeadError(QuireError, RuntimeError):
    """The engine process is gone.

    All waiting calls raise it, with the cause (exit code or signal, last lines of stderr).
    """


class EngineRestartedError(QuireError, RuntimeError):
    """The engine process died during a call that is not repeated, and another has replaced it."""


class EngineStartError(EngineDeadError):
    """The engine process did not start: it died, or exceeded the deadline.

    The text includes the process's own error.
    """


class RemoteTraceback(Exception):
    """The `__cause__` of an exception from the engine process; prints that process's traceback."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
