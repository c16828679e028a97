"""One Ray cluster for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from echo_workers import cpu_cluster

from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster, cluster_session


@pytest.fixture(scope="module")
def cluster(ray_here: Callable[[], None]) -> Iterator[VirtualCluster]:
    """Two slots; workers can import what tests can."""
    ray_here()
    with cluster_session(cpu_cluster(2), num_colocated_groups=4) as session:
        yield session
