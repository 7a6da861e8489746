"""Devices: a mesh of `data` x `fsdp`, and how arrays lie on it.

A batch is split over all devices. The state is the same on all of them or, for
large networks, split over the second axis: each device keeps a share of every
large leaf, and gathers the others' for the network. Arrays are global, so a
mean over the batch is the mean over all devices, and BatchNorm statistics, the
perturbation and all else do not depend on their number.
"""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
import numpy as np

from flatmatch_jax.types import PyTree, UserError

_AXES = ('data', 'fsdp')
# Elements from which a leaf is split: below, 16 KB of float32, sending it
# costs more than keeping it.
_LARGE = 2**12


def make_mesh(fsdp: int = 1, devices=None) -> Mesh:
  """All devices, or those given, of which each `fsdp` share one state.

  Auto axes: gathers from replicated data need them.
  """
  number = jax.device_count() if devices is None else len(devices)
  if fsdp < 1 or number % fsdp:
    divisors = [str(n) for n in range(1, number + 1) if number % n == 0]
    raise UserError(
      f'config.mesh.fsdp={fsdp} must divide the number of devices, {number}; '
      f'choose one of {", ".join(divisors)}.'
    )
  return jax.make_mesh(
    (number // fsdp, fsdp),
    _AXES,
    axis_types=(AxisType.Auto, AxisType.Auto),
    devices=devices,
  )


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def of_state(mesh: Mesh, shapes):
  """The shardings of a train state, from its shapes (`jax.eval_shape`).

  Kernels and matrices with many elements are split over `fsdp`, along the
  largest dimension that it divides: parameters, and with them whatever has
  their shapes, which are averages, momenta, M and a teacher. The rest is
  replicated, and so is a table over the images.
  """
  fsdp = mesh.shape.get('fsdp', 1)

  def of_leaf(leaf):
    axes = [i for i, size in enumerate(leaf.shape) if size % fsdp == 0]
    if fsdp == 1 or leaf.ndim < 2 or leaf.size < _LARGE or not axes:
      return replicated(mesh)
    longest = max(axes, key=lambda axis: leaf.shape[axis])
    return NamedSharding(mesh, PartitionSpec(*longest * [None], 'fsdp'))

  return jax.tree.map(of_leaf, shapes)


def abstract_state(mesh: Mesh, shapes):
  """The shapes of a train state with the shardings of `of_state`."""
  return jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
    shapes,
    of_state(mesh, shapes),
  )


def make_gather(mesh: Mesh | None):
  """Returns `gather(params)`: parameters as a network is to see them, whole.

  A state is split between its uses only. From split weights XLA would compute
  parts of a layer where they are, and send activations, which grow with the
  batch. Gradients are split again, so that each device has its share of them:
  by itself a constraint asks for gradients like its values, whole.
  """
  if mesh is None or mesh.shape.get('fsdp', 1) == 1:
    return lambda params: params
  constrain = jax.lax.with_sharding_constraint

  @jax.custom_vjp
  def gather(params):
    return constrain(params, replicated(mesh))

  def split(_, grads):
    return (constrain(grads, of_state(mesh, grads)),)

  gather.defvjp(lambda params: (gather(params), None), split)
  return gather


def settle(values: PyTree) -> PyTree:
  """Waits for `values` where several CPU devices of this process make them.

  These share a few threads, which a program holds while it waits for a sum over
  the devices: two that overlap can wait for each other's threads for ever.
  Accelerators keep programs in order, and nothing waits.
  """
  if jax.default_backend() == 'cpu' and jax.local_device_count() > 1:
    jax.block_until_ready(values)
  return values


def place(array, sharding: Sharding) -> jax.Array:
  """Puts what every process has on its devices, unless it is there.

  `jax.device_put` would first compare the processes' arrays, all of it.
  """
  if getattr(array, 'sharding', None) == sharding:
    return array
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
