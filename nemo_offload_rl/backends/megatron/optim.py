"""Megatron's optimizer and schedule from `policy.megatron_cfg`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from nemo_offload_rl.keys.megatron import MegatronOptimizerConfig, MegatronSchedulerConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.protocols import optimizer as optimizer_spec
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES


class GuardedOptimizer(ChainedOptimizer):
    """Megatron's optimizer; all ranks skip a step if any rank's gradient norm is not finite.

    Megatron skips steps only for float16 gradients, may check them in groups of some ranks only, and compares norms
    with a threshold that NaN never exceeds. Here `step` returns `(False, None, None)` before it clips or updates
    anything, as for float16.

    Attributes:
        grad_norm: Norm of the last step before clipping. It is read before the update: a later read would wait for the
            copies of states that leave after their update, which use the same copy engine.
        lowers_loss_scale: The last step was skipped because float16 gradients overflowed, and the scale was lowered.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        super().__init__(list(optimizers))
        self.grad_norm = 0.0
        self._norm: Any = 0.0  # Megatron's value: a float, or a tensor on the device
        self.lowers_loss_scale = False

    def prepare_grads(self) -> bool:
        """Unscale the gradients and compute their norm; return whether any rank's norm is not finite."""
        has_overflown = super().prepare_grads()
        self._norm = super().get_grad_norm()
        self.grad_norm = float(self._norm)
        is_bad = has_overflown or not math.isfinite(self.grad_norm)
        # Megatron's reduction of norms may leave ranks out, and that of overflows does. This one uses gloo: NCCL would
        # need another communicator over all ranks.
        found = torch.tensor([is_bad, has_overflown], dtype=torch.int32)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        is_bad_anywhere, has_overflown_anywhere = (bool(value) for value in found.tolist())
        self.lowers_loss_scale = has_overflown_anywhere and self._scale_is_above_its_minimum()
        return is_bad_anywhere

    def get_grad_norm(self) -> Any:
        """Return the norm of `prepare_grads`, which a step calls first."""
        return self._norm

    def _scale_is_above_its_minimum(self) -> bool:
        scalers = [getattr(optimizer, "grad_scaler", None) for optimizer in self.chained_optimizers]
        return all(float(s.scale) > float(s.min_scale) for s in scalers if isinstance(s, DynamicGradScaler))


def build_optimizer(settings: PolicySettings, cfg: MegatronOptimizerConfig, chunks: Sequence[Any]) -> GuardedOptimizer:
    """Build Megatron's optimizer over the model's trainable parameters."""
    dtype = COMPUTE_DTYPES[settings.precision]
    config = OptimizerConfig(
        optimizer=cfg.optimizer,
        lr=cfg.lr,
        min_lr=cfg.min_lr,
        weight_decay=cfg.weight_decay,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        adam_beta1=cfg.adam_beta1,
        adam_beta2=cfg.adam_beta2,
        adam_eps=cfg.adam_eps,
        sgd_momentum=cfg.sgd_momentum,
        use_distributed_optimizer=cfg.use_distributed_optimizer,
        use_precision_aware_optimizer=cfg.use_precision_aware_optimizer,
        exp_avg_dtype=COMPUTE_DTYPES[cfg.exp_avg_dtype],
        exp_avg_sq_dtype=COMPUTE_DTYPES[cfg.exp_avg_sq_dtype],
        # Without a limit Megatron would not compute the norm.
        clip_grad=cfg.clip_grad or math.inf,
        optimizer_cpu_offload=cfg.optimizer_cpu_offload,
        optimizer_offload_fraction=cfg.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=cfg.overlap_cpu_optimizer_d2h_h2d,
    )
    built = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    return GuardedOptimizer(sub_optimizers(built))


def sub_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of dense and expert parameters; each wraps a torch optimizer."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def make_states(inner: Any, updated: Sequence[Tensor]) -> None:
    """Let a torch optimizer inside Megatron's allocate the states of `updated`, for a checkpoint to fill.

    Megatron's own functions are not used: they omit torch's step count for each parameter, and do not tell Transformer
    Engine whether to keep whole masters.
    """
    if isinstance(inner, HybridDeviceOptimizer):
        if not inner.state:
            inner.dummy_step()  # allocates states of all parameters
    elif hasattr(inner, "initialize_state"):  # Transformer Engine's, which keeps gradients elsewhere than torch
        for parameter in updated:
            inner.initialize_state(parameter, inner.store_param_remainders and parameter.dtype is torch.bfloat16)
    else:
        optimizer_spec.make_states(inner, updated)


def build_scheduler(
    cfg: MegatronSchedulerConfig, optimizer_cfg: MegatronOptimizerConfig, optimizer: Any
) -> OptimizerParamScheduler:
    """Build the schedule of learning rate and weight decay over optimizer steps, at its first step."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=cfg.lr_warmup_init,
        max_lr=optimizer_cfg.lr,
        min_lr=optimizer_cfg.min_lr,
        lr_warmup_steps=cfg.lr_warmup_iters,
        lr_decay_steps=cfg.lr_decay_iters,
        lr_decay_style=cfg.lr_decay_style,
        start_wd=cfg.start_weight_decay,
        end_wd=cfg.end_weight_decay,
        wd_incr_steps=cfg.lr_decay_iters,
        wd_incr_style=cfg.weight_decay_incr_style,
        wsd_decay_steps=max(1, cfg.lr_decay_iters // 10),
        lr_wsd_decay_style="exponential",
    )
