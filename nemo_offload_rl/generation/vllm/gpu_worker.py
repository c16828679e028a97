"""A GPU worker of vLLM that shares its GPU with other processes; vLLM imports it by name (`worker_cls`)."""

import logging

from vllm.v1.worker.gpu_worker import Worker

_LOG = logging.getLogger(__name__)
_OTHERS_TOOK = "Memory usage increased after sleeping"


class SharingWorker(Worker):
    """Lets the engine sleep even if another process meanwhile takes more memory than the engine frees.

    vLLM 0.25.1 compares the GPU's free memory before and after. If it has shrunk, vLLM assumes an error of its own and
    raises, which would end the run, although all memory of the engine is free by then.
    """

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, and the weights: at level 1 they are on the host, at level 2 nowhere."""
        try:
            super().sleep(level)
        except AssertionError as error:
            if _OTHERS_TOOK not in str(error):
                raise
            _LOG.warning(
                "another process took memory of this GPU while the engine went to sleep, more than the engine freed; "
                "phases of the policy may run out of memory"
            )
