"""Devices: one mesh axis, `data`; the state is replicated, batches are split.

Arrays are global, so a mean over the batch is the mean over all devices, and
BatchNorm statistics and the perturbation do not depend on their number.
"""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def make_mesh() -> Mesh:
  """All devices in a row. Auto axes: gathers from replicated data need them."""
  return jax.make_mesh(
    (jax.device_count(),), ('data',), axis_types=(AxisType.Auto,)
  )


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec('data'))
