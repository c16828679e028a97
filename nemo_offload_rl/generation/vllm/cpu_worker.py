"""A CPU worker of vLLM whose weights can be replaced; vLLM imports it by name (`worker_cls`)."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class RefitCpuWorker(CPUWorker):
    """Keeps weights as plain parameters.

    By default vLLM packs linear weights for oneDNN after loading and leaves `layer.weight` empty, so that
    `load_weights` fails for linear layers and is silently without effect for the output head; experts it packs in
    place, for what the CPU has (vLLM 0.25.1). Without either it uses `F.linear` on the parameters, at the same speed
    for the sizes that run on a CPU.
    """

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does, with packed weights off in this process from here on."""
        from vllm import _custom_ops
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

        _custom_ops._supports_onednn = False
        CPUFusedMOE.check_grouped_gemm = _no_grouped_gemm
        super().load_model(load_dummy_weights=load_dummy_weights)


def _no_grouped_gemm(self: object, layer: object) -> tuple[bool, str]:
    return False, "none"
