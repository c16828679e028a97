"""Verifiable tasks that score responses."""
