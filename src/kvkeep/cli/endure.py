"""The commands that wear a server out: chaos and soak. Real processes, minutes to hours."""

from typing import Annotated, Any

import typer

from kvkeep.cli.progress import progress
from kvkeep.cli.settings import Json, print_json
from kvkeep.limits import format_bytes


def chaos(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the strikes last.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="What is struck, and when.")] = 0,
    as_json: Json = False,
) -> None:
    """Kill, stop and continue a real server and its clients under load, and check every byte."""
    from kvkeep.testing.chaos import Plan, run

    with progress() as say:
        report = run(Plan(minutes, seed), say)
    if as_json:
        print_json(report)
    else:
        _show_chaos(report)
    bad = report["wrong_bytes"] or report["leaked_bytes"] or report["failed_requests"]
    raise typer.Exit(1 if bad else 0)


def soak(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the load lasts.")] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="What the clients do.")] = 0,
    as_json: Json = False,
) -> None:
    """Load a real server steadily: its memory, its descriptors, and its counters to the byte."""
    from kvkeep.testing.soak import run

    with progress() as say:
        report = run(minutes, seed, say)
    if as_json:
        print_json(report)
    else:
        _show_soak(report)
    raise typer.Exit(0 if report["clean"] else 1)


def _show_chaos(report: dict[str, Any]) -> None:
    print(
        f"{report['kills']} kills and {report['stops']} stops in {report['minutes']} minutes, "
        f"{report['server_lives']} lives of the server, {report['operations']} operations"
    )
    print(f"{report['verified_chunks']} chunks verified, {report['verified_from_l2']} from L2")
    print(
        f"wrong bytes {report['wrong_bytes']}, leaked bytes {report['leaked_bytes']}, "
        f"failed requests {report['failed_requests']}, "
        f"slowest /healthz {report['max_healthz_s']:.3f} s"
    )
    _show_what(report)


def _show_soak(report: dict[str, Any]) -> None:
    error = report["rss_slope_error"]
    slope = f"{report['rss_slope_bytes_per_hour'] / 1e6:+.2f} MB per hour"
    print(
        f"{report['operations']} operations in {report['minutes']} minutes: "
        f"{format_bytes(report['stored_bytes'])} stored, "
        f"{format_bytes(report['verified_bytes'])} read and verified"
    )
    sure = "unknown" if error is None else f"{error / 1e6:.2f} MB"
    short = "" if report["rss_judged"] else ": too short a run to judge it"
    print(f"memory {report['rss_bytes'] / 1e6:.1f} MB, {slope}, error {sure}{short}")
    print(
        f"descriptors grew by {report['fd_growth']}, "
        f"{report['ledger_mismatches']} of {report['ledger_lines']} lines of the books differ"
    )
    _show_what(report)


def _show_what(report: dict[str, Any]) -> None:
    for line in report["what"]:
        print(f"  {line}")
