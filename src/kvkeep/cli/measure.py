"""The commands that measure and prove: bench, simulate, demo. Minutes long, with progress."""

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.progress import progress
from kvkeep.cli.settings import Json, print_json

bench = typer.Typer(help="Measure on this machine.", rich_markup_mode=None)


@bench.command("object")
def bench_object(
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of one request.")] = 4_096,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per shape; medians are kept.")] = 11,
    shape: Annotated[
        list[str] | None, typer.Option(help="SmolLM2-135M or 8B; may be repeated. Default: both.")
    ] = None,
    socket: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A running server, instead of one of the bench's own."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Store, retrieve and look up against memcpy, with a server process of its own."""
    from kvkeep.bench.object import Plan, run_object_bench
    from kvkeep.bench.shapes import SHAPES

    for name in shape or ():
        if name not in SHAPES:
            raise typer.BadParameter(f"--shape {name}: known are {', '.join(SHAPES)}")
    plan = Plan(tokens, rounds, tuple(shape or SHAPES), socket)
    with progress() as say:
        report = run_object_bench(plan, say)
    if as_json:
        print_json(report)
    else:
        from kvkeep.cli.show import show_object_bench

        show_object_bench(report)
    raise typer.Exit(0 if all(row["verified"] for row in report["shapes"]) else 1)


@bench.command("engine")
def bench_engine(
    prompt_tokens: Annotated[int, typer.Option(min=512, help="Tokens of the prompt.")] = 3_000,
    pairs: Annotated[int, typer.Option(min=1, help="Requests with and without kvkeep.")] = 20,
    as_json: Json = False,
) -> None:
    """Time to first token of a real vLLM: cold, its own hit, a hit in L1; and what a miss costs."""
    run_engine_bench = import_module("kvkeep.bench.engine").run_engine_bench
    with progress() as say:
        report: dict[str, Any] = run_engine_bench(
            prompt_tokens=prompt_tokens, pairs=pairs, progress=say
        )
    if as_json:
        print_json(report)
    else:
        from kvkeep.cli.show import show_engine_bench

        show_engine_bench(report)
    raise typer.Exit(0 if report["same_tokens"] else 1)


@bench.command("backend")
def bench_backend(
    name: Annotated[str, typer.Argument(help="fs.")],
    place: Annotated[
        str,
        typer.Option(metavar="PLACE", help="A directory on the disk to measure, or an fs:// URL."),
    ] = ".",
    objects: Annotated[int, typer.Option(min=1, help="Objects of each round.")] = 256,
    object_bytes: Annotated[
        int, typer.Option(min=1, help="Size of each; default: a chunk of SmolLM2-135M.")
    ] = 5_898_240,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are kept.")] = 5,
    encrypted: Annotated[
        bool, typer.Option("--encrypted", help="Encrypt; the plain files stay plain.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put and get through an L2 backend, against plain files on the same disk."""
    from kvkeep.bench.backend import Amounts, run

    if name != "fs":
        raise typer.BadParameter(f"{name}: known are fs")
    with progress() as say:
        amounts = Amounts(objects, object_bytes, rounds)
        report = run(place, amounts, encrypted=encrypted, progress=say)
    if as_json:
        print_json(report)
    else:
        from kvkeep.cli.show import show_backend_bench

        show_backend_bench(report)
    raise typer.Exit(0 if report["verified"] else 1)


@bench.command("index")
def bench_index(
    chunks: Annotated[
        int, typer.Option(min=1_000, max=10_000_000, help="Resident chunks.")
    ] = 1_000_000,
    as_json: Json = False,
) -> None:
    """What a resident chunk costs the server in memory, and how long its calls take among many."""
    from kvkeep.bench.index import run

    with progress() as say:
        report = run(chunks, say)
    if as_json:
        print_json(report)
    else:
        from kvkeep.cli.show import show_index_bench

        show_index_bench(report)


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many runs.")] = 20,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each run; default: as many as it has.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=256, help="Processes; default: one per processor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the real core, service and protocol in virtual time with faults, and check every step."""
    from kvkeep.testing.simulate import run

    with progress() as say:
        report = run(
            seeds,
            first_seed,
            steps,
            progress=lambda done, of: say(f"{done} of {of} seeds"),
            jobs=jobs or min(len(os.sched_getaffinity(0)), seeds),
        )
    if as_json:
        print_json(report)
    else:
        from kvkeep.cli.show import show_simulation

        show_simulation(report)
    raise typer.Exit(1 if report["failures"] else 0)


def demo(
    json_path: Annotated[
        Path, typer.Option("--json", metavar="PATH", help="Where the report is written.")
    ] = Path("demo.json"),
    l1_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Host memory for the demo's server.")
    ] = "2GiB",
    document: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Text of 3,000 tokens or more to ask about.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A model directory; default: SmolLM2-135M.")
    ] = None,
) -> None:
    """Show the main job with a real vLLM: KV outlives the engine, answers stay the same."""
    from kvkeep.cli.demo import run_demo

    raise typer.Exit(run_demo(json_path, l1_size=l1_size, document=document, model=model))
