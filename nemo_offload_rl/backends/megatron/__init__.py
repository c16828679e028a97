"""Megatron-core models on GPUs, built from Hugging Face folders by Megatron-Bridge."""
