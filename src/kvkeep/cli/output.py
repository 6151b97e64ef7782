"""Where commands print: a stdout whose failures are told from all other OSErrors.

Programs print through `sys.stdout` as always, and so do typer and rich. A full disk becomes
`CannotPrint`; a reader that left stays a BrokenPipeError; a stream that was closed before the start
swallows what is printed, so that file descriptors 1 and 2 are never those of a socket.
"""

import io
import os
import sys

from kvkeep.errors import KVKeepError


class CannotPrint(KVKeepError):
    """The output cannot be written: a full disk, a terminal that went away."""


def prepare_streams() -> None:
    """Once at the start; streams that somebody has put in place of the process's own stay."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    elif sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Output(
            sys.stdout.buffer,
            sys.stdout.encoding,
            sys.stdout.errors,
            line_buffering=sys.stdout.line_buffering,
        )
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def discard_output() -> None:
    """Drop what could not be written: the interpreter would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Output(io.TextIOWrapper):
    """The process's stdout."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise _judged(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _judged(error) from None


def _judged(error: OSError) -> Exception:
    if isinstance(error, BrokenPipeError):
        return error
    return CannotPrint(f"cannot write the output: {error.strerror}")
