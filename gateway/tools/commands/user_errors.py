"""Errors that the user can fix: a message and an exit status instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2


class ChatError(Exception):
    """The gateway refused a chat's request or could not be reached."""


Errors = tuple[type[Exception], ...]


@contextmanager
def user_errors(
    *, usage: Errors = (), failed: Errors = (), interrupted: str | None = None
) -> Iterator[None]:
    """Print errors of these types and exit: `usage` with status 2, `failed` with status 1.

    `interrupted` is printed for Ctrl-C, which is left alone where it is None.
    """
    try:
        yield
    except usage as error:
        status, message = EXIT_USAGE, error_text(error)
    except failed as error:
        status, message = EXIT_FAILED, error_text(error)
    except KeyboardInterrupt:
        if interrupted is None:
            raise
        status, message = EXIT_FAILED, f"interrupted; {interrupted}"
    else:
        return
    complain(message)
    raise typer.Exit(status)


def error_text(error: Exception) -> str:
    """Return an error's text; of an error with details for the operator, the details."""
    return getattr(error, "detail", None) or str(error)


def complain(message: str) -> None:
    """Print what is wrong to standard error, in red."""
    for line in message.splitlines():
        typer.secho(f"outrider: {line}", fg=typer.colors.RED, err=True)
