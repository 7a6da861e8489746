"""Steps become programs for TPUs and GPUs, where there is no such device.

The whole step, sampling and augmentation included, passes all of JAX's rules
for both; XLA's compilers are left out.
"""

import math

from conftest import TinyNet
import jax
from jax import export
import jax.numpy as jnp
import pytest

from configs import cifar10
from flatmatch_jax import methods, models
from flatmatch_jax.data import resident
from flatmatch_jax.step import recipes
from flatmatch_jax.training import program
from flatmatch_jax.types import DatasetInfo

SIZE = 100, (32, 32, 3)


def configure(method, recipe):
  name = method if recipe == 'plain' else f'{method}+{recipe}'
  config = cifar10.get_config(f'method={name}')
  config.batch_size = config.unlabeled_batch_size = 8
  return config


def pairs():
  """Each method plainly and under FlatMatch, and each recipe, by views."""
  found = {}
  for method in methods.METHODS:
    views = methods.asks(method).views
    under = ['plain', 'flatmatch', 'flatmatch_e']
    if method in ('supervised', 'freematch'):
      under = recipes.RECIPES
    for recipe in under:
      if not recipes.objection(method, recipe, bool(views)):
        found.setdefault(views, []).append((method, recipe))
  return found


def abstract_data():
  count, shape = SIZE
  array = jax.ShapeDtypeStruct
  numbers = lambda size: array((size,), jnp.int32)
  rows = array((count, math.prod(shape)), jnp.uint8)
  images = resident.Images(rows, shape)
  return resident.Data(images, *map(numbers, (count, 8, count, 16, 16)))


@pytest.mark.parametrize('views', pairs())
def test_steps_lower_for_tpu_and_cuda(views, monkeypatch):
  create = lambda name, classes, heads, *rest: TinyNet(classes, heads)
  monkeypatch.setattr(models, 'create', create)
  count, shape = SIZE
  chosen = [configure(*pair) for pair in pairs()[views]]
  made = [
    program.create(config, DatasetInfo(10, count, count, (1,) * 10), shape)
    for config in chosen
  ]
  # One sampling, traced once, for all that take these views.
  sample = program.make_sample(chosen[0], views, None)
  key = jax.eval_shape(jax.random.key, 0)
  states = [jax.eval_shape(one.init, key) for one in made]

  def steps(states, data):
    batch = sample(data, states[0])
    fixed = ['num_fixed' in config.recipe_args for config in chosen]
    return [
      one.step(state, batch if fix else batch._replace(fixed=None))
      for one, state, fix in zip(made, states, fixed, strict=True)
    ]

  exported = export.export(jax.jit(steps), platforms=('tpu', 'cuda'))(
    states, abstract_data()
  )
  assert exported.platforms == ('tpu', 'cuda')
  assert exported.mlir_module().count('stablehlo.convolution') > 0
