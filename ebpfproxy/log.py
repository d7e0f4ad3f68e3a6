"""Structured logging: time, level, a constant message, then key=value pairs.

A message never contains a value, so that lines can be counted and searched by message. Code that raises an
error does not log it. Code that catches an error and does not raise it again logs it once.
"""

import faulthandler
import json
import logging
import sys
import threading
import time
import traceback
import warnings
from types import TracebackType
from typing import Any

LIBRARY_MESSAGE = "Message of a library"
"""`logger` is the name of its logger, and `text` its message."""
LIBRARY_WARNING = "Warning of a library"
"""A Python warning, such as a DeprecationWarning. Logged once for each `place`."""
UNEXPECTED_ERROR = "Unexpected error"
"""A bug: an error that nothing handles, in `thread`. The agent ends if the thread is one that it needs."""

DEBUG_VERBOSITY = 4
"""The verbosity (klog's -v) from which on lines of level debug are logged."""

_HANDLER = "ebpfproxy"


def _quoted(value: object) -> str:
    """Return a value as one word: as a JSON string if it has blanks, quotes, `=` or unprintable characters.

    >>> _quoted("10.0.0.1"), _quoted("no such file"), _quoted(0.25)
    ('10.0.0.1', '"no such file"', '0.25')
    """
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not any(character in text for character in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)


class Logger:
    """A logger whose values are keyword arguments: ``log.info(SYNCED, services=3)``."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def _emit(self, level: int, message: str, values: dict[str, Any], trace: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, extra={"values": values}, exc_info=trace)

    def debug(self, message: str, /, **values: Any) -> None:
        self._emit(logging.DEBUG, message, values)

    def info(self, message: str, /, **values: Any) -> None:
        self._emit(logging.INFO, message, values)

    def warning(self, message: str, /, **values: Any) -> None:
        self._emit(logging.WARNING, message, values)

    def error(self, message: str, /, **values: Any) -> None:
        """Log an error. At level debug, add the traceback of the exception that is being handled."""
        self._emit(logging.ERROR, message, values, self._logger.isEnabledFor(logging.DEBUG))


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message, values = _parts(record)
        words = [f"{moment}.{int(record.msecs):03d}Z", record.levelname, message]
        line = " ".join(words + [f"{key}={_quoted(value)}" for key, value in values.items()])
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message, own = _parts(record)
        values = {key: str(value) for key, value in own.items()}
        entry = {"ts": record.created, "level": record.levelname.lower(), "msg": message}
        trace = _trace(self, record)
        if trace:
            values["traceback"] = trace
        return json.dumps(entry | values, ensure_ascii=False)


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """Return the message and the values of a record. The text of a library is a value."""
    values = getattr(record, "values", None)
    if values is None:
        return LIBRARY_MESSAGE, {"logger": record.name, "text": record.getMessage()}
    return record.getMessage(), values


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback of a record, "" if it has none."""
    if record.exc_info and record.exc_info[0] is not None:
        return formatter.formatException(record.exc_info)
    return ""


def set_up(verbosity: int, style: str) -> None:
    """Log to standard error. `verbosity` is klog's: 4 and more is debug. `style` is "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    handler.set_name(_HANDLER)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_verbosity(verbosity)


def set_verbosity(verbosity: int) -> None:
    """Change the verbosity. Any thread may call it."""
    logging.getLogger("ebpfproxy").setLevel(logging.DEBUG if verbosity >= DEBUG_VERBOSITY else logging.INFO)


def silence() -> None:
    """Log nothing: for commands that print what they find."""
    logging.getLogger("ebpfproxy").addHandler(logging.NullHandler())
    logging.getLogger("ebpfproxy").propagate = False


def is_set_up() -> bool:
    """Return whether `set_up` was called, so that standard error has log lines."""
    return any(handler.get_name() == _HANDLER for handler in logging.getLogger().handlers)


def capture() -> None:
    """Log what Python and libraries print to standard error, from now on.

    These are warnings, and errors that nothing handles: of the main thread, of other threads, and of
    destructors. After a fatal signal, such as SIGSEGV, no Python code can run: faulthandler then prints the
    stacks of all threads in its own format.
    """
    warnings.showwarning = _show_warning
    sys.excepthook = _show_error
    threading.excepthook = _show_error_of_thread
    sys.unraisablehook = _show_unraisable
    faulthandler.enable(sys.__stderr__ or 2)


_log = Logger(__name__)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    _log.warning(LIBRARY_WARNING, category=category.__name__, text=message, place=f"{filename}:{lineno}")


def _log_error(thread: str, error: BaseException) -> None:
    trace = "".join(traceback.format_exception(error)).rstrip("\n")
    _log.error(UNEXPECTED_ERROR, thread=thread, error=repr(error), traceback=trace)


def _show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _log_error(threading.current_thread().name, error)


def _show_error_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value:
        _log_error(args.thread.name if args.thread else "", args.exc_value)


def _show_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    if unraisable.exc_value:
        _log_error(threading.current_thread().name, unraisable.exc_value)
