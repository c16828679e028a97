"""Training backends behind one protocol."""
