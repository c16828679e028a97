"""The tensors of a Hugging Face checkpoint: their names, and their contents, read slice by slice.

A layer's experts are one parameter in `transformers` and one tensor per expert in most checkpoints; some modules have
another name there (`HubNames`, from the conversion rules of `transformers`). A refit sends the stacked experts under
the checkpoint's name of their module (`generation/vllm/stacked_experts.py` has the form); an export divides them.
"""

import logging
import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_offload_rl.backends.hf.model_folder import find_file, find_weight_files, read_model_config
from nemo_offload_rl.backends.hf.quantized import find_packed
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.models.towers import place_in_whole, placed
from nemo_offload_rl.utils.liveness import show_progress

logger = logging.getLogger(__name__)

# Old checkpoints store these buffers, which the model now computes; `transformers` ignores them too.
_STACKED = (".experts.gate_up_proj", ".experts.down_proj")
COMPUTED = r"rotary_emb\.inv_freq$"
# transformers reads embeddings of Nemotron-H and norms of OLMo Hybrid under other names too, and 5.12.1 saves them so.
# vLLM 0.25.1 does not read these names.
_NEVER_PUBLISHED = {
    ("nemotron_h", "embeddings.weight"): ("embeddings.weight", "embedding.weight"),
    ("olmo_hybrid", "input_layernorm"): ("input_layernorm.weight", "attention_layer_norm.weight"),
    ("olmo_hybrid", "post_attention_layernorm"): ("post_attention_layernorm.weight", "feedforward_layer_norm.weight"),
}
_FLOATS: dict[Any, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_FLOATS |= {dtype: dtype for dtype in _FLOATS.values()}  # a .bin file has torch's types
# The square of a larger weight overflows float32: norms divide by infinity, and all gradients are 0.
LARGEST_WEIGHT = math.sqrt(torch.finfo(torch.float32).max)
_READ_ERRORS = (OSError, RuntimeError, SafetensorError, pickle.UnpicklingError, EOFError)


class WeightFiles:
    """The weights of a model folder or of a hub's model.

    A safetensors file is mapped for one slice and closed again, so that only the slice counts as this process's memory;
    `held_open` keeps files mapped for several slices. A `pytorch_model*.bin` stays mapped until another one is read;
    the format before torch 1.6 cannot be mapped and is read whole. Weights in 8 or 4 bits are read as bfloat16.

    Args:
        model_name: Folder or hub name.
        paths: Files to read; None for those that `transformers` would read.

    Attributes:
        shapes: Shape of each tensor.
        dtypes: Type in which each tensor is read.
        paths: File of each tensor.
        are_packed: Some tensors have 8 or 4 bits in the files.

    Raises:
        UserError: There are no weights, a file is damaged, or a tensor is not floating-point.
    """

    def __init__(self, model_name: str, paths: Iterable[Path] | None = None) -> None:
        self._model_name = model_name
        self.paths: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._held: tuple[ExitStack, dict[Path, Any]] | None = None
        self._open_bin: tuple[Path, Mapping[str, Tensor]] | None = None
        headers: dict[str, tuple[tuple[int, ...], Any]] = {}
        for path in find_weight_files(model_name) if paths is None else paths:
            found = self._header(path)
            headers |= found
            self.paths |= dict.fromkeys(found, path)
        self._packed, others = find_packed(headers, self._weight_block_size())
        self.are_packed = bool(self._packed)
        for name, (shape, dtype) in headers.items():
            if name in others:
                continue
            if dtype not in _FLOATS:
                raise UserError(
                    f"{self.paths[name]} has {name} as {dtype}, which is not a floating-point type: quantized weights "
                    "of this kind cannot be read; use the model's 16- or 32-bit weights"
                )
            self.shapes[name], self.dtypes[name] = shape, _FLOATS[dtype]
        for name, tensor in self._packed.items():
            self.shapes[name], self.paths[name] = tensor.shape, self.paths[tensor.stored[0]]
            self.dtypes[name] = torch.bfloat16

    def _weight_block_size(self) -> Sequence[int] | None:
        """Return rows and columns of the weights with a common factor, of a model in 8 bits."""
        if find_file(self._model_name, "config.json") is None:
            return None
        return (read_model_config(self._model_name).get("quantization_config") or {}).get("weight_block_size")

    def read(
        self, name: str, offsets: Sequence[int], sizes: Sequence[int], device: torch.device | None = None
    ) -> Tensor:
        """Read a part of a tensor, in the file's dtype (bfloat16 if that has 8 or 4 bits).

        On the CPU, the result may be a view of the mapped file.

        Args:
            name: One of `shapes`.
            offsets: Offset of the part in each dimension.
            sizes: Extent of the part in each dimension.
            device: Device of the result, which also looks for faults; None for the CPU.

        Raises:
            UserError: The file cannot be read, or the part has NaN, infinity or a value above `LARGEST_WEIGHT`.
        """
        packed = self._packed.get(name)
        part = self._read(name, offsets, sizes) if packed is None else packed.read(self._read, offsets, sizes)
        part = part.to(device)
        if (fault := fault_in(part)) is not None:
            raise UserError(
                f"The weights of policy.model_name={self._model_name} have {fault} in {name} ({self.paths[name]}); "
                "the file is damaged, or was saved from a broken run: copy it again, or choose another model"
            )
        return part

    def _read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        where = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        path = self.paths[name]
        show_progress()
        try:
            if path.suffix == ".bin":
                return self._bin(path)[name][where]
            if self._held is not None:
                stack, files = self._held
                if path not in files:
                    files[path] = stack.enter_context(safe_open(path, framework="pt"))
                return files[path].get_slice(name)[where]
            with safe_open(path, framework="pt") as file:
                return file.get_slice(name)[where]
        except _READ_ERRORS as error:
            raise self._unreadable(path, error) from error

    def read_whole(self, name: str) -> Tensor:
        """Read a whole tensor; see `read`."""
        shape = self.shapes[name]
        return self.read(name, (0,) * len(shape), shape)

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """Keep each file open after its first read, within the context."""
        with ExitStack() as stack:
            self._held = stack, {}
            try:
                yield
            finally:
                self._held = None

    def _header(self, path: Path) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return shapes and dtypes by name; refuses a file that is shorter than its header says."""
        try:
            if path.suffix == ".bin":
                return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._bin(path).items()}
            with safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        except _READ_ERRORS as error:
            raise self._unreadable(path, error) from error

    def _bin(self, path: Path) -> Mapping[str, Tensor]:
        if self._open_bin is None or self._open_bin[0] != path:
            self._open_bin = None
            self._open_bin = path, _load_bin(path)
        return self._open_bin[1]

    def _unreadable(self, path: Path, error: BaseException) -> UserError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return UserError(
            f"The weights of policy.model_name={self._model_name} cannot be read from {path} ({reason}); the file is "
            "damaged or incomplete: copy it again"
        )


@torch.no_grad()
def fault_in(weights: Tensor) -> str | None:
    """Return, as text, a value that no weight can have (NaN or above `LARGEST_WEIGHT`); None if there is none."""
    if not weights.numel():
        return None
    low, high = (float(value) for value in torch.aminmax(weights))  # with a NaN, both are NaN
    if math.isnan(low):
        return "NaN"
    largest = max(abs(low), abs(high))
    return f"{high if largest == abs(high) else low:g}" if largest > LARGEST_WEIGHT else None


def _load_bin(path: Path) -> Mapping[str, Tensor]:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
    logger.warning(
        "%s has the format before torch 1.6: every rank reads all of its %.1f GiB into memory; save the model as "
        "safetensors",
        path,
        path.stat().st_size / 2**30,
    )
    return torch.load(path, map_location="cpu", weights_only=True)


def check_same_tensors(
    model_name: str,
    wanted: Mapping[str, Sequence[int]],
    found: Mapping[str, Sequence[int]],
    harmless: Iterable[str] = (),
    paths: Mapping[str, Path] | None = None,
) -> None:
    """Refuse weights whose names or shapes differ from the model's.

    Args:
        model_name: For the message.
        wanted: Shapes by name that the model has.
        found: Shapes by name that the files have.
        harmless: Regular expressions of names that may be in the files only.
        paths: File of each tensor, for the message.

    Raises:
        UserError: Names the first difference, and how many there are.
    """
    fault, place = None, ""
    if missing := sorted(wanted.keys() - found.keys()):
        fault = f"lack {len(missing)} of the {len(wanted)} tensors that its config asks for, first {missing[0]}"
    elif unexpected := sorted(
        name for name in found.keys() - wanted.keys() if not any(re.search(pattern, name) for pattern in harmless)
    ):
        fault = f"have {len(unexpected)} tensors that its config does not ask for, first {unexpected[0]}"
    elif misshapen := sorted(name for name in wanted if tuple(found[name]) != tuple(wanted[name])):
        name = misshapen[0]
        fault = (
            f"have {len(misshapen)} tensors of another shape than its config asks for, first {name}: "
            f"{tuple(found[name])} instead of {tuple(wanted[name])}"
        )
        place = "" if paths is None else f" ({paths[name]})"
    if fault is not None:
        raise UserError(
            f"The weights of {model_name} {fault}{place}; the folder is incomplete or its config.json (with "
            "policy.hf_config_overrides) is of another model"
        )


@dataclass(frozen=True)
class Piece:
    """A checkpoint's tensor that is a part of a parameter.

    Attributes:
        name: Name in the checkpoint.
        shape: Shape in the checkpoint.
        offsets: Offsets in the parameter.
        sizes: Extent in the parameter, with a 1 for the dimension of the experts.
        is_transposed: The checkpoint has the last two dimensions in the other order (Qwen3-VL's experts).
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_transposed: bool = False


def in_order_of(shape: Sequence[int], stacked: Tensor) -> Tensor:
    """Return stacked experts with their last two dimensions swapped, if a checkpoint's shape has them so."""
    return stacked if tuple(stacked.shape) == tuple(shape) else stacked.transpose(-1, -2)


class HubNames:
    """The names of one family's checkpoints.

    Args:
        model_type: The family, by config.json.
        place: The model's place in a larger one, as `place_in_whole` returns it.
    """

    def __init__(self, model_type: str, place: Mapping[str, str] | None = None) -> None:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import Concatenate, MergeModulelist, PrefixChange, WeightConverter

        self._place = place or {}
        self._model_type = model_type
        self._renamings: list[Any] = []
        self._experts: dict[str, tuple[str, ...]] = {}  # end of a parameter's name -> ends of an expert's tensor names
        for rule in get_checkpoint_conversion_mapping(model_type) or ():
            if isinstance(rule, PrefixChange):
                continue  # folders of a part of a larger model have the names of the part
            if not isinstance(rule, WeightConverter):
                if (model_type, *rule.target_patterns) in _NEVER_PUBLISHED:
                    continue
                self._renamings.append(rule.reverse_transform())
                continue
            kinds = [type(operation) for operation in rule.operations]
            assert kinds in ([MergeModulelist], [MergeModulelist, Concatenate]), f"{model_type}: {rule}"
            (stacked,) = rule.target_patterns
            ends = (pattern[pattern.index(".experts.") :] for pattern in rule.source_patterns)
            self._experts[stacked[stacked.index(".experts.") :]] = tuple(ends)

    def of(self, name: str) -> str:
        """Return a parameter's checkpoint name; for stacked experts their module's, followed by the parameter's own."""
        for rule in reversed(self._renamings):
            name = rule.rename_source_key(name)[0]
        return placed(name, self._place)

    def other(self, name: str) -> str:
        """Return another name of a parameter in folders that transformers saved; mostly the same one."""
        pairs = (pair for (model_type, _), pair in _NEVER_PUBLISHED.items() if model_type == self._model_type)
        name = self.of(name)
        return next((name.replace(*pair) for pair in pairs if name.endswith(pair[0])), name)

    def pieces(self, name: str, shape: Sequence[int]) -> list[Piece]:
        """Return the checkpoint's tensors that make up a parameter.

        Args:
            name: Name of the parameter, or the result of `of` for it.
            shape: Shape of the parameter.
        """
        name = self.of(name)
        place, end, own_name = name.partition(".experts.")
        ends = self._experts.get(end + own_name)
        if ends is None:
            return [Piece(name, tuple(shape), (0,) * len(shape), tuple(shape))]
        num_experts, num_rows, *rest = shape
        rows = num_rows // len(ends)
        return [
            Piece(place + part.replace("*", str(expert)), (rows, *rest), (expert, index * rows, 0), (1, rows, *rest))
            for expert in range(num_experts)
            for index, part in enumerate(ends)
        ]

    def divided(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors, by name, as views of a whole parameter."""
        for piece in self.pieces(name, value.shape):
            where = tuple(slice(begin, begin + size) for begin, size in zip(piece.offsets, piece.sizes, strict=True))
            yield piece.name, value[where].view(piece.shape)


class LanguageModelFiles:
    """The language model's tensors in a folder that reads images too, named as in a folder of text alone.

    Each expert has tensors of its own, even if the files have stacked experts.

    Args:
        files: All tensors of the folder.
        model_type: The language model's family.
        hidden_size: Hidden size of the language model; its place in a shape shows whether dimensions are swapped.

    Attributes:
        shapes: Shape of each tensor.
        are_packed: See `WeightFiles`.
    """

    def __init__(self, files: WeightFiles, model_type: str, hidden_size: int) -> None:
        self.are_packed = files.are_packed
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = files
        self._sources: dict[str, tuple[str, Piece, bool]] = {}
        place, hub = place_in_whole(files.shapes), HubNames(model_type)
        for name, shape in files.shapes.items():
            begin = next((own for own, there in place.items() if name.startswith(there)), None)
            if begin is None:
                continue
            is_down = name.endswith(".experts.down_proj")
            is_swapped = name.endswith(_STACKED) and shape[1 if is_down else 2] != hidden_size
            inner = (shape[0], shape[2], shape[1]) if is_swapped else shape
            for piece in hub.pieces(begin + name.removeprefix(place[begin]), inner):
                self._sources[piece.name] = name, piece, is_swapped
                self.shapes[piece.name] = piece.shape

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        source, piece, is_swapped = self._sources[name]
        stacked = len(piece.offsets) - len(offsets)
        begins = [*piece.offsets[:stacked], *(a + b for a, b in zip(piece.offsets[stacked:], offsets, strict=True))]
        extents = [1] * stacked + list(sizes)
        if is_swapped:
            begins, extents = ([it[0], it[2], it[1]] for it in (begins, extents))
        part = self._files.read(source, begins, extents)
        return (part.transpose(-1, -2) if is_swapped else part).reshape(tuple(sizes))

    def read_whole(self, name: str) -> Tensor:
        """Read a whole tensor."""
        return self.read(name, (0,) * len(self.shapes[name]), self.shapes[name])
