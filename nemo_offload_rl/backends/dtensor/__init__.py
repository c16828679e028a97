"""Hugging Face causal models with FSDP2 and DTensor tensor parallelism, on CPU (gloo) and GPU (NCCL)."""
