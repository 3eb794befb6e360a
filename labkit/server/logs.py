"""The log: one line an event, each with the id of the request that it is about, as text or as JSON."""

from __future__ import annotations

import contextvars
import logging
import sys

from pythonjsonlogger.json import JsonFormatter

NO_REQUEST = "-"
current_request_id = contextvars.ContextVar("current_request_id", default=NO_REQUEST)


class WithRequestId(logging.Filter):
    """Gives each record the id of the request in whose task it was made, unless it says one itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = current_request_id.get()
        return True


def formatter(log_format: str) -> logging.Formatter:
    """`json`: one object a line, with whatever a record has in `extra`. `text`: the same for people, without it."""
    if log_format == "json":
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        return JsonFormatter(
            "%(asctime)s %(levelname)s %(name)s %(request_id)s %(message)s",
            "%Y-%m-%dT%H:%M:%S%z",
            rename_fields=names,
        )
    return logging.Formatter("%(asctime)s %(levelname)s %(request_id)s %(message)s")


def set_up(level: str, log_format: str) -> None:
    """Send everything that is logged in this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(WithRequestId())
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
