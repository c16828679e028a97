"""Sequence parallelism: between the parts of its layers, each tensor-parallel rank has its part of the sequence.

Norms, dropout and the residual stream are of single positions, so each rank needs only its own (arXiv 2205.05198).
Attention and MLP see the whole sequence: it is gathered before them, and the split of rows that they end with adds up
for each rank what is its own. Both together move the bytes of the one sum that they replace.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

_SEQUENCE = Shard(1)  # [B, S, hidden]
_HIDDEN = "hidden_states"  # the argument's name, where it is named


def split_sequence(causal_lm: Any, layers: nn.ModuleList, mesh: DeviceMesh) -> None:
    """Have hidden states be split before the first layer, whole inside of layers' parts and whole after the last norm.

    The base model itself goes on with whole sequences: positions and masks are of those.

    Args:
        causal_lm: The model, split by `apply_tensor_parallel`, whose norms between parts expect this.
        layers: Its decoder layers.
        mesh: 1-D; its size divides the sequence.
    """

    def mine(hidden: Tensor) -> Tensor:
        return (
            DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).redistribute(mesh, [_SEQUENCE]).to_local()
        )

    def whole(hidden: Tensor) -> DTensor:
        return DTensor.from_local(hidden, mesh, [_SEQUENCE], run_check=False).redistribute(mesh, [Replicate()])

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
                # A DTensor: the gradients of all layers that read it are added up once.
                before(part, whole)
    (norm,) = (
        module
        for module in causal_lm.base_model.children()
        if module not in (layers, causal_lm.get_input_embeddings()) and any(True for _ in module.parameters())
    )
    norm.register_forward_hook(lambda _module, _args, hidden: whole(hidden).to_local())
