"""A reward for models that have learnt nothing: whatever they say, responses of a group differ in it."""

from __future__ import annotations


def variety(response: str) -> float:
    """Different characters among all."""
    return len(set(response)) / max(len(response), 1)
