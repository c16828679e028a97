"""Loads the adapters of a refit into vLLM's only slot for adapters, which every request uses.

vLLM itself loads adapters from files, by name and number; here they come in buckets, and the new ones replace those of
the slot before the next request. The model's own weights come in the same refits if the engine sleeps, since it
discards them (`RefitSession`). Otherwise the engine has read them from the model's folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.generation.vllm.weight_loading import BucketReader, RefitSession, SeenLoads
from nemo_offload_rl.keys.engine import ServedAdapters
from nemo_offload_rl.protocols.refit import RefitError, WeightBucket, listed

NAME, NUMBER = "policy", 1
_ENDS = (".lora_A.weight", ".lora_B.weight")  # of the names of adapters


def adapter_request() -> Any:
    """Return the request for the policy's adapters, which vLLM asks for with each prompt; no file is read."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=NAME, lora_int_id=NUMBER, lora_path="/sent/by/refits")


def lora_args(served: ServedAdapters) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one set of adapters, which all requests use."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": served.max_rank,
        "lora_target_modules": list(served.modules),
        **({} if served.with_weights else {"load_format": "auto"}),
    }


class AdapterSession:
    """One refit of one vLLM worker: load every bucket, then `finish`.

    Args:
        runner: `model_runner` of vLLM's worker, made with `enable_lora`.
        seen: Records of earlier refits of this model.
        reader: Reads buckets; `finish` and `close` close it.
    """

    def __init__(self, runner: Any, seen: SeenLoads, reader: BucketReader) -> None:
        self._manager = runner.lora_manager._adapter_manager
        self._dtype: torch.dtype = runner.lora_config.lora_dtype
        self._reader = reader
        self._tensors: dict[str, Tensor] = {}
        self._weights: RefitSession | None = None
        if runner.vllm_config.load_config.load_format == "dummy":
            with self._bare_model():
                self._weights = RefitSession(self._manager.model, seen, reader)

    def load(self, bucket: WeightBucket) -> None:
        """Copy adapters to the host and weights into the model; the bucket's buffer may be overwritten afterwards.

        Raises:
            RefitError: A tensor came twice, or the model has no such tensor, or one of another shape.
        """
        weights = tuple(piece for piece in bucket.slices if not piece.name.endswith(_ENDS))
        if self._weights is not None and weights:
            with self._bare_model():
                self._weights.load(replace(bucket, slices=weights))
            bucket = replace(bucket, slices=tuple(piece for piece in bucket.slices if piece.name.endswith(_ENDS)))
        if twice := self._tensors.keys() & {piece.name for piece in bucket.slices}:
            raise RefitError(f"These tensors came twice in one refit: {listed(twice)}")
        for name, tensor in self._reader.tensors(bucket):
            self._tensors[name] = tensor.to("cpu", self._dtype, copy=True)

    def finish(self) -> dict[str, tuple[int, int]]:
        """Put the adapters into the slot.

        Returns:
            Tensors that were read in part, see `RefitSession.finish`.

        Raises:
            RefitError: Weights did not come, an adapter's layer is not the engine's, or one of its two matrices did not
                come.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        self.close()
        read_in_part: dict[str, tuple[int, int]] = {}
        if self._weights is not None:
            with self._bare_model():
                read_in_part = self._weights.finish()
        halves = self._by_layer()
        served = {
            part: module.base_layer
            for name, module in self._manager.modules.items()
            for part in (name, *self._manager.packed_modules.get(name, ()))
        }
        if unknown := halves.keys() - served.keys():
            raise RefitError(
                f"The engine has no layers {listed(unknown)} that take adapters; set policy.generation.enable_lora to "
                "false, which sends merged weights"
            )
        # vLLM copies smaller matrices into a part of its buffers, without an error.
        narrow = [layer for layer, it in halves.items() if it["A"].shape[1] != served[layer].input_size]
        if narrow:
            raise RefitError(f"The engine's layers {listed(narrow)} have another number of inputs than the policy's")
        # The policy sends products already scaled, so vLLM's scale is 1.
        adapters = {
            layer: LoRALayerWeights(layer, len(of_layer["A"]), len(of_layer["A"]), of_layer["A"], of_layer["B"])
            for layer, of_layer in halves.items()
        }
        rank = max(adapter.rank for adapter in adapters.values())
        try:
            with torch.inference_mode():
                self._manager._last_mapping = None  # a sleep may have discarded what vLLM derived from it
                self._manager.remove_adapter(NUMBER)
                self._manager.add_adapter(LoRAModel(NUMBER, rank, adapters))
                self._manager.activate_adapter(NUMBER)
        except (RuntimeError, ValueError, AssertionError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RefitError(f"The engine cannot load the policy's adapters: {reason}") from error
        return read_in_part

    def close(self) -> None:
        """Close the sender's buffers."""
        self._reader.close()

    @contextmanager
    def _bare_model(self) -> Iterator[None]:
        """Give the model's layers, within the context, the names that they have without adapters."""
        layers: dict[str, Any] = self._manager.modules
        try:
            for name, layer in layers.items():
                self._manager.model.set_submodule(name, layer.base_layer)
            yield
        finally:
            for name, layer in layers.items():
                self._manager.model.set_submodule(name, layer)

    def _by_layer(self) -> dict[str, dict[str, Tensor]]:
        """Return A [rank, in] and B [out, rank] of each layer, by the engine's name of the layer."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_unstacked_mapper()
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._tensors.items():
            layer, is_first = parse_fine_tuned_lora_name(name, mapper)
            halves.setdefault(layer, {})["A" if is_first else "B"] = tensor
        if lacking := [f"{layer}.lora_{half}" for layer, it in halves.items() for half in "AB" if half not in it]:
            raise RefitError(f"The policy sent no {listed(lacking)}")
        return halves
