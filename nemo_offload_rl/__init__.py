"""RL post-training of language models on Ray, with training state moved at the speed of the link."""

__version__ = "0.1.0"
