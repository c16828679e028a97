"""Model architectures before a model is built: families, sizes, windows, rotary embeddings."""
