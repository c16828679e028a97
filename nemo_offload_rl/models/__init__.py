"""What is known of model architectures before a model is built. Imports no model library."""
