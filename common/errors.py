"""Errors that a user can cause, and their reporting by scripts."""

from __future__ import annotations

import difflib
import functools
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable

MAX_MESSAGE = 2000  # characters


class UserError(Exception):
    """An error that the user can fix; the message is one sentence that explains how."""


class NonFiniteLoss(UserError):
    """Raised to stop training if a loss or a gradient is infinite or NaN."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a hint for the message about an unknown name, such as " (did you mean 'coinrun'?)".

    The hint lists all choices if none is similar.
    """
    choices = sorted(choices)
    match = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    if match:
        return f" (did you mean '{match[0]}'?)"
    return f" (choose from {', '.join(choices)})"


class Stopped(Exception):
    """Raised after a stop signal, when finished work has been saved.

    Args:
        status: exit status of the script, 128 + the signal's number.
        message: how to resume.
    """

    def __init__(self, status: int, message: str = ""):
        super().__init__(message)
        self.status = status


def script_main(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorate a script's ``main(argv=None)``: user errors become one line and exit status 2.

    Too little memory and every ``OSError``, such as a full disk, count as user errors, also if the
    standard output cannot be written. Ctrl-C prints "stopped" and gives exit status 130. Other
    exceptions keep their traceback. Characters that the locale cannot print, for example in paths,
    are escaped.
    """

    @functools.wraps(main)
    def wrapped(argv: list[str] | None = None) -> int:
        _open_closed_streams()
        threading.excepthook = _leave_os_errors_to_the_main_thread
        if isinstance(sys.stdout, io.TextIOWrapper):  # stderr has this error handler by default
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            status = main(argv) or 0
            sys.stdout.flush()  # Python's own flush at exit would print "Exception ignored"
            return status
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130
        except UserError as error:
            message = str(error)
        except OSError as error:
            where = error.filename or ("" if _has_written_output() else "standard output")
            message = (f"cannot read or write{f' ({where})' if where else ''}: "
                       f"{error.strerror or error}")
        except (MemoryError, RuntimeError) as error:
            reason = " ".join(str(error).split()).rpartition("] . ")[2]
            if reason.startswith("Symlink loop from"):  # Path.resolve up to Python 3.12
                message = reason.replace("Symlink loop from", "a link leads back to itself:")
            elif _is_about_memory(error):
                message = ("there is not enough memory; use smaller batches"
                           + (f": {reason}" if reason else ""))
            else:
                raise
        finally:
            _has_written_output()
        print(f"error: {shortened(message)}", file=sys.stderr)
        return 2

    return wrapped


def shortened(message: str, length: int = MAX_MESSAGE) -> str:
    """Return a message, with its middle cut out if it has more than ``length`` characters."""
    if len(message) <= length:
        return message
    return f"{message[:length // 2]} [...] {message[-length // 2:]}"


def _is_about_memory(error: Exception) -> bool:
    """Return whether an error is an out-of-memory error of Python, numpy or torch."""
    return (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            or "DefaultCPUAllocator" in str(error))


def _has_written_output() -> bool:
    """Flush the standard output; return whether this succeeded. Otherwise what it holds is
    discarded, so that Python does not try again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _open_closed_streams() -> None:
    """Open a null device in place of each closed standard stream.

    Otherwise the next opened file would get the stream's descriptor and receive its output.
    """
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is ``number``
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))


def _leave_os_errors_to_the_main_thread(failure: threading.ExceptHookArgs) -> None:
    """Hook for ``threading.excepthook`` that ignores OS errors.

    On a full disk TensorBoard's writer thread fails, and the error is raised again in the thread
    that uses the writer.
    """
    if not issubclass(failure.exc_type, OSError):
        threading.__excepthook__(failure)
