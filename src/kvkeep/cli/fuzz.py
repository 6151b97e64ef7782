"""`kvkeep fuzz`: bad input against wire, header pages, L2 files and a real server's socket."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.progress import progress
from kvkeep.cli.settings import Json, print_json
from kvkeep.types import printable


def fuzz(
    seconds: Annotated[float, typer.Option(min=0.1, help="For all targets together.")] = 60.0,
    target: Annotated[
        list[str] | None,
        typer.Option(help="wire, header, file or handshake; may be repeated. Default: all."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all chance.")] = 0,
    corpus: Annotated[
        Path | None, typer.Option(metavar="DIR", help="More inputs: a folder for each target.")
    ] = None,
    keep: Annotated[Path, typer.Option(metavar="DIR", help="Where failing inputs go.")] = Path(
        "fuzz-findings"
    ),
    one: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="Run only this input.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Feed bad input of every kind to the places where strangers' bytes come in."""
    from kvkeep.testing.fuzz import TARGETS, Plan, run

    targets = tuple(dict.fromkeys(target or TARGETS))
    for name in targets:
        if name not in TARGETS:
            raise typer.BadParameter(f"--target {name}: known are {', '.join(TARGETS)}")
    if corpus is not None and not any((corpus / name).is_dir() for name in targets):
        raise typer.BadParameter(
            f"--corpus {corpus}: it has no folder of a target ({', '.join(targets)})"
        )
    if keep.exists() and not keep.is_dir():
        raise typer.BadParameter(f"--keep {keep} is not a directory")
    if one is not None:
        raise typer.Exit(_again(one, targets, as_json=as_json))
    with progress() as say:
        report = run(Plan(seconds, targets, seed, keep, corpus), say)
    if as_json:
        print_json(report)
    else:
        _show(report)
    raise typer.Exit(1 if report["failures"] else 0)


def _again(one: Path, targets: tuple[str, ...], *, as_json: bool) -> int:
    """Run one stored input."""
    from kvkeep.testing.fuzz import replay

    if len(targets) != 1:
        raise typer.BadParameter("--input needs one --target")
    try:
        data = one.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"--input {one}: {error.strerror}") from None
    what = replay(targets[0], data)
    if as_json:
        print_json({"target": targets[0], "input": str(one), "what": what})
    else:
        print(printable(f"{targets[0]}: {what or 'nothing is wrong'}"))
    return 1 if what else 0


def _show(report: dict[str, Any]) -> None:
    for name, row in report["targets"].items():
        print(f"{name}: {row['inputs']} inputs, {row['outcomes']} different outcomes")
    for found in report["failures"]:
        print(printable(f"{found['target']}: {found['what']}; again: {found['again']}"))
    print(f"{report['inputs']} inputs in {report['seconds']} s, {len(report['failures'])} failures")
