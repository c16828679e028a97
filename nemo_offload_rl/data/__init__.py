"""Data sets, prompts and typed batches."""
