"""A directory with L2 whose end is looked at whatever the test did."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.core.shell import Shell

MakeShell = Callable[..., Shell]


@pytest.fixture
def shell() -> Iterator[MakeShell]:
    """Make one; when the test is over, everything in it ends and the memory is counted."""
    made: list[Shell] = []

    def make(*args: Any, **kwargs: Any) -> Shell:
        made.append(Shell(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.rest()
