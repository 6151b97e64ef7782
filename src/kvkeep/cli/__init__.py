"""FOR PEOPLE: the `kvkeep` command.

`app` declares commands, `settings` reads their configuration, `operator` asks a running server,
`show` prints tables. Here is the edge: what was expected to go wrong becomes one sentence on stderr
and an exit status (1 failed, 2 wrong usage, 130 interrupted), never a traceback. Heavy modules are
imported by the command that needs them: `kvkeep serve` has to answer within a second.
"""

import os
import sys
from collections.abc import Sequence

from kvkeep.errors import KVKeepError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    try:
        return _run(arguments)
    except KVKeepError as error:
        _say(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(arguments: Sequence[str] | None) -> int:
    import typer

    from kvkeep.cli.app import app

    # typer carries click inside in some versions and depends on it in others.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    click_error: type[Exception] = typer.BadParameter.__mro__[2]
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        done = app(args=given, prog_name="kvkeep", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except click_error as error:
        text = " ".join(str(getattr(error, "format_message", error.__str__)()).split())
        if not isinstance(error, usage_error):
            _say(text)
            return FAILED
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "kvkeep"
        end = "" if text.endswith((".", "?", "!")) else "."
        _say(f"{text}{end} See `{command} --help`.")
        return WRONG_USAGE
    return done if isinstance(done, int) else 0


def _say(text: str) -> None:
    print(f"kvkeep: {text}", file=sys.stderr)
