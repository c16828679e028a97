"""A lock on the folder of a run's checkpoints, so that a second run does not delete or overwrite the first one's.

1. The file `run.lock` names its holder's host, process and start. The holder touches the file every few seconds and
   removes it at its end.
2. An existing lock is taken over once its holder is provably gone. On the same host, `/proc` shows that. A job that
   Slurm has requeued knows that its earlier start has ended. Any other holder, such as one on another host of a shared
   file system, is watched: its lock is free if it is not touched for `PATIENCE_S`. Clocks of two hosts are never
   compared.
3. A holder that was suspended for longer may lose its lock. `check_held` detects that before each write.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from nemo_offload_rl.errors import CheckpointError

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
BEAT_S = 10.0  # between two renewals
PATIENCE_S = 120.0  # without a renewal, until a holder whose process cannot be seen counts as gone

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds a lock.

    Attributes:
        token: Unique to this holder.
        host: Name of its host.
        pid: Process id of the holder.
        started: Time when it took the lock, in UTC.
        place: Scope of its process id: the host's boot and the process namespace.
        process_start: Start of its process in ticks since the boot, which tells it from a later one with the same id.
        job: ID of its Slurm job, None without one.
        restarts: Number of times that Slurm has requeued that job.
    """

    token: str
    host: str
    pid: int
    started: str
    place: str
    process_start: str
    job: str | None
    restarts: int

    @classmethod
    def this_process(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Describe the current process as a holder."""
        pid = os.getpid()
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=pid,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            place=_place(),
            process_start=_process_start(pid) or "",
            job=environ.get("SLURM_JOB_ID"),
            restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
        )

    def is_seen_by(self, other: Holder) -> bool:
        """Tell whether `other` can see this process in `/proc`."""
        return self.place == other.place

    def is_gone_for(self, other: Holder) -> bool:
        """Tell whether `other` has proof that this process has ended."""
        if self.is_seen_by(other):
            return _process_start(self.pid) != self.process_start
        return self.job is not None and self.job == other.job and self.restarts < other.restarts

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


class FolderLock:
    """Context that holds the lock of a folder.

    Args:
        folder: An existing folder.
        me: The holder; None for this process.
        beat_s: Seconds between renewals.
        patience_s: Seconds to watch the lock of a holder whose process cannot be seen.

    Raises:
        CheckpointError: On entering, another run holds the lock.
    """

    def __init__(
        self, folder: Path, me: Holder | None = None, *, beat_s: float = BEAT_S, patience_s: float = PATIENCE_S
    ) -> None:
        self.path = folder / LOCK_FILE
        self._folder = folder
        self._me = me or Holder.this_process()
        self._beat_s = beat_s
        self._patience_s = patience_s
        self._released = threading.Event()

    def __enter__(self) -> Self:
        while not self._created(self.path):
            content = self._content()
            if content is not None and self._taken_over(content):
                break
        threading.Thread(target=self._renew, name="renew run.lock", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        if self._is_mine(self._content()):
            self.path.unlink(missing_ok=True)

    def check_held(self) -> None:
        """Refuse to go on without the lock; create the lock file again if it was removed by hand.

        Raises:
            CheckpointError: Another run has taken the lock, because this one was suspended.
        """
        try:
            content = self._content()
            if content is None:
                self._created(self.path)
                content = self._content()
        except OSError:
            return  # the save that follows reports it
        if not self._is_mine(content):
            raise CheckpointError(
                f"{self._folder} (checkpointing.checkpoint_dir) was taken over by another run, "
                f"{_holder(content) or 'unknown'}, since this one did not renew {LOCK_FILE} for {self._patience_s:.0f} "
                "s; this run ends, and the other one has its checkpoints up to then"
            )

    # -- inside

    def _created(self, path: Path) -> bool:
        """Create a file that names this holder; return False if it exists."""
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(self._text())
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
        return True

    def _taken_over(self, content: str) -> bool:
        """Take the lock of a holder that is gone; return False if it was released or has another holder by then.

        If several runs try at once, the first to create the claim file becomes the holder. A claim is renamed to the
        lock at once, so an old claim was left by a killed run.

        Raises:
            CheckpointError: The holder is not gone.
        """
        holder = _holder(content)
        if holder is None or not holder.is_gone_for(self._me):
            if holder is not None and holder.is_seen_by(self._me):
                self._refuse(holder)
            if self._is_renewed(holder):
                self._refuse(holder)
        claim = self.path.with_name(f"{LOCK_FILE}.claim")
        if not self._created(claim):
            with suppress(FileNotFoundError):
                if time.time() - claim.stat().st_mtime > self._patience_s:
                    claim.unlink()
            time.sleep(_POLL_S)
            return False
        if self._content() != content:
            claim.unlink()
            return False
        claim.replace(self.path)
        logger.info("%s was left by %s, which has ended; taken over", self.path, holder or "an unknown run")
        return True

    def _is_renewed(self, holder: Holder | None) -> bool:
        """Watch a lock; return whether its holder renews it."""
        logger.warning(
            "%s is held by %s, which cannot be seen from here; waiting up to %.0f s for a sign of life",
            self.path,
            holder or "an unknown run",
            self._patience_s,
        )
        seen, end = self._state(), time.monotonic() + self._patience_s
        while time.monotonic() < end:
            time.sleep(_POLL_S)
            now = self._state()
            if now is None:
                return False  # released
            if now != seen:
                return True
        return False

    def _refuse(self, holder: Holder | None) -> None:
        raise CheckpointError(
            f"another run uses checkpointing.checkpoint_dir={self._folder} ({holder or 'unknown'}); end it, or choose "
            f"another folder. If it has surely ended, remove {self.path}"
        )

    def _renew(self) -> None:
        while not self._released.wait(self._beat_s):
            try:
                if not self._is_mine(self._content()):
                    return  # `check_held` reports it
                os.utime(self.path)
            except OSError as error:
                logger.warning("%s cannot be renewed (%s)", self.path, error.strerror or error)

    def _text(self) -> str:
        return json.dumps(asdict(self._me)) + "\n"

    def _is_mine(self, content: str | None) -> bool:
        return content is not None and content == self._text()

    def _content(self) -> str | None:
        state = self._state()
        return None if state is None else state[0]

    def _state(self) -> tuple[str, int] | None:
        """Read contents and time of change; opening the file anew makes a network file system ask its server."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                return file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None


def _holder(content: str | None) -> Holder | None:
    """Read the holder from a lock file's content; None if it is unreadable."""
    try:
        return Holder(**json.loads(content or ""))
    except (ValueError, TypeError):
        return None


def _place() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return uuid.uuid4().hex  # no other process can see this one


def _process_start(pid: int) -> str | None:
    """Return the start of a process in ticks since the boot; None if it does not run."""
    try:
        # The name, which may hold spaces and parentheses, comes before the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, start = fields[0], fields[19]
    return None if state in "ZX" else start
