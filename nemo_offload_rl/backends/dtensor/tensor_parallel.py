"""Tensor and sequence parallelism, by the plan that a model declares.

With sequence parallelism, norms, dropout and the residual stream work on each rank's part of the sequence, since they
treat positions separately (arXiv 2205.05198). Attention and MLP see the whole sequence: it is gathered before them, and
their last, row-wise split ends in a reduce-scatter. Both together move as many bytes as the all-reduce that they
replace.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from nemo_offload_rl.backends.dtensor.supported import (
    COLUMNS,
    COLUMNS_GATHERED,
    ROWS,
    ROWS_OF_WHOLE_INPUT,
    WHOLE_AMONG_HEADS,
)

_SEQUENCE_DIM, _HEADS_DIM = 1, 2  # [B, S, heads, head_dim], [B, S, hidden]
_HIDDEN = "hidden_states"  # the argument's name, if passed by keyword


class _WholeParameters(ParallelStyle):
    """Keeps whole parameters on every rank, as DTensors; inputs and outputs stay plain tensors.

    `input_placement` is the placement of the plain input: replicated, or split by heads or by sequence. If it is split,
    gradients of parameters are partial sums, which FSDP sums over the tensor-parallel ranks.
    """

    def __init__(self, input_placement: Placement) -> None:
        super().__init__()
        self.input_placement = input_placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(submodule.named_parameters(recurse=False)):
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                submodule.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        def to_dtensor(placement: Placement, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, [placement], run_check=False), *inputs[1:])

        def to_local(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.to_local()

        return distribute_module(module, device_mesh, partition, partial(to_dtensor, self.input_placement), to_local)


def _styles(split_input: Placement) -> dict[str, Callable[[], ParallelStyle]]:
    """Return styles by a plan's words; row-wise splits give hidden states in the placement `split_input`."""
    return {
        COLUMNS: ColwiseParallel,
        COLUMNS_GATHERED: partial(ColwiseParallel, output_layouts=Replicate()),
        ROWS: partial(RowwiseParallel, output_layouts=split_input),
        ROWS_OF_WHOLE_INPUT: partial(RowwiseParallel, input_layouts=Replicate(), output_layouts=split_input),
        WHOLE_AMONG_HEADS: partial(_WholeParameters, Shard(_HEADS_DIM)),
    }


def apply_tensor_parallel(
    causal_lm: Any, layers: nn.ModuleList, mesh: DeviceMesh, *, splits_sequence: bool = False
) -> None:
    """Split a Hugging Face causal model over `mesh` (1-D), in place; every rank holds the same weights before.

    The base model is split by its config's plan; modules outside of the plan stay whole. The vocabulary is split:
    the output layer gives this rank's columns.

    Args:
        causal_lm: The model.
        layers: Its decoder layers.
        mesh: The ranks.
        splits_sequence: Use sequence parallelism; the mesh's size divides the sequence.
    """
    embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    of_vocabulary = {
        embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        head: ColwiseParallel(),
    }
    placement = Shard(_SEQUENCE_DIM) if splits_sequence else Replicate()
    # Norms of the residual stream; other norms are inside attention or MLP.
    between = {child for module in (causal_lm.base_model, *layers) for child in module.children()}
    plan, styles = causal_lm.config.base_model_tp_plan, _styles(placement)
    for name, module in causal_lm.base_model.named_modules():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if module not in of_vocabulary and any(True for _ in module.parameters(recurse=False)):
            whole = _WholeParameters(placement if module in between else Replicate())
            parallelize_module(module, mesh, styles[plan[pattern]]() if pattern in plan else whole, src_data_rank=None)
    for module, style in of_vocabulary.items():
        parallelize_module(module, mesh, style, src_data_rank=None)
    if is_tied:  # each module got its own DTensor of the same rows
        head.weight = embedding.weight
    if splits_sequence:
        _split_sequence(causal_lm, layers, mesh)


def _split_sequence(causal_lm: Any, layers: nn.ModuleList, mesh: DeviceMesh) -> None:
    """Split hidden states before the first layer; gather them for attention, for the MLP and after the last norm.

    Positions and masks of the base model stay those of whole sequences.

    Args:
        causal_lm: The model, split by `apply_tensor_parallel` with `splits_sequence`.
        layers: Its decoder layers.
        mesh: 1-D; its size divides the sequence.
    """
    split, everywhere = [Shard(_SEQUENCE_DIM)], [Replicate()]

    def mine(hidden: Tensor) -> Tensor:
        return DTensor.from_local(hidden, mesh, everywhere, run_check=False).redistribute(mesh, split).to_local()

    def whole(hidden: Tensor) -> DTensor:
        return DTensor.from_local(hidden, mesh, split, run_check=False).redistribute(mesh, everywhere)

    def before(module: nn.Module, change: Any) -> None:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            return args, {**kwargs, _HIDDEN: change(kwargs[_HIDDEN])}

        module.register_forward_pre_hook(hook, with_kwargs=True)

    before(layers[0], mine)
    for layer in layers:
        for part in layer.children():
            if any(True for _ in part.parameters()) and not any(True for _ in part.parameters(recurse=False)):
                # A DTensor, so that gradients of all its readers are reduced once.
                before(part, whole)
    (norm,) = (
        module
        for module in causal_lm.base_model.children()
        if module not in (layers, causal_lm.get_input_embeddings()) and any(True for _ in module.parameters())
    )
    norm.register_forward_hook(lambda _module, _args, hidden: whole(hidden).to_local())
