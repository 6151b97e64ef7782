"""One real server for the tests that leave it as they found it."""

from collections.abc import Iterator

import pytest
from tests.servers import Server, running_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"l1.session_staging_fraction": 1, "limits.inprogress_after_s": 0.3}
    with running_server(tmp_path_factory.mktemp("server"), settings=settings) as running:
        yield running
