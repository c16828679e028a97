"""Methods that every vLLM worker gets (`worker_extension_cls`), called by name through `collective_rpc`.

They return a message instead of raising, because an exception in a worker process reaches the caller without its type
and ends the executor.
"""

from collections.abc import Callable
from typing import Any

import torch

from nemo_offload_rl.generation.vllm.adapter_loading import AdapterSession
from nemo_offload_rl.generation.vllm.device_memory import wait_for_room
from nemo_offload_rl.generation.vllm.engine_args import register_models
from nemo_offload_rl.generation.vllm.kept_kv import KeptKv
from nemo_offload_rl.generation.vllm.logprob_recorder import LogprobRecorder, SampledTokens, record_samples, why_not
from nemo_offload_rl.generation.vllm.weight_loading import BucketReader, RefitSession, SeenLoads
from nemo_offload_rl.generation.vllm.wire import bucket_from_wire
from nemo_offload_rl.protocols.refit import RefitError, RefitGroupAddress
from nemo_offload_rl.residency import ResidencyError
from nemo_offload_rl.utils.liveness import dump_stacks_on_signal
from nemo_offload_rl.utils.traces import ProcessTrace, named_range
from nemo_offload_rl.weight_sync.nccl import NcclGroup

register_models()  # in every worker, before it loads a model


class WorkerExtension:
    """Base class that vLLM adds to its worker class; reads that class's attributes. vLLM refuses name clashes."""

    model_runner: Any
    rank: int
    device: torch.device
    _refit_session: RefitSession | AdapterSession | None = None
    _refit_loads: SeenLoads | None = None
    _refit_group: NcclGroup | None = None
    _recorder: LogprobRecorder | None = None
    _version = 0
    _end_recording: Callable[[], None] | None = None
    _step_trace: ProcessTrace | None = None
    _kept_kv: KeptKv | None = None

    def dump_stacks_on_signal(self) -> None:
        """See `utils/liveness.py`; this worker may run in another process than the engine."""
        dump_stacks_on_signal()

    def answer(self) -> None:
        """Return at once, unless the engine hangs."""

    def start_step_trace(self) -> None:
        """Begin a trace of this worker's process."""
        self._step_trace = self._step_trace or ProcessTrace()
        self._step_trace.start()

    def stop_step_trace(self, name: str) -> str | None:
        """Write the trace to `name`_RANK.json.gz; see `ProcessTrace.stop`."""
        return self._step_trace.stop(f"{name}_{self.rank}") if self._step_trace is not None else None

    def refit_join_group(self, host: str, port: int, world_size: int, first_rank: int) -> None:
        """Join the communicator of refits as rank `first_rank` plus this worker's rank in the engine."""
        address = RefitGroupAddress(host, port, world_size)
        self._refit_group = NcclGroup(address, first_rank + self.rank, self.device)

    def refit_load_bucket(self, wire: list[Any]) -> str | None:
        """Load one bucket; the first begins the refit. Returns None or an error message."""
        bucket = bucket_from_wire(wire)
        try:
            if bucket.index == 0 or self._refit_session is None:
                self.refit_abort()
                self._refit_session = self._new_session()
            with named_range("refit bucket"):
                self._refit_session.load(bucket)
        except RefitError as error:
            self.refit_abort()
            return str(error)
        return None

    def _new_session(self) -> RefitSession | AdapterSession:
        runner, reader = self.model_runner, BucketReader(self._refit_group)
        seen = self._refit_loads = self._refit_loads or SeenLoads()
        if runner.lora_config is not None:
            return AdapterSession(runner, seen, reader)
        return RefitSession(runner.model, seen, reader)

    def refit_finish(self, version: int) -> str | dict[str, tuple[int, int]]:
        """End the refit; return an error message, or the tensors read in part (`RefitSession.finish`).

        `version` is the number of the weights.
        """
        session, self._refit_session = self._refit_session, None
        self._version = version
        if self._recorder is not None:
            self._recorder.version = version
        if session is None:
            return "The refit was finished before any weights came"
        try:
            return session.finish()
        except RefitError as error:
            return str(error)

    def wait_for_room(
        self, tags: list[str], timeout_s: float, process_names: list[list[Any]], extra_bytes: int
    ) -> bool | str:
        """See `device_memory.wait_for_room`; each of `process_names` is [process id, name]."""
        return wait_for_room(tags, timeout_s, {int(pid): str(name) for pid, name in process_names}, extra_bytes)

    def put_away_kv(self, block_ids: list[int]) -> str | None:
        """Copy the contents of KV blocks to the host; return None or an error message."""
        if self._kept_kv is None:
            limit_bytes = self.model_runner.vllm_config.additional_config.limit_bytes
            self._kept_kv = KeptKv(self.model_runner, self.device, limit_bytes)
        try:
            self._kept_kv.put_away(block_ids)
        except (ValueError, ResidencyError) as error:
            return str(error)
        return None

    def bring_back_kv(self) -> None:
        """Copy the contents of the blocks that were put away back to where they were."""
        assert self._kept_kv is not None
        self._kept_kv.bring_back()

    def refit_abort(self) -> None:
        """Drop an unfinished refit."""
        if self._refit_session is not None:
            self._refit_session.close()
            self._refit_session = None

    def record_logprobs(self, on: bool) -> str | None:
        """Record the logprobs of sampled tokens from now on, or end it; return why this cannot be done, or None.

        All workers of an engine sample the same tokens, so the first one records.
        """
        if self._end_recording is not None:
            self._end_recording()
        self._end_recording = self._recorder = None
        if not on or self.rank:
            return None
        if (reason := why_not(self.model_runner)) is None:
            self._recorder = LogprobRecorder(self.device, version=self._version)
            self._end_recording = record_samples(self.model_runner, self._recorder)
        return reason

    def take_logprobs(
        self, responses: list[list[Any]], dropped: list[str]
    ) -> list[tuple[bytes, list[int]]] | str | None:
        """Return the float32 logprobs of responses, an error message, or None if another worker records.

        With the logprobs of a response come a version of weights and a number of tokens in turn, see `Versions`.

        Args:
            responses: For each one, the fields of `SampledTokens`.
            dropped: Requests whose logprobs nobody takes.
        """
        if self._recorder is None:
            return None
        try:
            taken = self._recorder.take([SampledTokens(*response) for response in responses], dropped)
        except LookupError as error:
            return str(error)
        return [(logprobs.tobytes(), versions) for logprobs, versions in taken]
