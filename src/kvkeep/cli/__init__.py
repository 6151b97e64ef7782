"""FOR PEOPLE: the `kvkeep` command.

`app` declares commands, `settings` reads their configuration, `operator` asks a running server,
`show` prints tables. Here is the edge: what was expected to go wrong becomes one sentence on stderr
and an exit status (1 failed, 2 wrong usage, 130 interrupted), never a traceback. Heavy modules are
imported by the command that needs them: `kvkeep serve` has to answer within a second.
"""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from kvkeep.children import Ended, ends_like_ctrl_c
from kvkeep.cli.output import CannotPrint, discard_output, prepare_streams
from kvkeep.errors import KVKeepError

FAILED, WRONG_USAGE, INTERRUPTED, SIGNALLED = 1, 2, 130, 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    prepare_streams()
    if arguments is None:
        ends_like_ctrl_c()
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KVKeepError as error:
        if isinstance(error, CannotPrint):
            discard_output()
        _say(str(error))
        return FAILED
    except Ended as ended:
        return SIGNALLED + ended.number
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `head` does
        discard_output()
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
        command = context.command_path if context is not None else _command(app, given)
        end = "" if text.endswith((".", "?", "!")) else "."
        _say(f"{text}{end} See `{command} --help`.")
        return WRONG_USAGE
    return done if isinstance(done, int) else 0


def _command(app: Any, given: Sequence[str]) -> str:  # noqa: ANN401 - typer stays unimported
    """The command that the arguments begin with: an error of the parser does not name it."""
    from typer.main import get_command

    name = "kvkeep"
    command: Any = get_command(app)
    for word in given:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        name += f" {word}"
    return name


def _say(text: str) -> None:
    from kvkeep.types import printable

    shown = "\n".join(map(printable, text.split("\n")))
    with contextlib.suppress(OSError):  # nobody is left to tell
        print(f"kvkeep: {shown}", file=sys.stderr)
