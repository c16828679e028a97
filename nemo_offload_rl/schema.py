"""Building blocks of the YAML border.

A TypedDict key is written `name: Annotated[type, doc("purpose, values, unit", ge=1)]`. pydantic checks types and
limits, `nemo_offload_rl.config.reference` writes docs/reference/configuration.md from the texts, and unknown keys are
refused by `closed`. Defaults are in YAML only.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, with_config

closed = with_config(ConfigDict(extra="forbid"))
"""Class decorator: keys that the TypedDict does not name are an error."""


def doc(text: str, **limits: Any) -> Any:
    """Describe a key: purpose, values and unit, and `ge`, `gt`, `le` or `lt` limits that pydantic enforces."""
    return Field(description=text, **limits)
