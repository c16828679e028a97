"""Methods that every vLLM worker gets (`worker_extension_cls`), called by name through `collective_rpc`.

They return a message instead of raising: an exception in a worker process reaches the caller without its type, and
ends the executor.
"""

from __future__ import annotations

from typing import Any

from nemo_offload_rl.generation.vllm.weight_loading import RefitSession
from nemo_offload_rl.generation.vllm.wire import bucket_from_wire
from nemo_offload_rl.weight_sync.errors import RefitError


class RefitExtension:
    """Mixed into vLLM's worker class, which has `model_runner`; vLLM refuses names that the worker has already."""

    model_runner: Any
    _refit_session: RefitSession | None = None

    def refit_load_bucket(self, wire: list[Any]) -> str | None:
        """Load one bucket (see `wire.py`); the first one opens the refit, None means success."""
        bucket = bucket_from_wire(wire)
        if bucket.index == 0 or self._refit_session is None:
            self.refit_abort()
            self._refit_session = RefitSession(self.model_runner.model)
        try:
            self._refit_session.load(bucket)
        except RefitError as error:
            self.refit_abort()
            return str(error)
        return None

    def refit_finish(self) -> str | None:
        """Close the refit and say what is missing, if anything."""
        session, self._refit_session = self._refit_session, None
        if session is None:
            return "No weights came before the refit was finished"
        try:
            session.finish()
        except RefitError as error:
            return str(error)
        return None

    def refit_abort(self) -> None:
        """Drop an unfinished refit."""
        if self._refit_session is not None:
            self._refit_session.close()
            self._refit_session = None
