import pytest

from nemo_offload_rl.data.settings import EnvSettings
from nemo_offload_rl.environments.arithmetic import ArithmeticEnvironment
from nemo_offload_rl.environments.registry import make_environments
from nemo_offload_rl.errors import ConfigError


def test_environments_are_made_by_name():
    made = make_environments({"arithmetic": EnvSettings(num_workers=0)})
    assert isinstance(made["arithmetic"], ArithmeticEnvironment)


def test_an_unknown_environment_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'chess' is unknown; .*arithmetic, math"):
        make_environments({"chess": EnvSettings(num_workers=1)})
