"""`kvkeep soak`, the short form: the books and the descriptors. Memory needs the long one."""

import json

import pytest
from tests.servers import run_kvkeep

REPORTED = {
    "minutes", "rss_slope_bytes_per_hour", "rss_bytes", "fd_growth", "ledger_mismatches",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_counters_are_what_the_clients_counted() -> None:
    done = run_kvkeep("soak", "--minutes", 0.35, "--seed", 1, "--json", timeout_s=200)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report.keys() >= REPORTED
    assert (report["ledger_mismatches"], report["fd_growth"], report["what"]) == (0, 0, []), report
    assert done.returncode == 0
    assert report["from_l2_chunks"] > 0
    assert report["stored_bytes"] > 0
    assert report["verified_bytes"] > report["stored_bytes"]
    assert report["rss_bytes"] > 1 << 20
    assert not report["rss_judged"]
