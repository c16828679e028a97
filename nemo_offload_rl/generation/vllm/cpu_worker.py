"""A CPU worker of vLLM whose weights can be replaced; vLLM imports it by name (`worker_cls`)."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class RefitCpuWorker(CPUWorker):
    """Keeps linear weights as plain parameters.

    By default vLLM packs them for oneDNN after loading and leaves `layer.weight` empty, so that `load_weights` fails
    for linear layers and is silently without effect for the output head (vLLM 0.25.1). Without oneDNN it uses
    `F.linear` on `layer.weight`, at the same speed for the sizes that run on a CPU.
    """

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does, with oneDNN off in this process from here on."""
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
        super().load_model(load_dummy_weights=load_dummy_weights)
