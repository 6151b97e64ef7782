"""Encrypted L2 from the command line: keys are made; a scrub and the doctor use them."""

import asyncio
import os
from pathlib import Path

import pytest
from tests.backends.fs_cases import CAPACITY_BYTES, path_of, settings, wanted
from tests.cli.conftest import Command

from kvkeep.backends.encrypted import Sealer
from kvkeep.backends.fs import FsBackend
from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.keyring import load_keys
from kvkeep.backends.registry import compose
from kvkeep.config import L2Config
from kvkeep.doctor.check import Status
from kvkeep.doctor.storage import check_storage
from kvkeep.testing.backend_contract import SALTED, SPACE, key
from kvkeep.types import IoOutcome

LENGTH = 10_000


@pytest.fixture
def keys(tmp_path: Path, kvkeep: Command) -> Path:
    path = tmp_path / "l2.keys"
    assert kvkeep("l2-key", "new", path, "--name", "first").code == 0
    return path


async def fill(root: Path, keys: Path | None, *numbers: int) -> None:
    """Store objects as the server does."""
    sealer = None if keys is None else Sealer(load_keys(str(keys)))
    store = compose(
        FsBackend(settings(root, CAPACITY_BYTES)),
        settings=GuardSettings(),
        log=lambda event, **fields: None,
        sealer=sealer,
    )
    await store.open()
    while store.usage().scanned < 1.0:
        await asyncio.sleep(0.002)
    for space in (SPACE, SALTED):
        many = [wanted(n, LENGTH, space=space, fill=True) for n in numbers]
        assert list(await store.put(many)) == [IoOutcome.OK] * len(numbers)
        targets = [wanted(n, LENGTH, space=space) for n in numbers]
        assert list(await store.get(targets)) == [IoOutcome.OK] * len(numbers)
    await store.close()


def test_keys_are_made_listed_and_never_shown(tmp_path: Path, kvkeep: Command, keys: Path) -> None:
    done = kvkeep("l2-key", "new", keys, "--name", "second")
    assert (done.code, "second encrypts from the next start on, 1 more" in done.out) == (0, True)
    listed = kvkeep("l2-key", "list", keys)
    assert listed.out.splitlines() == ["second  encrypts, decrypts", "first  decrypts"]
    report = kvkeep("l2-key", "list", keys, "--json").json
    assert report == {"file": str(keys), "active": "second", "keys": ["second", "first"]}
    assert kvkeep("l2-key", "new", tmp_path / "other", "--json").json["keys"][0].startswith("k-")
    secrets = [line.split()[1] for line in keys.read_text().splitlines()[1:]]
    assert len(secrets) == 2
    assert not any(secret in done.out + listed.out for secret in secrets)
    keys.chmod(0o644)
    assert "chmod 600" in kvkeep("l2-key", "list", keys).sentence
    assert "chmod 600" in kvkeep("l2-key", "new", keys).sentence
    assert "no key file is named" in kvkeep("l2-key", "new", "").sentence


def test_a_scrub_checks_what_it_has_the_keys_for(
    tmp_path: Path, kvkeep: Command, keys: Path
) -> None:
    root = tmp_path / "l2"
    asyncio.run(fill(root, keys, 1, 2, 3))
    asyncio.run(fill(root, None, 4))
    assert kvkeep("l2-key", "new", keys).code == 0
    asyncio.run(fill(root, keys, 5))
    whole = kvkeep("verify", root, "--key-file", keys, "--json")
    assert (whole.code, whole.json["objects"], whole.json["unchecked"]) == (0, 10, 0)
    blind = kvkeep("verify", root, "--json")
    assert (blind.code, blind.json["broken"], blind.json["unchecked"]) == (1, [], 8)
    assert "8 not checked (no key for them)" in kvkeep("verify", root).out
    missing = kvkeep("verify", root, "--key-file", tmp_path / "none").sentence
    assert f"--key-file {tmp_path}/none cannot be read" in missing
    assert "l2.key_file" not in missing
    with path_of(root, key(2)).open("r+b") as file:
        file.seek(4_096 + 77)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1]))
    os.truncate(path_of(root, key(3)), 4_096 + 5)
    found = kvkeep("verify", root, "--key-file", keys, "--quarantine", "--json")
    assert (found.code, sorted(row["why"] for row in found.json["broken"])) == (
        1,
        ["tag", "truncated"],
    )
    again = kvkeep("verify", root, "--key-file", keys, "--json")
    assert (again.code, again.json["objects"]) == (0, 8)


def test_the_doctor_reads_the_keys(tmp_path: Path, keys: Path) -> None:
    url = f"fs://{tmp_path}/l2?capacity=1MiB"
    config = L2Config(backends=url, key_file=str(keys))
    first, _ = check_storage(config)
    assert first.status is Status.OK
    assert "encrypted under first, 0 more" in first.detail
    keys.chmod(0o640)
    first, _ = check_storage(config)
    assert first.status is Status.FAIL
    assert first.fix == f"chmod 600 {keys}"


def test_settings_that_are_refused(kvkeep: Command, tmp_path: Path) -> None:
    relative = kvkeep("config", "--set", "l2.key_file=keys")
    assert "l2.key_file" in relative.sentence
    assert "absolute" in relative.sentence
    missing = kvkeep(
        "serve", "--socket", tmp_path / "k.sock", "--set", f"l2.key_file={tmp_path}/none"
    )
    assert "l2.key_file" in missing.sentence
    assert not (tmp_path / "k.sock").exists()
