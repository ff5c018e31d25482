"""How Quire's processes write their log: as text or as JSON, on stderr. What cannot be written is
lost.

Must not know: who logs what.

A record may carry `fields`, a dict (extra={"fields": ...}). Text leaves them out, since the message
says the same; in JSON each is a key of its own. Where a server has more than one model, a
record also names the one that it is about.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s"
FORMATS = ("text", "json")
# the model that a task works for, where a server has more than one
_model: ContextVar[str] = ContextVar("quire_log_model", default="")


class JsonFormatter(logging.Formatter):
    """One object per line: time (RFC 3339, UTC), level, logger, message, a record's fields, and
    `exception` with its traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        entry = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **({"model": model} if (model := getattr(record, "model", "")) else {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class ModelFilter(logging.Filter):
    """Adds the model to records. `model`: of all records; "": each task names one."""

    def __init__(self, model: str):
        super().__init__()
        self.model = model

    def filter(self, record: logging.LogRecord) -> bool:
        model = _model.get() or self.model
        record.__dict__.update(model=model, about=f"[{model}] " if model else "")
        return True


class LossyFile(io.FileIO):
    """A file that takes everything: what the system refuses (a full disk, a reader that has left)
    is lost.
    """

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            try:
                written = super().write(rest)
            except OSError:
                break
            if not written:  # a pipe that does not block is full
                break
            rest = rest[written:]
        return size


def make_stderr_lossy() -> None:
    """From here on nothing that this process writes to stderr raises.

    Leaves a replaced stderr unchanged.
    """
    stderr = sys.stderr
    if stderr is not sys.__stderr__ or stderr is None:
        return
    sys.stderr = io.TextIOWrapper(
        LossyFile(stderr.fileno(), "w", closefd=False),  # type: ignore[arg-type]
        encoding=stderr.encoding,
        errors=stderr.errors,
        write_through=True,
    )


def configure_logging(level: int, log_format: str, model: str = "") -> None:
    """Configures the log of a process that must not fail with it: makes stderr lossy, and adds a
    handler unless the root logger has one. `log_format`: one of FORMATS. `model`: the one that all
    lines are about, or "".
    """
    make_stderr_lossy()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT))
    handler.addFilter(ModelFilter(model))
    if not logging.getLogger().handlers:
        # below INFO, libraries only report on themselves
        logging.basicConfig(level=max(level, logging.INFO), handlers=[handler])
        logging.getLogger("quire").setLevel(level)


def log_level_of(name: str) -> int:
    """The number of a level: "debug", "info", "warning" or "error"."""
    return logging.getLevelNamesMapping()[name.upper()]


def current_format() -> str:
    """The format that this process writes, for a child that is to write the same."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(h.formatter, JsonFormatter) for h in handlers) else "text"


def name_model(model: str) -> None:
    """From now on, the lines of this task and of what it starts name the model."""
    _model.set(model)


def current_model() -> str:
    """The model that lines of this task name; "": none."""
    filters = (f for handler in logging.getLogger().handlers for f in handler.filters)
    of_process = (f.model for f in filters if isinstance(f, ModelFilter))
    return _model.get() or next(of_process, "")


def announce(logger: logging.Logger, program: str, message: str, level: int = logging.INFO) -> None:
    """Reports to the user of `program`: a line on stderr or, where the log is JSON, a record."""
    if current_format() == "json":
        logger.log(level, "%s", message)
    else:
        print(f"{program}: {message}", file=sys.stderr, flush=True)
