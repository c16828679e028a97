"""One Ray cluster for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster, cluster_session

TESTS = str(Path(__file__).parents[2])
ROOT = str(Path(__file__).parents[3])


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    """Two slots; workers can import what tests can."""
    from ray_workers import cpu_cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([ROOT, TESTS]))
        with cluster_session(cpu_cluster(2), num_colocated_groups=4) as session:
            yield session
