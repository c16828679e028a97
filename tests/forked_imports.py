"""What every process of `forked.py` has imported already; their server imports this module once."""

import importlib
import os
import warnings

from nemo_offload_rl.policy.backends.megatron.bridge_import import import_auto_bridge

MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "nemo_offload_rl.algorithms.grpo_setup",
    "nemo_offload_rl.distributed.policy_group",
    "nemo_offload_rl.policy.backends.dtensor.backend",
    "nemo_offload_rl.policy.worker",
)

with warnings.catch_warnings(action="ignore"):
    for name in (*MODULES, *os.environ["FORKED_IMPORTS"].split()):
        importlib.import_module(name)
    import_auto_bridge()
