"""What a command says, and where: results on stdout, the rest on stderr and in a log; failures as exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape

from unmerge.cli.spelling import Flag, as_flags
from unmerge.distributed.processes import is_heard, size
from unmerge.errors import DataError, UnmergeError, UnmergeWarning

PANEL = "What is printed"
INTERRUPTED = 130
_PART = re.compile(r"\.([^/\\]+)\.\w{8}\.part\b([/\\]\1)?")  # where a file or directory is until it is whole


class Refused(DataError):
    """A request that its verdict speaks against, where the user asked to stop then."""

    exit_code = 3


@dataclass(frozen=True)
class Common:
    """The flags that every subcommand has."""

    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, for machines.", rich_help_panel=PANEL)
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.", rich_help_panel=PANEL)] = (
        False
    )
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where in the code an error arose.", rich_help_panel=PANEL)
    ] = False


class Output:
    """Notes go to the terminal's stderr, if there is one, and to the log; results to stdout."""

    def __init__(self, common: Common, flags: Mapping[str, Flag] | None = None) -> None:
        self.is_json, self.debug = common.json, common.debug
        self._flags = flags or {}
        self.log: list[str] = []
        self._stdout: TextIO = sys.stdout
        self._notes = Console(stderr=True, quiet=common.quiet or not sys.stderr.isatty(), highlight=False)
        self._results = Console(highlight=False, quiet=common.json)

    def note(self, message: str) -> None:
        """Say what is being done; only a person at a terminal, and the log, hears it."""
        self._record(message)
        self._notes.print(escape(message), style="dim")

    def warn(self, message: str) -> None:
        self._record(f"warning: {message}")
        print(f"warning: {message}", file=sys.stderr)

    def heading(self, message: str) -> None:
        self._record(message)
        self._results.print(f"[bold]{escape(message)}[/bold]", soft_wrap=True)

    def show(self, message: str) -> None:
        """A result, as wide as it is: a table that is wrapped cannot be read."""
        self._record(message)
        if not self.is_json:
            print(message)

    def spelled(self, message: str) -> str:
        """What the library says, with the flags of this command in place of Python's keywords."""
        return as_flags(message, self._flags)

    def result(self, value: dict[str, Any]) -> None:
        """The one JSON object of --json."""
        if self.is_json:
            print(json.dumps(value, default=str), file=self._stdout, flush=True)

    def _record(self, message: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self.log += [f"{stamp}  {line}".rstrip() for line in message.splitlines()]


@contextlib.contextmanager
def speaking(common: Common, flags: Mapping[str, Flag] | None = None) -> Iterator[Output]:
    """An output inside which failures become a message and an exit code."""
    output = Output(common, flags)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_warnings_to(output))
        stack.enter_context(_terminated_as_interrupt())
        if common.quiet:
            stack.enter_context(contextlib.redirect_stderr(_NoTerminal(sys.stderr)))
        if common.json:
            # What a user's own functions print must not stand beside the one object.
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            yield output
        except (UnmergeError, OSError, MemoryError) as error:
            if common.debug:
                raise
            _fail(output, output.spelled(_message(error)), getattr(error, "exit_code", 1), error)
        except typer.BadParameter as error:
            error.message = output.spelled(error.message)
            raise
        except KeyboardInterrupt as error:
            why = "interrupted" if size() == 1 else "interrupted, or another process has ended"
            _fail(output, f"{why}; nothing was left half-written.", INTERRUPTED, error)
        except RuntimeError as error:
            if common.debug or "out of memory" not in str(error):
                raise
            _fail(output, f"out of memory. Lower --batch-size.\n{error}", 1, error)


def _fail(output: Output, message: str, code: int, cause: BaseException) -> None:
    print(f"error: {message}", file=sys.stderr if is_heard() else sys.__stderr__)
    output.result({"error": message, "exit_code": code})
    raise typer.Exit(code) from cause


def _message(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "out of memory. Lower --batch-size, or pass --edited-only."
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        said = f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    return _PART.sub(r"\1", said)


class _NoTerminal(io.TextIOBase):
    """A stream on which progress bars stay away."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False


@contextlib.contextmanager
def _warnings_to(output: Output) -> Iterator[None]:
    with warnings.catch_warnings():
        shown: Callable[..., None] = warnings.showwarning

        def show(message: Any, category: type[Warning], *rest: Any, **options: Any) -> None:
            if issubclass(category, UnmergeWarning):
                output.warn(output.spelled(str(message)))
            else:
                shown(message, category, *rest, **options)

        warnings.simplefilter("always", UnmergeWarning)
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, with everything put away."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
