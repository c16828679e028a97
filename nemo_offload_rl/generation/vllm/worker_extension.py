"""Methods that every vLLM worker gets (`worker_extension_cls`), called by name through `collective_rpc`.

They return a message instead of raising: an exception in a worker process reaches the caller without its type, and
ends the executor.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_offload_rl.generation.vllm.device_memory import wait_for_room
from nemo_offload_rl.generation.vllm.weight_loading import RefitSession, SeenLoads
from nemo_offload_rl.generation.vllm.wire import bucket_from_wire
from nemo_offload_rl.protocols.refit import RefitError, RefitGroupAddress
from nemo_offload_rl.utils.liveness import dump_stacks_on_signal
from nemo_offload_rl.weight_sync.nccl import NcclGroup


class RefitExtension:
    """Mixed into vLLM's worker class, which has `model_runner`; vLLM refuses names that the worker has already."""

    model_runner: Any
    rank: int
    device: torch.device
    _refit_session: RefitSession | None = None
    _refit_loads: SeenLoads | None = None
    _refit_group: NcclGroup | None = None

    def dump_stacks_on_signal(self) -> None:
        """See `utils/liveness.py`; this worker's process may be another than the engine's."""
        dump_stacks_on_signal()

    def answer(self) -> None:
        """Return at once: an engine that hangs does not."""

    def refit_join_group(self, host: str, port: int, world_size: int, first_rank: int) -> None:
        """Join the communicator of refits as rank `first_rank` plus this worker's rank in the engine."""
        address = RefitGroupAddress(host, port, world_size)
        self._refit_group = NcclGroup(address, first_rank + self.rank, self.device)

    def refit_load_bucket(self, wire: list[Any]) -> str | None:
        """Load one bucket (see `wire.py`); the first one opens the refit, None means success."""
        bucket = bucket_from_wire(wire)
        try:
            if bucket.index == 0 or self._refit_session is None:
                self.refit_abort()
                self._refit_loads = self._refit_loads or SeenLoads()
                self._refit_session = RefitSession(self.model_runner.model, self._refit_loads, self._refit_group)
            self._refit_session.load(bucket)
        except RefitError as error:
            self.refit_abort()
            return str(error)
        return None

    def refit_finish(self) -> str | dict[str, tuple[int, int]]:
        """Close the refit: say what is missing, or what was read in part (`RefitSession.finish`)."""
        session, self._refit_session = self._refit_session, None
        if session is None:
            return "No weights came before the refit was finished"
        try:
            return session.finish()
        except RefitError as error:
            return str(error)

    def wait_for_room(
        self, tags: list[str], timeout_s: float, process_names: list[list[Any]], beside_bytes: int
    ) -> bool | str:
        """See `device_memory.wait_for_room`. Names are [process id, name] each."""
        return wait_for_room(tags, timeout_s, {int(pid): str(name) for pid, name in process_names}, beside_bytes)

    def refit_abort(self) -> None:
        """Drop an unfinished refit."""
        if self._refit_session is not None:
            self._refit_session.close()
            self._refit_session = None
