"""Packs an exception as a message, and raises it in the caller with the same type.

Must not know: which exception comes from where.
"""

from __future__ import annotations

import traceback

from . import errors
from .messages import Failed

# Exceptions that keep their type: none that a peer could use to end the caller (SystemExit,
# KeyboardInterrupt, StopIteration), and none that need more than a string (UnicodeDecodeError).
_BY_NAME: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        ArithmeticError,
        AssertionError,
        AttributeError,
        BufferError,
        ConnectionError,
        EOFError,
        FileExistsError,
        FileNotFoundError,
        FloatingPointError,
        ImportError,
        IndexError,
        IsADirectoryError,
        KeyError,
        LookupError,
        MemoryError,
        ModuleNotFoundError,
        NameError,
        NotADirectoryError,
        NotImplementedError,
        OSError,
        OverflowError,
        PermissionError,
        RecursionError,
        RuntimeError,
        TimeoutError,
        TypeError,
        ValueError,
        ZeroDivisionError,
        errors.QuireError,
        errors.ModelLoadError,
        errors.EngineDeadError,
        errors.EngineStartError,
        errors.EnginePausedError,
    )
}
_WITH_PARAMETER = {
    cls.__name__: cls for cls in (errors.InvalidParameterError, errors.NotEnoughMemoryError)
}


def pack_exception(error: BaseException) -> Failed:
    """The message that carries `error` to the other process."""
    # str() of a KeyError is the repr of its key, which would be quoted twice.
    message = (
        error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)
    )
    parameter = None
    if isinstance(error, errors.InvalidParameterError):
        parameter, message = error.parameter, error.problem
    text = "".join(traceback.format_exception(error))
    return Failed(type(error).__name__, _encodable(message), _encodable(text), parameter)


def unpack_exception(failed: Failed, default: type[Exception]) -> Exception:
    """The exception to raise in the caller: the original type, or `default` naming an unknown type.

    Its `__cause__` is a RemoteTraceback.
    """
    if failed.error_type in _WITH_PARAMETER:
        error: Exception = _WITH_PARAMETER[failed.error_type](
            failed.parameter or "?", failed.message
        )
    elif failed.error_type in _BY_NAME:
        error = _BY_NAME[failed.error_type](failed.message)
    else:
        error = default(f"{failed.error_type}: {failed.message}")
    error.__cause__ = errors.RemoteTraceback(failed.traceback)
    return error


def _encodable(text: str) -> str:
    """Replaces lone surrogates, which paths may hold and UTF-8 messages cannot."""
    return text.encode("utf-8", "backslashreplace").decode()
