"""What the engine tests share.

One server per test module, for the tests that do not kill it; every scenario clears it first.
"""

import tempfile
from collections.abc import Iterator

import pytest
from tests.engine.worker_parts import Parts
from tests.servers import running_server


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    settings = {"l1.session_staging_fraction": 1}
    with running_server(folder, l1_size="768MiB", settings=settings) as server:
        yield server.socket


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.close()


@pytest.fixture
def short_path() -> Iterator[str]:
    """Where a scenario's own server makes its socket."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as folder:
        yield f"{folder}/k.sock"
