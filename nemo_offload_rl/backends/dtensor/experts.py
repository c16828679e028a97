"""Mixtures of experts: grouped products over a layer's stacked experts, and experts divided over ranks.

`transformers` calls a registered function to compute a layer's experts, given each token's experts and their weights.
With expert parallelism each rank of a group holds an equal part of every layer's experts. Ranks of the group have
different tokens; a layer sends each token to the ranks that hold its experts, and gets the experts' outputs back
(GShard, arXiv 2006.16668; torchtitan's `expert_parallel.py`). So gradients of experts are already summed over the
group's tokens.

Shape suffixes: T tokens, K experts per token, R rows (one for each token and expert), H hidden size, E experts of a
layer.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

GROUPED = "nemo_offload_rl_grouped"
_GROUP = "nemo_offload_rl_group"  # attribute of divided experts: the ranks that share a layer's experts


def use_grouped_experts(causal_lm: Any) -> None:
    """Make a Hugging Face model use this module's experts, and keep no router logits for an auxiliary loss."""
    ALL_EXPERTS_FUNCTIONS.register(GROUPED, _experts_forward)
    causal_lm.config._experts_implementation = GROUPED
    if getattr(causal_lm.config, "output_router_logits", False):
        causal_lm.config.output_router_logits = False
    for module in causal_lm.modules():
        if type(module).__name__ == "GraniteMoeHybridMoE":
            module.forward = partial(_granite_mixture, module)


def expert_modules(module: nn.Module) -> list[Any]:
    """Return the modules with a layer's stacked experts, in order; none in a dense model."""
    return [part for part in module.modules() if has_stacked_experts(part)]


def has_stacked_experts(module: nn.Module) -> bool:
    """Tell whether a module holds a layer's stacked experts itself."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def divide_experts(causal_lm: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of a 1-D mesh its part of every layer's experts, in place; parameters are on the meta device."""
    for experts in expert_modules(causal_lm):
        for name, parameter in list(experts.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        experts.num_experts //= mesh.size()
        setattr(experts, _GROUP, mesh.get_group())


def _experts_forward(experts: Any, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return [T, H]: for each token the weighted sum of its K experts' outputs."""
    group = getattr(experts, _GROUP, None)
    if group is None:
        return grouped_mm_experts_forward(experts, hidden_TH, experts_TK, weights_TK)
    num_ranks, num_experts = dist.get_world_size(group), experts.num_experts
    chosen_R, order_R = experts_TK.flatten().sort(stable=True)
    sent_E = torch.bincount(chosen_R, minlength=num_ranks * num_experts)
    received_E = torch.empty_like(sent_E)  # counts for this rank's experts, from each rank in turn
    dist.all_to_all_single(received_E, sent_E, group=group)
    # The only wait for the device: the host needs the sizes of the exchange.
    sizes = torch.stack([counts.view(num_ranks, num_experts).sum(1) for counts in (sent_E, received_E)]).tolist()
    rows_RH = hidden_TH.index_select(0, order_R // experts_TK.shape[1])
    rows_RH = _Exchange.apply(rows_RH, sizes[0], sizes[1], group)
    mine_R = torch.arange(num_experts, device=hidden_TH.device).repeat(num_ranks)
    mine_R = mine_R.repeat_interleave(received_E, output_size=sum(sizes[1])).unsqueeze(1)
    local: Any = _Local(experts)
    made_RH = grouped_mm_experts_forward(local, rows_RH, mine_R, rows_RH.new_ones(mine_R.shape))
    made_RH = _Exchange.apply(made_RH, sizes[1], sizes[0], group)
    made_RH = torch.empty_like(made_RH).index_copy(0, order_R, made_RH)
    made_TKH = made_RH.unflatten(0, experts_TK.shape) * weights_TK.unsqueeze(-1)
    return made_TKH.sum(1).to(hidden_TH.dtype)


def _granite_mixture(block: Any, hidden_states: Tensor) -> Tensor:
    """Compute a layer of Granite 4's experts, which transformers computes one by one and with a wait for the device."""
    hidden_TH = hidden_states.flatten(0, -2)
    scores_TK, experts_TK = block.router.layer(hidden_TH).float().topk(block.router.top_k)
    experts: Any = _GraniteExperts(block)
    made_TH = grouped_mm_experts_forward(experts, hidden_TH, experts_TK, scores_TK.softmax(-1).type_as(hidden_TH))
    return made_TH.view_as(hidden_states)


class _GraniteExperts:
    """A view of Granite 4's stacked experts by the names that other families have."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, block: Any) -> None:
        self.gate_up_proj, self.down_proj = block.input_linear.weight, block.output_linear.weight
        self.num_experts, self._activation = block.input_linear.num_experts, block.activation

    def _apply_gate(self, both_RI: Tensor) -> Tensor:
        gate_RI, up_RI = both_RI.chunk(2, dim=-1)
        return self._activation(gate_RI) * up_RI


class _Local:
    """A view of divided experts whose parameters are this rank's plain local tensors."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to_local() if isinstance(value, DTensor) else value


class _Exchange(torch.autograd.Function):
    """Exchanges rows between a group's ranks; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        """Return [sum of `received`, H]: the rows from each rank in turn."""
        ctx.way_back = received, sent, group
        return _exchange(rows_RH, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of the sent rows."""
        return _exchange(grad_RH, *ctx.way_back), None, None, None


def _exchange(rows_RH: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    got_RH = rows_RH.new_empty(sum(received), rows_RH.shape[1])
    dist.all_to_all_single(got_RH, rows_RH.contiguous(), received, sent, group=group)
    return got_RH
