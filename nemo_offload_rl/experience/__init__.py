"""Rollouts: sampled and scored responses."""
