"""Settings like those of published models are refused by nothing: what rules read of their config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_offload_rl.models.families import FAMILIES, unsupported_settings
from nemo_offload_rl.models.served import unserved

LINES = Path(__file__).with_name("published.jsonl").read_text().splitlines()
PUBLISHED = {config.pop("name"): config for config in map(json.loads, LINES)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_like_those_of_a_published_model_are_refused_by_nothing(name):
    config = PUBLISHED[name]
    assert unserved(config, 8192) is None
    for backend in FAMILIES[config["model_type"]].trained_by:
        assert unsupported_settings(config, backend) is None
