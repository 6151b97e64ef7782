"""`kvkeep doctor`: tries what a server and an engine need on this machine, and says what to fix.

A check that fails stops `kvkeep serve` or makes an engine lose its cache; a check that warns costs
something and names it. Nothing here changes the machine.
"""

import os

from kvkeep.config import Config
from kvkeep.doctor.check import Check, Status, worst
from kvkeep.doctor.engine import (
    Installed,
    check_engine_flag,
    check_plugin,
    check_vllm,
    find_installed,
)
from kvkeep.doctor.kernel import check_features, check_kernel
from kvkeep.doctor.memory import check_memory, check_open_files
from kvkeep.doctor.sockets import check_directory, check_http, check_socket, is_somebody_serving
from kvkeep.doctor.storage import check_quotas, check_storage
from kvkeep.engine_flag import engine_flag
from kvkeep.limits import MemoryBudget

__all__ = ["Check", "Installed", "Status", "engine_flag", "run_checks", "worst"]


def run_checks(
    config: Config,
    *,
    kv_transfer_config: str | None = None,
    installed: Installed | None = None,
    budget: MemoryBudget | None = None,
) -> list[Check]:
    """Run every check; what is not given is read from this machine."""
    packages = find_installed(os.environ) if installed is None else installed
    checks = [check_kernel(), *check_features()]
    checks += check_memory(config, budget)
    checks += check_storage(config.l2)
    checks += check_quotas(config.quota)
    checks.append(check_open_files(config))
    checks += [check_directory(config.socket), check_socket(config.socket)]
    path = config.socket.path
    checks.append(check_http(config.http, is_serving=lambda: is_somebody_serving(path)))
    checks += [check_vllm(packages), check_plugin(packages)]
    checks.append(check_engine_flag(kv_transfer_config, path, os.environ))
    return checks
