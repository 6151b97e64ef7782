"""Structured logs: one line per change of state, as text or JSON, to stderr.

Names come from clients: a line of text shows their control characters as \\xNN, JSON escapes them.
"""

import json
import logging
import sys
from datetime import UTC, datetime

from kvkeep.types import printable

LOGGER = "kvkeep.server"


class _Formatter(logging.Formatter):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = getattr(record, "fields", {})
        head = {"at": at, "level": record.levelname.lower(), "event": record.getMessage()}
        if self._as_json:
            return json.dumps({**head, **fields}, default=str)
        tail = " ".join(f"{key}={printable(str(value))}" for key, value in fields.items())
        return f"{at} {head['level']:<7} {head['event']} {tail}".rstrip()


class _Forward(logging.Handler):
    """Another library's lines, as events of ours."""

    def __init__(self, log: "EventLog", event: str) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._event = event

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        what = record.getMessage().strip()
        self._log.warn(self._event, what=what, error=repr(error) if error else None)


class EventLog:
    """`log("joined", session=..., pid=...)`; fields that are None are left out.

    The field `level` is the line's level; without it, info.
    """

    def __init__(self, level: str, *, as_json: bool) -> None:
        self._logger = logging.getLogger(LOGGER)
        self._logger.setLevel(level.upper())
        self._logger.propagate = False
        for handler in list(self._logger.handlers):
            self._logger.removeHandler(handler)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter(as_json=as_json))
        self._logger.addHandler(handler)

    def __call__(self, event: str, **fields: object) -> None:
        """One line."""
        level = str(fields.pop("level", "info"))
        self._write(logging.getLevelNamesMapping()[level.upper()], event, fields)

    def warn(self, event: str, **fields: object) -> None:
        """One line at level warning."""
        self._write(logging.WARNING, event, fields)

    def adopt(self, logger_name: str, event: str) -> None:
        """Warnings and errors of that logger become lines `event`; the rest is silent."""
        logger = logging.getLogger(logger_name)
        logger.handlers = [_Forward(self, event)]
        logger.setLevel(logging.WARNING)
        logger.propagate = False

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        kept = {key: value for key, value in fields.items() if value is not None}
        self._logger.log(level, event, extra={"fields": kept})
