"""The step of a config, compiled for devices that need not be there.

What tpu_compile.py and gpu_compile.py share.
"""

from collections.abc import Callable
import json
import pathlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import steps
from flatmatch_jax import data as data_lib
from flatmatch_jax.data import resident, streaming
from flatmatch_jax.paper import cost
from flatmatch_jax.system import files, sharding
from flatmatch_jax.training import program as program_lib
from flatmatch_jax.types import Batch, DatasetInfo


def abstract_data(config, views, mesh):
  """What a feed gives the step, as shapes: all images, or a step's."""
  count, shape = cost.IMAGES[config.dataset]
  if config.dataset not in ('imagenet', 'imagenet30'):
    labeled = count if config.labels == 'all' else config.labels
    return steps.data_shapes(count, shape, labeled, mesh)
  split = lambda dtype, *shape: jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding.over_batch(mesh)
  )
  images = lambda rows: split(jnp.uint8, rows, *shape)
  number = lambda rows: split(jnp.int32, rows)
  rows = config.batch_size
  labeled = {'weak': images(rows), 'label': number(rows)}
  labeled['index'] = number(rows)
  rows = config.unlabeled_batch_size
  unlabeled = {name: images(rows) for name in views}
  return Batch(
    labeled, unlabeled | {'index': number(rows), 'truth': number(rows)}
  )


def lower(config, mesh):
  """The step as `loop.py` compiles it on the devices of `mesh`."""
  platform = mesh.devices.flat[0].platform
  with mock.patch.object(jax, 'default_backend', return_value=platform):
    return _lower(config, mesh)


def _lower(config, mesh):
  count, shape = cost.IMAGES[config.dataset]
  classes = data_lib.SOURCES[config.dataset].num_classes or 0
  program = program_lib.create(
    config,
    DatasetInfo(classes, count, count, (1,) * classes),
    shape,
    mesh=mesh,
  )
  over_batch = sharding.over_batch(mesh)
  data = abstract_data(config, program.views, mesh)
  streams = isinstance(data, Batch)
  pipeline = streaming.PIPELINE if streams else resident.PIPELINE
  sample = program_lib.make_sample(config, program.views, over_batch, pipeline)
  shapes = jax.eval_shape(program.init, jax.eval_shape(jax.random.key, 0))
  out = sharding.of_state(mesh, shapes), sharding.replicated(mesh)
  step = lambda state, data: program.step(state, sample(data, state))
  jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
  return jitted.lower(sharding.abstract_state(mesh, shapes), data)


def memory(compiled) -> tuple[int, int]:
  """Bytes that the program holds at once, and those of temporaries."""
  found = compiled.memory_analysis()
  held = found.argument_size_in_bytes + found.output_size_in_bytes
  held += found.temp_size_in_bytes - found.alias_size_in_bytes
  return held, found.temp_size_in_bytes


def as_json(sent: dict[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
  """Collectives by kind: how many, and their bytes."""
  return {
    kind: {'count': count, 'bytes': size}
    for kind, (count, size) in sent.items()
  }


def describe(config, chips: int, factor: int) -> dict[str, Any]:
  """What a row is about. Its batch is `factor` times the config's own."""
  return {
    'dataset': config.dataset,
    'model': config.model,
    'method': config.method,
    'batch_norm': config.batch_norm,
    'dtype': config.dtype,
    'chips': chips,
    'fsdp': config.mesh.fsdp,
    'batch_size': config.batch_size,
    'unlabeled_batch_size': config.unlabeled_batch_size,
    'batch_factor': factor,
    'remat': config.remat,
    'microbatches': config.microbatches,
    'optimizer': config.optimizer,
    'labels': config.labels,
    'recipe_args': config.recipe_args.to_dict(),
  }


def find(rows: list[dict], description: dict) -> dict | None:
  """The row of this description, if there is one."""
  for row in rows:
    if all(row.get(key) == value for key, value in description.items()):
      return row
  return None


def find_or_add(
  path: str | None, description: dict, measure: Callable[[], dict]
) -> dict:
  """The row of the file; if it has none, what `measure` says is added."""
  file = pathlib.Path(path) if path else None
  rows = json.loads(file.read_text()) if file and file.exists() else []
  if row := find(rows, description):
    return row
  row = description | measure()
  if file:
    with files.replacing(file, 'w') as out:
      out.write(json.dumps([*rows, row], indent=1) + '\n')
  return row
