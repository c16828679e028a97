"""A teacher on the Megatron backend: a model that is never trained, split over the ranks like the policy."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nemo_offload_rl.backends.hf.model_folder import check_model_folder
from nemo_offload_rl.backends.megatron import parallel
from nemo_offload_rl.backends.megatron.activation_offload import ActivationOffloading
from nemo_offload_rl.backends.megatron.folder_match import check_shapes
from nemo_offload_rl.backends.megatron.model import build_model
from nemo_offload_rl.backends.megatron.passes import Passes, keep_scores, on_cpu
from nemo_offload_rl.backends.ranks import max_over_ranks
from nemo_offload_rl.backends.scoring.divergence import TopK
from nemo_offload_rl.backends.scoring.readers import HiddenStates, ReadTopK
from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES, ProcessInfo, WeightSpec
from nemo_offload_rl.protocols.scoring import Reader
from nemo_offload_rl.residency import TEACHER, StateGroup

_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class FrozenMegatron:
    """See `FrozenModel`.

    Args:
        settings: The teacher's settings in the form of a policy's.
        cfg: `settings.backend`; the parallel sizes and process groups are the policy's.
        process: This rank.
    """

    def __init__(self, settings: PolicySettings, cfg: MegatronConfig, process: ProcessInfo) -> None:
        check_model_folder(settings.model_name)
        self._dtype = COMPUTE_DTYPES[settings.precision]
        self._device = torch.device(process.device)
        parallel.join_model_parallel(cfg, cfg.model_parallel, process.world_size)
        self.rank_info = parallel.rank_info(process)
        self.temperature, self.softcap = settings.logprob_temperature, None
        self._model = build_model(settings, cfg, is_frozen=True)
        for chunk in self._model.chunks:
            chunk.requires_grad_(False)
        activations = ActivationOffloading([self._model.config], 0, self._device)
        self._passes = Passes(self._model, settings, cfg, activations, self._device)
        specs = [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._named_weights()]
        check_shapes(self._model.folder, specs, self._model.hf_config.model_type)

    def state_groups(self) -> Sequence[StateGroup]:
        """Return one group with all parameters and buffers."""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for index, chunk in enumerate(self._model.chunks):
                for name, tensor in chain(chunk.named_parameters(), chunk.named_buffers()):
                    yield f"chunk{index}/{name}", tensor

        return (StateGroup(TEACHER, tensors),)

    def read(self, micro_batches: Sequence[TokenBatch], reader: Reader) -> list[Any]:
        kind = TopK if isinstance(reader, ReadTopK) else HiddenStates
        with self._passes.reading():
            schedule = self._passes.schedule(micro_batches, keep_scores, lambda _: reader, forward_only=True)
            found = get_forward_backward_func()(**schedule)
        return [kind(*scores_BS) for scores_BS in parallel.from_last_stage(on_cpu(found), self._device)]

    def abandon_pass(self) -> None:
        """Do nothing: passes without gradients leave nothing."""

    def use_stream(self, streamed_layers: Callable[[], Iterator[str]]) -> None:
        """Do nothing: all layers are in one group."""

    def output_rows(self, first: int, count: int) -> Tensor:
        found: dict[str, Tensor] = {}
        for name, tensor in self._named_weights():
            if name in (_OUTPUT, _EMBEDDING):  # tied models have only the embedding
                found[name] = tensor[first : first + count].to(self._dtype, copy=True)
        return found[_OUTPUT] if _OUTPUT in found else found[_EMBEDDING]

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        chunks = list(self._model.chunks)
        yield from self._model.bridge.export_hf_weights(chunks, cpu=False, show_progress=False)

    def all_reduce_max(self, value: int) -> int:
        return max_over_ranks(value, parallel.data_parallel_group(), self._device)

    def close(self) -> None:
        """Do nothing: process groups and caches belong to the policy."""
