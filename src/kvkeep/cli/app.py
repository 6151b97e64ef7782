"""The commands and their options. Each does its work in a room below and prints what came back."""

from typing import Annotated, Any

import typer

from kvkeep import __version__
from kvkeep.cli import endure, measure
from kvkeep.cli.fuzz import fuzz
from kvkeep.cli.l2_key import l2_key
from kvkeep.cli.quota import quota
from kvkeep.cli.settings import ConfigFile, Json, Sets, Socket, load, print_json, socket_path

app = typer.Typer(
    name="kvkeep",
    help="Keeps the KV cache of LLM engines alive outside the engine.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(measure.bench, name="bench")
app.add_typer(l2_key, name="l2-key")
app.add_typer(quota, name="quota")
app.command()(measure.simulate)
app.command()(endure.chaos)
app.command()(endure.soak)
app.command()(fuzz)
app.command()(measure.demo)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvkeep {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keeps the KV cache of LLM engines alive outside the engine."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def serve(
    config: ConfigFile = None,
    socket: Socket = None,
    group: Annotated[str | None, typer.Option(help="A group that may connect too.")] = None,
    l1_size: Annotated[
        str | None, typer.Option(help="Host memory for KV: 25% (of the limit) or 2GiB.")
    ] = None,
    l2: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="External storage, such as fs:///var/lib/kvkeep?capacity=100GiB; may be repeated.",
        ),
    ] = None,
    numa: Annotated[str | None, typer.Option(help="NUMA nodes for it, such as 0-1.")] = None,
    hugepages: Annotated[str | None, typer.Option(help="off or 2MiB.")] = None,
    eviction: Annotated[str | None, typer.Option(help="Eviction policy.")] = None,
    http_host: Annotated[str | None, typer.Option(help="Address for HTTP.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port for HTTP; 0: any free one.")] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="Serve no HTTP.")] = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --log-format json.")] = False,
) -> None:
    """Run the server of this host until SIGTERM or Ctrl-C."""
    from kvkeep.server.run import serve as run

    if as_json and log_format not in (None, "json"):
        raise typer.BadParameter(f"--json and --log-format {log_format} contradict each other")
    flags = {
        "socket.path": socket,
        "socket.group": group,
        "l1.size": l1_size,
        "l2.backends": " ".join(l2) if l2 else None,
        "l1.numa": numa,
        "l1.hugepages": hugepages,
        "policy.eviction": eviction,
        "http.host": http_host,
        "http.port": http_port,
        "http.enabled": False if no_http else None,
        "log.level": log_level,
        "log.format": "json" if as_json else log_format,
    }
    run(load(config, sets, flags).config)


@app.command()
def status(
    config: ConfigFile = None, socket: Socket = None, sets: Sets = None, as_json: Json = False
) -> None:
    """What the server holds, and who is connected."""
    answer = _ask(socket_path(config, socket, sets), "status")
    if as_json:
        print_json(answer)
    else:
        from kvkeep.cli.show import show_status

        show_status(answer)


@app.command()
def leases(
    config: ConfigFile = None, socket: Socket = None, sets: Sets = None, as_json: Json = False
) -> None:
    """What sessions hold for reading or writing, oldest first."""
    answer = _ask(socket_path(config, socket, sets), "leases")
    if as_json:
        print_json(answer)
    else:
        from kvkeep.cli.show import show_leases

        show_leases(answer)


@app.command()
def explain(
    request: Annotated[
        str, typer.Argument(help="Request id or its beginning; without one: the newest request.")
    ] = "",
    config: ConfigFile = None,
    socket: Socket = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Why a request hit or missed, chunk by chunk, and what happened when."""
    answer = _ask(socket_path(config, socket, sets), "explain", request)
    if as_json:
        print_json(answer)
    else:
        from kvkeep.cli.show import show_explanation

        show_explanation(answer)


@app.command()
def clear(
    force: Annotated[
        bool, typer.Option("--force", help="Also what is being read now; those reads fail.")
    ] = False,
    config: ConfigFile = None,
    socket: Socket = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Forget every chunk in L1."""
    answer = _ask(socket_path(config, socket, sets), "clear", "force" if force else "")
    if as_json:
        print_json(answer)
    else:
        from kvkeep.cli.show import show_cleared

        show_cleared(answer)


@app.command("wait-persisted")
def wait_persisted(
    timeout_s: Annotated[float, typer.Option(help="The most to wait.", min=0)] = 30.0,
    config: ConfigFile = None,
    socket: Socket = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Wait until L2 was given all that L1 holds; exit status 1 if it takes longer or cannot be."""
    from kvkeep.cli.operator import ask
    from kvkeep.cli.show import show_persisted

    path = socket_path(config, socket, sets)
    answer = ask(path, "wait_persisted", str(timeout_s), timeout_s=timeout_s + 5.0)
    if as_json:
        print_json(answer)
    else:
        show_persisted(answer)
    raise typer.Exit(int(not answer["done"]))


@app.command()
def verify(
    place: Annotated[str, typer.Argument(help="The L2: fs:///var/lib/kvkeep, or its directory.")],
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move what is broken aside.")
    ] = False,
    key_file: Annotated[
        str, typer.Option(metavar="FILE", help="l2.key_file, to check encrypted objects too.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Read every object of an L2 and check it; also beside a running server."""
    from kvkeep.cli.verify import run

    raise typer.Exit(run(place, quarantine=quarantine, key_file=key_file, as_json=as_json))


@app.command("config")
def show_configuration(
    config: ConfigFile = None, socket: Socket = None, sets: Sets = None, as_json: Json = False
) -> None:
    """Every setting, its value, and where the value comes from."""
    from kvkeep.config import rows

    found = [
        {"key": key, "value": value, "source": source}
        for key, value, source in rows(load(config, sets, {"socket.path": socket}))
    ]
    if as_json:
        print_json(found)
    else:
        from kvkeep.cli.show import show_config

        show_config(found)


@app.command()
def doctor(
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="What you give vLLM as --kv-transfer-config."),
    ] = None,
    config: ConfigFile = None,
    socket: Socket = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Check this machine for a server and an engine, and say what to fix."""
    from kvkeep.doctor import Status, run_checks, worst

    loaded = load(config, sets, {"socket.path": socket})
    checks = run_checks(loaded.config, kv_transfer_config=kv_transfer_config)
    result = worst(checks)
    if as_json:
        rows = [
            {"name": c.name, "status": c.status.value, "detail": c.detail, "fix": c.fix}
            for c in checks
        ]
        print_json({"status": result.value, "checks": rows})
    else:
        from kvkeep.cli.show import show_checks

        show_checks(checks)
    raise typer.Exit(int(result is Status.FAIL))


def _ask(path: str, what: str, argument: str = "") -> Any:  # noqa: ANN401 - JSON
    from kvkeep.cli.operator import ask

    return ask(path, what, argument)
