"""What a check is: a name, how it ended, what was found, what to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried; `fix` is empty when there is nothing to do."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def worst(checks: Sequence[Check]) -> Status:
    """The worst status of all; FAIL is a non-zero exit."""
    found = {check.status for check in checks}
    return next((status for status in (Status.FAIL, Status.WARN) if status in found), Status.OK)
