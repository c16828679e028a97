"""Whole hosts of a Ray cluster: one placement group for each, one bundle for each device of it.

Ray itself would rather put the bundles of two hosts onto one that is large enough, or spread one host's over several.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.run import ClusterConfig

_TIMEOUT_S = 120.0
_NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Slot:
    """One reserved device: a bundle of its host's placement group."""

    group: PlacementGroup
    bundle_index: int
    node_id: str


def reserve_slots(settings: ClusterConfig) -> list[Slot]:
    """A slot for each device, host by host, the driver's host first.

    Raises:
        ConfigError: The cluster does not have that many hosts with that many devices, or they are taken.
    """
    _check_resources(settings)
    deadline_s = time.monotonic() + _TIMEOUT_S
    groups: dict[str, PlacementGroup] = {}
    try:
        for _ in range(settings.num_nodes):
            group = _host_group(settings, taken=list(groups))
            try:
                ray.get(group.ready(), timeout=max(0.0, deadline_s - time.monotonic()))
            except GetTimeoutError:
                remove_placement_group(group)
                raise ConfigError(
                    f"The Ray cluster has {settings.world_size} devices on {settings.num_nodes} hosts, but they were "
                    f"not free within {_TIMEOUT_S:.0f} s; end the other job on it or ask for fewer devices"
                ) from None
            groups[placement_group_table(group)["bundles_to_node_id"][0]] = group
    except BaseException:
        release_groups(groups.values())
        raise
    here = ray.get_runtime_context().get_node_id()
    return [
        Slot(groups[node_id], bundle_index, node_id)
        for node_id in sorted(groups, key=lambda node_id: (node_id != here, node_id))
        for bundle_index in range(settings.workers_per_node)
    ]


def release_groups(groups: Iterable[PlacementGroup]) -> None:
    """Give hosts back."""
    if ray.is_initialized():
        for group in groups:
            remove_placement_group(group)


def _host_group(settings: ClusterConfig, taken: Sequence[str]) -> PlacementGroup:
    """All devices of one host that is not taken."""
    bundles = [dict.fromkeys(_resource_names(settings), 1.0)] * settings.workers_per_node
    if not taken:
        return placement_group(bundles, strategy="STRICT_PACK")
    others = {_NODE_LABEL: f"!in({','.join(taken)})"}
    return placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=[others] * len(bundles))


def _resource_names(settings: ClusterConfig) -> tuple[str, ...]:
    return ("CPU", "GPU") if settings.device_type == "cuda" else ("CPU",)


def _check_resources(settings: ClusterConfig) -> None:
    per_node = "gpus_per_node" if settings.device_type == "cuda" else "cpu_workers_per_node"
    asked = f"cluster.{per_node}={settings.workers_per_node} on cluster.num_nodes={settings.num_nodes}"
    hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for resource in _resource_names(settings):
        counts = [int(host[resource]) if resource in host else 0 for host in hosts]
        if sum(counts) < settings.world_size:
            raise ConfigError(
                f"{asked} needs {settings.world_size} {resource}s, but the Ray cluster has {sum(counts)}; lower "
                f"cluster.{per_node} or join a larger one"
            )
        if sum(count >= settings.workers_per_node for count in counts) < settings.num_nodes:
            raise ConfigError(
                f"{asked} needs {settings.num_nodes} hosts with {settings.workers_per_node} {resource}s each, but "
                f"those of the Ray cluster have {', '.join(map(str, sorted(counts, reverse=True)))}; change one of them"
            )
