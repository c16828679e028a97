"""Low-rank adapters (arXiv 2106.09685) by peft: only adapters are trained; refits and exports get merged weights.

The model's own parameters become the state group `base`. It never changes, so it is copied to the host once. It is in
the compute type if the model's files are, else in float32; adapters and their optimizer are in float32.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.dtensor.parallel import brought, full_tensor
from nemo_offload_rl.backends.hf.export import Adapters
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.dtensor import DTensorLoraConfig
from nemo_offload_rl.protocols.backend import HostView

_ADAPTER, _HOLDER = "default", "model"
_BASE, _A, _B = ".base_layer.", f".lora_A.{_ADAPTER}.", f".lora_B.{_ADAPTER}."


def add_adapters(causal_lm: Any, settings: DTensorLoraConfig, seed: int | None) -> None:
    """Add adapters to linear layers, in place, and freeze everything else.

    Args:
        causal_lm: A Hugging Face causal model.
        settings: `enabled` is true.
        seed: Seed of the adapters' initial values, equal on all ranks; None for adapters on the meta device.

    Raises:
        ConfigError: No layer is adapted, a tied output layer would be, or peft is not installed.
    """
    _require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.dim,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=[f"{_HOLDER}.{name}" for name in adapted_layers(causal_lm, settings)],
        task_type="CAUSAL_LM",
    )
    # In a holder without a config: with a mixture's config, peft takes names of dense layers for those of experts,
    # which experts had in older versions.
    holder = nn.ModuleDict({_HOLDER: causal_lm})
    if seed is None:
        inject_adapter_in_model(config, holder, low_cpu_mem_usage=True)
        return
    with torch.random.fork_rng(devices=[]), _on_the_host(causal_lm):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, holder)
        if settings.lora_A_init == "xavier":
            for name, parameter in causal_lm.named_parameters():
                if _A in name:
                    nn.init.xavier_normal_(parameter)


def check_adapters(config: Any, settings: DTensorLoraConfig) -> None:
    """Make the checks of `add_adapters` without weights.

    Raises:
        ConfigError: As `add_adapters`.
    """
    _require_peft()
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config)
    adapted_layers(causal_lm, settings)


def _require_peft() -> None:
    if find_spec("peft") is None:
        raise ConfigError("policy.dtensor_cfg.lora_cfg.enabled is true, but peft is not installed; pip install peft")


def adapted_layers(causal_lm: Any, settings: DTensorLoraConfig) -> list[str]:
    """Return full names of the linear layers that get adapters.

    Raises:
        ConfigError: No layer gets one, a name fits no layer, or an output layer tied to the embedding would get one.
    """
    if not settings.match_all_linear:
        _check_targets(causal_lm, settings.target_modules)
    output, key = causal_lm.get_output_embeddings(), "policy.dtensor_cfg.lora_cfg"
    # Routers get none: most are no linear layers, and DeepSeek-V2 reads the weight of its own without calling it.
    blocks = [name for name, module in causal_lm.named_modules() if hasattr(module, "experts")]
    routers = tuple(f"{name}.{router}." for name in blocks for router in ("gate", "router"))
    linear = {
        name: layer
        for name, layer in causal_lm.named_modules()
        if isinstance(layer, nn.Linear) and not f"{name}.".startswith(routers)
    }
    if settings.match_all_linear:
        named = [name for name, layer in linear.items() if layer is not output]
    else:
        named = [name for name in linear if _is_named(name, settings.target_modules)]
    names = [name for name in named if not _is_named(name, settings.exclude_modules)]
    if not names:
        last = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"{key} fits no layer of the model, whose linear layers are called {', '.join(last)}; change "
            "target_modules or exclude_modules, or set match_all_linear to true"
        )
    if causal_lm.config.tie_word_embeddings and any(linear[name] is output for name in names):
        raise ConfigError(
            f"{key} gives the output layer adapters, but its weight is the embedding's too (tie_word_embeddings), "
            "which would have to change with it; exclude it with exclude_modules: [lm_head]"
        )
    return names


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a layer's name equals or ends with one of the names, or fits one of the patterns (with a `*`)."""
    return any(
        fnmatchcase(name, pattern) if "*" in pattern else name == pattern or name.endswith(f".{pattern}")
        for pattern in patterns
    )


def _check_targets(causal_lm: nn.Module, targets: Sequence[str]) -> None:
    """Refuse names that fit no linear layer, such as names of a mixture's experts, which can get no adapters."""
    layers = [name for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)]
    unknown = [target for target in targets if not any(_is_named(layer, (target,)) for layer in layers)]
    if unknown:
        known = sorted({layer.rpartition(".")[2] for layer in layers})
        raise ConfigError(
            f"policy.dtensor_cfg.lora_cfg.target_modules has {', '.join(unknown)}, but no linear layer of the model "
            f"has that name (stacked experts are not linear layers, and get no adapters); use some of "
            f"{', '.join(known)}"
        )


@contextmanager
def _on_the_host(causal_lm: nn.Module) -> Iterator[None]:
    """Make peft create adapters on the host for linear layers on the meta device: it uses the weight's device.

    Within the context each weight is one host element, expanded to the weight's shape.
    """
    weights = {layer: layer.weight for layer in causal_lm.modules() if isinstance(layer, nn.Linear)}
    for layer, weight in weights.items():
        layer.weight = nn.Parameter(weight.new_zeros((), device="cpu").expand(weight.shape))
    try:
        yield
    finally:
        for layer, weight in weights.items():
            layer.weight = weight.requires_grad_(layer.weight.requires_grad)


def name_without_adapters(name: str) -> str:
    """Return the name that a parameter of a model with adapters has in the model without them."""
    return name.replace(_BASE, ".")


class LoraWeights:
    """Gives a model with adapters the names and merged weights of the model without adapters.

    Args:
        parameters: All parameters by name, adapters included.
        settings: Settings of the adapters.
    """

    def __init__(self, parameters: list[tuple[str, nn.Parameter]], settings: DTensorLoraConfig) -> None:
        self.trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self.base = [(name, parameter) for name, parameter in parameters if not parameter.requires_grad]
        self._by_name: dict[str, nn.Parameter] = dict(parameters)
        self._settings = settings
        self._scaling = settings.alpha / settings.dim

    def named_base(self) -> list[tuple[str, nn.Parameter]]:
        """Return the model's own parameters, by their names without adapters."""
        return [(name_without_adapters(name), parameter) for name, parameter in self.base]

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes of the merged weights."""
        return [(name, tuple(parameter.shape)) for name, parameter in self.named_base()]

    def adapters(self) -> Adapters:
        """Return the adapters for an export; their weights are a collective."""
        weights = (
            (name.replace(f".{_ADAPTER}.", "."), full_tensor(one, torch.float32)) for name, one in self.trainable
        )
        return Adapters(weights, self._settings.dim, self._settings.alpha, self._settings.dropout)

    def full(self, dtype: torch.dtype, host_view: HostView, *, merges: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights, by their names without adapters, which are merged into them or left out; a collective."""
        for name, parameter in self.base:
            parameter = brought(parameter, host_view)
            plain = name_without_adapters(name)
            if not merges or _BASE not in name or not name.endswith("weight"):
                yield plain, full_tensor(parameter, dtype)
                continue
            a_RI, b_OR = (full_tensor(self._by_name[name.replace(_BASE, side)], torch.float32) for side in (_A, _B))
            # In peft's order of operations. Not in place: on one rank the full tensor is the parameter itself.
            weight_OI = full_tensor(parameter, torch.float32)
            yield plain, (weight_OI + (b_OR @ a_RI) * self._scaling).to(dtype)
