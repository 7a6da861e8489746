"""The step that `main.py` would run, and its parts, for benchmarks.

On random images or, to count what XLA would do, on arrays without content.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import cifar10
from flatmatch_jax.data import resident, sources, splits
from flatmatch_jax.step import optimizer, recipes, train_step
from flatmatch_jax.system import sharding
from flatmatch_jax.training import program as program_lib
from flatmatch_jax.types import DatasetInfo, Pending

_FIXED = 60  # Images with fixed labels, where the recipe has such.


class Setup(NamedTuple):
  """A config as functions, and the data that it is for."""

  config: Any
  program: program_lib.Program
  sample: Any  # (data, state) -> Batch
  info: DatasetInfo
  shape: tuple[int, int, int]
  mesh: jax.sharding.Mesh


def config_of(method: str, model: str, batch_size: int):
  """CIFAR-10's config with as many unlabeled images for each labeled one."""
  config = cifar10.get_config(f'method={method}')
  ratio = config.unlabeled_batch_size // config.batch_size
  config.model, config.batch_size = model, batch_size
  config.unlabeled_batch_size = ratio * batch_size
  return config


def create(
  method: str,
  layout: str,
  model: str,
  batch_size: int,
  num_images: int = 256,
  num_classes: int = 10,
  side: int = 32,
  devices: int | None = None,
) -> Setup:
  """CIFAR-10's config for `batch_size` labeled images of `side` pixels.

  On the first `devices`, or on all.
  """
  config = config_of(method, model, batch_size)
  config.batch_norm = layout
  counts = (4,) * num_classes
  info = DatasetInfo(num_classes, num_images, num_images, counts)
  shape = (side, side, 3)
  program = program_lib.create(config, info, shape)
  mesh = sharding.make_mesh(devices=jax.devices()[:devices])
  sample = program_lib.make_sample(
    config, program.views, sharding.over_batch(mesh)
  )
  return Setup(config, program, sample, info, shape, mesh)


def arrays(setup: Setup) -> tuple[Any, resident.Data]:
  """The state at the start, and random images with four labels a class."""
  classes, number, *_ = setup.info
  rng = np.random.RandomState(0)
  images = rng.randint(0, 256, (number, *setup.shape), dtype=np.uint8)
  labels = np.arange(number, dtype=np.int32) % classes
  names = tuple(map(str, range(classes)))
  dataset = sources.Dataset('', images, labels, images, labels, names)
  everywhere = sharding.replicated(setup.mesh)
  split = splits.make(labels, classes, 4 * classes, seed=0)
  data = resident.place(dataset, split, everywhere)
  if setup.program.pretrain_step:
    fixed = np.arange(40, 40 + _FIXED)
    data = resident.add_fixed(data, fixed, labels[fixed])
  init = jax.jit(setup.program.init, out_shardings=everywhere)
  return init(jax.random.key(0)), data


def shapes(setup: Setup) -> tuple[Any, resident.Data]:
  """The same without content: any number of images costs nothing."""
  classes, number, *_ = setup.info
  data = data_shapes(number, setup.shape, 4 * classes, setup.mesh)
  state = jax.eval_shape(setup.program.init, jax.eval_shape(jax.random.key, 0))
  return sharding.abstract_state(setup.mesh, state), data


def data_shapes(number: int, shape, labeled: int, mesh) -> resident.Data:
  """As many images on all devices, without content."""
  array = lambda dtype, *shape: jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding.replicated(mesh)
  )
  return resident.Data(
    resident.Images(array(jnp.uint8, number, math.prod(shape)), shape),
    labels=array(jnp.int32, number),
    labeled=array(jnp.int32, labeled),
    unlabeled=array(jnp.int32, number),
  )


def step(setup: Setup):
  """Sampling, augmentation and update, as `loop.py` compiles them."""
  return lambda state, data: setup.program.step(
    state, setup.sample(data, state)
  )


def update(setup: Setup):
  """What a step does with whole trees of parameters, and nothing else.

  ε and the buffer, the sum of the gradients, the optimizer, the average, the
  norms, and the look whether all is finite.
  `update(state, grads) -> (state, θ + ε)`; `grads` are those of `gradients`.
  """
  config = setup.config
  _, name = recipes.parse(config.method)
  _, perturb = recipes.create(name, **config.recipe_args)
  tx = optimizer.create(
    config.optimizer,
    setup.program.schedule,
    config.weight_decay,
    config.layer_decay,
  )

  def function(state, grads):
    total, worst = grads
    moved, memory, metrics = state.params, state.perturb, {}
    if perturb:
      offset, memory = perturb.update(total, state.perturb)
      moved = optax.apply_updates(state.params, offset)
      metrics['offset_norm'] = optax.tree.norm(offset)
      total = jax.tree.map(jnp.add, total, worst)
    metrics['gradient_norm'] = optax.tree.norm(total)
    method = Pending(state.method, {})
    clean = train_step.Pass(None, state.batch_stats, method, None, {})
    after = train_step._advance(
      state, total, clean, memory, tx, config.ema_decay, config.bn_momentum
    )
    after = train_step._unless_finite_keep(state, after, metrics, {})
    return after, (moved, metrics)

  return function


def gradients(state):
  """Random numbers as the gradients at θ and at θ + ε, where the state is."""
  leaves, tree = jax.tree.flatten(state.params)
  draw = lambda seed: [
    jax.device_put(
      jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), x.shape),
      x.sharding,
    )
    for i, x in enumerate(leaves)
  ]
  return tuple(jax.tree.unflatten(tree, draw(seed)) for seed in range(2))
