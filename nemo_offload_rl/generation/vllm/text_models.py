"""Language models of Qwen3.5 without the parts that read images; vLLM imports them by name (`register_models`).

vLLM 0.25.1 has these models inside of those that read images, but registers only the latter. It asks a registered model
for the sizes and types of its states.
"""

from typing import Any

from vllm.model_executor.models import qwen3_5
from vllm.model_executor.models.interfaces import IsHybrid

_WithImages: Any = qwen3_5.Qwen3_5ForConditionalGeneration


class _States(IsHybrid):
    """Answers about states as the models that read images do."""

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> Any:
        """See vLLM's class."""
        return _WithImages.get_mamba_state_dtype_from_config(vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> Any:
        """See vLLM's class."""
        return _WithImages.get_mamba_state_shape_from_config(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """See vLLM's class."""
        return _WithImages.get_mamba_state_copy_func()


class Qwen3_5ForCausalLM(qwen3_5.Qwen3_5ForCausalLM, _States):
    """The dense model."""


class Qwen3_5MoeForCausalLM(qwen3_5.Qwen3_5MoeForCausalLM, _States):
    """The model with experts."""
