"""What a config means, as functions."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax import methods, models
from flatmatch_jax.data import resident, streaming
from flatmatch_jax.step import forward, optimizer, probe, recipes, train_step
from flatmatch_jax.system import sharding
from flatmatch_jax.training import classify
from flatmatch_jax.types import DatasetInfo


class Program(NamedTuple):
  """What a config means, as functions."""

  init: Any  # (rng) -> TrainState
  step: Any  # (TrainState, Batch) -> (TrainState, metrics)
  pretrain_step: Any  # The same before labels are fixed; else None.
  clean_losses: Any  # (TrainState, Batch) -> Losses; None for plain recipes.
  probe: Any  # (TrainState, Batch, held_out) -> metrics
  classify: Any  # ([params], batch_stats, images) -> [probabilities]
  method: methods.Method
  forward: forward.Forward
  views: tuple[str, ...]
  schedule: optax.Schedule


def create(
  config,
  info: DatasetInfo,
  image_shape,
  make_forward=forward.make_forward,
  mesh: jax.sharding.Mesh | None = None,
) -> Program:
  """Builds model, method, recipe and optimizer.

  `mesh` is that of a state which may be split; without one it is not.
  """
  method_name, recipe_name = recipes.parse(config.method)
  recipe, perturb = recipes.create(recipe_name, **config.recipe_args)
  schedule = optimizer.SCHEDULES[config.schedule](
    config.learning_rate, config.steps, config.warmup_steps
  )
  tx = make_optimizer(config, schedule)
  context = {
    'steps': config.steps,
    'tx': tx,
    # Bound below: the network has the heads that the method asks for.
    'forward': lambda *args: run_network(*args),
    'init_network': lambda rng: init_network(rng),
  }
  method = methods.create(method_name, context, **config.method_args)
  model = models.create(
    config.model,
    info.num_classes,
    method.heads,
    config.dtype,
    config.remat,
  )
  run_network: forward.Forward = make_forward(
    model,
    config.batch_norm,
    config.microbatches,
    sharding.make_gather(mesh),
    method.populations,
  )
  make_step = functools.partial(
    train_step.make_train_step,
    run_network,
    method,
    tx,
    ema_decay=config.ema_decay,
    bn_momentum=config.bn_momentum,
  )

  def init_network(rng):
    return model.init(rng, jnp.zeros((1, *image_shape)), train=True)

  def init(rng):
    return train_step.create_train_state(
      rng, init_network(rng), tx, method, info, perturb
    )

  return Program(
    init=init,
    step=make_step(recipe=recipe, perturb=perturb),
    pretrain_step=make_step() if recipe.fixed else None,
    clean_losses=perturb and train_step.make_clean_losses(run_network, method),
    probe=probe.make_probe(
      run_network, method, config.recipe_args.get('rho', probe.DEFAULT_RHO)
    ),
    classify=classify.make_classifier(
      model,
      config.mean,
      config.std,
      config.eval_batch_size,
      make_mesh(config),
    ),
    method=method,
    forward=run_network,
    views=method.views,
    schedule=schedule,
  )


def make_optimizer(config, schedule) -> optax.GradientTransformation:
  if config.optimizer == 'adamw':
    return optimizer.adamw(schedule, config.weight_decay, config.layer_decay)
  make = optimizer.muon if config.optimizer == 'muon' else optimizer.sgd
  return make(schedule, config.weight_decay)


def make_sample(config, views, batch_sharding, streams: bool = False):
  """Returns `sample(data, state) -> Batch` for the state's step.

  `data` is what a feed gives: all images, or, where it `streams`, the step's.
  """
  same = (
    config.flip,
    config.mean,
    config.std,
    batch_sharding,
    config.strong_operations,
  )
  if streams:
    draw = streaming.make_sampler(views, *same)
  else:
    draw = resident.make_sampler(
      config.batch_size,
      config.unlabeled_batch_size,
      views,
      config.pad,
      *same,
    )
  return lambda data, state: draw(data, train_step.step_keys(state)[0])


def make_mesh(config) -> jax.sharding.Mesh:
  """The devices of this machine, which may be fewer than trained a run."""
  return sharding.make_mesh(math.gcd(config.mesh.fsdp, jax.device_count()))
