"""`kvkeep quota`: what every tenant may take and has; `set` and `unset` change it.

A tenant is a salt, the `cache_salt` of requests; the empty name stands for requests without one.
"""

import json
from typing import Annotated, Any

import typer

from kvkeep.cli.settings import ConfigFile, Json, Sets, Socket, print_json, socket_path

quota = typer.Typer(help="What every tenant (salt) may take of L1 and L2, and what it has.")

Salt = Annotated[str, typer.Argument(help="The cache_salt; '' for requests without one.")]


@quota.callback(invoke_without_command=True)
def _list(
    context: typer.Context,
    config: ConfigFile = None,
    socket: Socket = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """What every tenant (salt) may take of L1 and L2, and what it has."""
    if context.invoked_subcommand is not None:
        if config is not None or socket is not None or sets or as_json:
            raise typer.BadParameter("write options behind the last word of the command")
        return
    answer = _ask(socket_path(config, socket, sets), "quota", "")
    if as_json:
        print_json(answer)
    else:
        from kvkeep.cli.show import show_quotas

        show_quotas(answer)


@quota.command("set")
def set_quota(
    salt: Salt,
    l1: Annotated[str | None, typer.Option(help="Of L1: 10% or 2GiB.")] = None,
    l2: Annotated[str | None, typer.Option(help="Of each L2 backend: 10% or 50GiB.")] = None,
    config: ConfigFile = None,
    socket: Socket = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Limit one tenant, at once; kept over a restart when the server has a quota.file."""
    if l1 is None and l2 is None:
        raise typer.BadParameter("say how much: --l1, --l2 or both, such as 10% or 50GiB")
    order = {"salt": salt, "l1": l1, "l2": l2}
    _order(socket_path(config, socket, sets), "quota_set", order, as_json=as_json)


@quota.command()
def unset(
    salt: Salt,
    config: ConfigFile = None,
    socket: Socket = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Take a tenant's own limits away: the defaults hold for it again."""
    _order(socket_path(config, socket, sets), "quota_unset", {"salt": salt}, as_json=as_json)


def _order(path: str, what: str, order: dict[str, str | None], *, as_json: bool) -> None:
    try:
        str(order["salt"]).encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("the salt is not UTF-8, and no request can have it") from None
    answer = _ask(path, what, json.dumps(order))
    if as_json:
        print_json(answer)
    else:
        from kvkeep.cli.show import show_ordered

        show_ordered(answer)


def _ask(path: str, what: str, argument: str) -> Any:  # noqa: ANN401 - JSON
    from kvkeep.cli.operator import ask

    return ask(path, what, argument)
