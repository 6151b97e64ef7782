"""Options that several commands share: the configuration they make, the JSON they print.

Every key of the configuration can be given with `--set section.key=value`; the ones people type
have a flag of their own. The same key twice is refused: nobody should have to know which one wins.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.config import ENV_FILE, ENV_PREFIX, LoadedConfig, env_name, load_config

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file (default /etc/kvkeep/kvkeep.toml)."),
]
Socket = Annotated[
    str | None, typer.Option("--socket", metavar="PATH", help="The server's control socket.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def load(
    file: Path | None,
    sets: Sequence[str] | None,
    flags: Mapping[str, object],
    *,
    env: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Merge file, environment and flags; raises ConfigError or a usage error."""
    given = {key: value for key, value in flags.items() if value is not None}
    for text in sets or ():
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise typer.BadParameter(f"--set {text}: write it as --set section.key=value")
        if key in given:
            raise typer.BadParameter(f"--set {text}: {key} is given twice")
        given[key] = value
    return load_config(file, os.environ if env is None else env, given)


def socket_path(file: Path | None, socket: str | None, sets: Sequence[str] | None = None) -> str:
    """Where the server is, from the same sources as the server's own configuration.

    Other variables of the environment are not looked at: who asks needs only the socket.
    """
    ours = (ENV_FILE, env_name("socket"))
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENV_PREFIX) or name.startswith(ours)
    }
    return load(file, sets, {"socket.path": socket}, env=env).config.socket.path


def print_json(body: object) -> None:
    """The answer for programs, on stdout."""
    print(json.dumps(body, indent=2))
