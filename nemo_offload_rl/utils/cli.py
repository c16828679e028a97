"""Command lines of the launch scripts. Imports only the standard library, so that `--help` answers at once."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from nemo_offload_rl.errors import UserError

EXIT_USER_ERROR = 2
BY_SIGNAL = 128
"""Exit status of a process that a signal ends, less the signal's number."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to end; `run_end.py` saves first."""

_OVERRIDES_HELP = """\
overrides, applied in order:
  grpo.max_num_steps=20        change a key
  "logger.log_dir=my run #1"   text: quotes for the shell only
  +policy.optimizer.kwargs.fused=true
                               add a key that is not there
  ++env.math.num_workers=4     add or change
  ~logger.wandb                delete
"""


@dataclass(frozen=True)
class LaunchArguments:
    """Arguments of a launch script."""

    config: Path
    overrides: tuple[str, ...]


def parse_launch_arguments(
    description: str, default_config: str | None = None, argv: Sequence[str] | None = None
) -> LaunchArguments:
    """Parse `--config PATH overrides...`.

    Args:
        description: Text of `--help`.
        default_config: Configuration to use without `--config`; None makes the option required.
        argv: Arguments without the program's name; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        description=description, epilog=_OVERRIDES_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=None if default_config is None else Path(default_config),
        required=default_config is None,
        metavar="PATH",
        help="YAML file, or the name of one in examples/configs, such as grpo_math_1B.yaml"
        + ("" if default_config is None else f" (default: {default_config})"),
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, see below")
    parsed = parser.parse_intermixed_args(argv)
    return LaunchArguments(config=parsed.config, overrides=tuple(parsed.overrides))


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Delay `STOP_SIGNALS` to the end of the block; processes and threads made in it never get them."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class LastLines(str):
    """A note on the exception that ends a run, printed last: where its results are and how to continue."""


@contextmanager
def ending_process() -> Iterator[None]:
    """End the process as the body, a script, ends: with the right last lines and exit status.

    A `UserError` becomes one line on standard error and status 2, an interrupt the line `interrupted` and status 130,
    another signal, such as SIGTERM, a line with its name and status 128 + its number. Everything else is a bug and
    keeps its traceback and status 1. An error's notes of the class `LastLines` come last.
    """
    try:
        yield
        _flush()
    except UserError as error:
        _end_with(f"error: {' '.join(str(error).split())}", error)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt as error:
        _end_with("interrupted", error)
        sys.exit(BY_SIGNAL + signal.SIGINT)
    except SystemExit as left:
        for number in signal.Signals:
            if left.code == BY_SIGNAL + number:
                _end_with(f"ended by {number.name}", left)
        raise


def set_up_logging(level: int = logging.INFO) -> None:
    """Send the log records of this package to standard error, one line each."""
    handler = _StandardErrorHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    package = logging.getLogger("nemo_offload_rl")
    package.handlers[:] = [handler]
    package.setLevel(level)
    package.propagate = False


class _StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes each record to the current `sys.stderr`, which a progress bar replaces while it is visible."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Stay silent: standard error is gone or full."""


def _end_with(reason: str, error: BaseException) -> None:
    last_lines = [note for note in getattr(error, "__notes__", ()) if isinstance(note, LastLines)]
    _flush()
    with suppress(OSError, ValueError):
        sys.stderr.write("".join(f"{line}\n" for line in (reason, *last_lines)))
        sys.stderr.flush()


def _flush() -> None:
    """Flush standard output; if that fails replace it, or Python would flush again and change the exit status."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
