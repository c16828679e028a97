"""A tiny GPT of megatron-core's local layers whose activations are offloaded, on a CPU, for tests only.

Transformer Engine's part in activation offloading is one flag; an object with that flag stands in for it here. The
guard that lets only CUDA tensors leave is lifted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, "tests/support")
from megatron_cpu_shim import megatron_on_cpu

SEQUENCE, VOCAB = 16, 64


@dataclass
class Copies:
    """What went to the host."""

    count: int = 0
    num_bytes: int = 0

    def drain(self) -> tuple[int, int]:
        seen = (self.count, self.num_bytes)
        self.count = self.num_bytes = 0
        return seen


@dataclass
class TinyGpt:
    model: Any
    copies: Copies = field(default_factory=Copies)

    def run(self, lengths: list[int], forward_only: bool = False) -> list[float]:
        """One pass with a micro-batch of each length; losses."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        tokens = [(torch.arange(n).unsqueeze(0) * 7 + i) % VOCAB for i, n in enumerate(lengths)]

        def step(iterator: Any, model: Any) -> Any:
            ids = next(iterator)
            positions = torch.arange(ids.shape[1]).unsqueeze(0)
            output = model(ids, positions, None, labels=ids.roll(-1, 1))
            return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach().clone()})

        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(tokens),
            model=[self.model],
            num_microbatches=len(tokens),
            seq_length=max(lengths),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return [float(result["loss"]) for result in results]

    def grads(self) -> dict[str, torch.Tensor]:
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """One rank of gloo with Megatron's groups on it."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def tiny_gpt(**changes: Any) -> Iterator[TinyGpt]:
    """The model inside its patches.

    Args:
        changes: Of the `TransformerConfig`.
    """
    from megatron.core.extensions import transformer_engine as te_extension
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as upstream
    from megatron.core.transformer import TransformerConfig

    settings = {
        "num_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn", "attn_proj", "attn_norm", "mlp_norm", "qkv_linear"],
        "min_offloaded_tensor_size": 1,
    }
    copies = Copies()
    offload = upstream.ChunkOffloadHandler.offload

    def counted(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
        copies.count += 1
        copies.num_bytes += tensor.nbytes
        return offload(self, tensor, **options)

    def is_tensor(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter)

    upstream_pool = upstream.OffloadTensorPool

    def pageable_pool(device: str, pin_memory: bool) -> Any:
        return upstream_pool(device=device, pin_memory=False)

    handler = upstream.ChunkOffloadHandler
    flag = SimpleNamespace(CPUOffloadEnabled=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_on_cpu())
        stack.enter_context(patch.object(te_extension, "cpu_offload", flag))
        stack.enter_context(patch.object(handler, "_can_manage_tensor_for_offload", staticmethod(is_tensor)))
        stack.enter_context(patch.object(handler, "offload", counted))
        # Inside autograd functions the shim's mode is not asked.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda *_: None))
        stack.enter_context(patch.object(upstream, "OffloadTensorPool", pageable_pool))
        stack.enter_context(patch.object(upstream.PipelineOffloadManager, "OFFLOAD_MGR", None))
        torch.manual_seed(0)
        config = TransformerConfig(**{**settings, **changes})
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(config.num_moe_experts, normalization="RMSNorm"),
            vocab_size=VOCAB,
            max_sequence_length=64,
            position_embedding_type="rope",
        )
        yield TinyGpt(model, copies)
