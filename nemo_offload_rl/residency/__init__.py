"""Residency: which bytes are on the device in which phase, and how they get there and back.

Imports torch and nothing else of this project. See docs/design/residency.md.
"""

# pyright: reportUnusedImport=false
from nemo_offload_rl.residency.device.cuda import make_device
from nemo_offload_rl.residency.device.device import CpuDevice, Device, meminfo_bytes
from nemo_offload_rl.residency.host.arena import HostArena, HostBlock, aligned
from nemo_offload_rl.residency.host.regions import new_region_on
from nemo_offload_rl.residency.manager import ResidencyManager
from nemo_offload_rl.residency.needs import PassKind, PassNeed
from nemo_offload_rl.residency.state.frozen_copy import part_copy_bytes, snapshot_bytes, snapshot_is_cast
from nemo_offload_rl.residency.streams.passing import PassingParts
from nemo_offload_rl.residency.table.errors import (
    DeviceOutOfMemoryError,
    HostBudgetError,
    OpenStepError,
    ResidencyError,
)
from nemo_offload_rl.residency.table.groups import (
    GradsGroup,
    StateGroup,
    local_tensor,
    optimizer_tensors,
    storage_bytes,
    storage_key,
    unique_storages,
)
from nemo_offload_rl.residency.table.ledger import TransitionReport, totals
from nemo_offload_rl.residency.table.plan import (
    BASE,
    GRADS,
    GRADS_PART,
    OPTIMIZER,
    OPTIMIZER_PART,
    PARAMS,
    PARAMS_PART,
    PHASES,
    REFERENCE,
    TEACHER,
    TEACHER_HEAD,
    TEACHER_LAYER,
    Phase,
    PhaseSpec,
    Placement,
    ResidencyPlan,
    ResidencySettings,
    resolve_plan,
    row_of,
)
