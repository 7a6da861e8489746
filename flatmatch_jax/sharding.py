"""Devices: one mesh axis, `data`; the state is replicated, batches are split.

Arrays are global, so a mean over the batch is the mean over all devices, and
BatchNorm statistics and the perturbation do not depend on their number.
"""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
import numpy as np


def make_mesh() -> Mesh:
  """All devices in a row. Auto axes: gathers from replicated data need them."""
  return jax.make_mesh(
    (jax.device_count(),), ('data',), axis_types=(AxisType.Auto,)
  )


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec('data'))


def place(array, sharding: Sharding) -> jax.Array:
  """Puts what every process has on its devices.

  `jax.device_put` would first compare the processes' arrays, all of it.
  """
  array = np.asarray(array)
  return jax.make_array_from_callback(
    array.shape, sharding, lambda index: array[index]
  )


def local_rows(sharding: NamedSharding, size: int) -> np.ndarray:
  """Which of `size` rows lie on devices of this process, in order."""
  parts = sharding.addressable_devices_indices_map((size,)).values()
  rows = [np.arange(size)[index] for index in parts if index is not None]
  return np.unique(np.concatenate(rows))


def from_local_rows(local: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """The global array of which each process has its `local_rows`."""
  devices = sharding.num_devices
  size = len(local) * devices // len(local_rows(sharding, devices))
  rows = local_rows(sharding, size)

  def part(index):
    first, stop, _ = index[0].indices(size)
    return local[slice(*np.searchsorted(rows, (first, stop)))]

  return jax.make_array_from_callback((size, *local.shape[1:]), sharding, part)
