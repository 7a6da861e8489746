"""The program of a config as a function of some of its numbers."""

import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.data import resident
from flatmatch_jax.system import sharding
from flatmatch_jax.training import program as program_lib
from flatmatch_jax.training import setup
from flatmatch_jax.types import DatasetInfo


class Functions(NamedTuple):
  """`given` are the values of the numbers, and the data."""

  init: Any  # (rng, values) -> TrainState
  step: Any  # (TrainState, given) -> (TrainState, metrics)
  look: Any  # (TrainState, given) -> Losses; None for plain recipes.
  probe: Any  # (TrainState, given, held_out) -> metrics
  program: program_lib.Program  # With the numbers of the config.


def get(config, name: str):
  """The value of a field such as 'recipe_args.rho'."""
  for part in name.split('.'):
    config = config[part]
  return config


def changed(config, values: dict):
  """A copy of the config with other `values`, which may be traced arrays."""
  config = copy.deepcopy(config)
  for name, value in values.items():
    *path, last = name.split('.')
    node = get(config, '.'.join(path)) if path else config
    with node.ignore_type():
      node[last] = value
  return config


def make_functions(config, names, info: DatasetInfo, shape) -> Functions:
  """The program of `config` as a function of the settings `names`."""
  mesh = sharding.make_mesh()  # Members are not split.
  first = program_lib.create(config, info, shape, mesh=mesh)
  sample = program_lib.make_sample(config, first.views, None)

  def program(values):
    values = dict(zip(names, values, strict=True))
    return program_lib.create(changed(config, values), info, shape, mesh=mesh)

  def init(rng, values):
    return program(values).init(rng)

  def step(state, given):
    values, data = given
    of_member = program(values)
    after, metrics = of_member.step(state, sample(data, state))
    updates = state.step - after.skipped.total
    return after, metrics | {'learning_rate': of_member.schedule(updates)}

  def of_member(name):
    def function(state, given, *more):
      values, data = given
      batch = sample(data, state)
      return getattr(program(values), name)(state, batch, *more)

    return function

  look = of_member('clean_losses') if first.clean_losses else None
  return Functions(init, step, look, of_member('probe'), first)


def traceable(config, names, dataset, split) -> list[str]:
  """Those of the settings `names` that a step can take as arrays.

  Not if Python looks at a value, to choose what is computed or its shape.
  """
  info = setup.info_of(dataset, split)
  shape = dataset.train_images.shape[1:]
  indices = dataset.train_labels, split.labeled, split.unlabeled
  shapes: list[Any] = [
    jax.ShapeDtypeStruct(dataset.train_images.shape, np.uint8),
    *(jax.ShapeDtypeStruct(np.shape(x), np.int32) for x in indices),
  ]
  data = resident.Data(*shapes)

  def trace(names):
    functions = make_functions(config, names, info, shape)
    values = values_of(config, names)
    before = jax.eval_shape(functions.init, jax.random.key(0), values)
    after, _ = jax.eval_shape(functions.step, before, (values, data))
    return before == after

  def works(names):
    try:
      return trace(names)
    except TypeError:  # JAX's errors about concrete values are such.
      return False

  # Tracing takes seconds: if all is well once.
  if works(names):
    return names
  trace([])  # Other errors are not about values.
  return [name for name in names if works([name])]


def values_of(config, names) -> list[jax.Array]:
  return [jnp.asarray(get(config, name)) for name in names]
