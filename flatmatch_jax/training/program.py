"""What a config means, as functions."""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax import methods, models
from flatmatch_jax.data import resident
from flatmatch_jax.data.pipeline import Pipeline
from flatmatch_jax.step import forward, optimizer, probe, recipes, train_step
from flatmatch_jax.system import sharding
from flatmatch_jax.training import classify
from flatmatch_jax.types import Batch, DatasetInfo, Losses, TrainState

Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class Program(NamedTuple):
  """What a config means, as functions."""

  init: Callable[[jax.Array], TrainState]
  step: Step
  pretrain_step: Step | None  # Before labels are fixed, if they are.
  # What a perturbed step does not measure; None for plain recipes.
  clean_losses: Callable[[TrainState, Batch], Losses] | None
  # With images and labels that no step has trained on, or None.
  probe: Callable[[TrainState, Batch, tuple | None], Metrics]
  classify: classify.Classify
  method: methods.Method
  forward: forward.Forward
  views: tuple[str, ...]
  schedule: optax.Schedule
  mesh: jax.sharding.Mesh  # Of the batch, of the state and of evaluation.


def create(
  config,
  info: DatasetInfo,
  image_shape,
  make_forward=forward.make_forward,
  mesh: jax.sharding.Mesh | None = None,
) -> Program:
  """Builds model, method, recipe and optimizer.

  `mesh` is by default the one that the config asks for.
  """
  mesh = make_mesh(config) if mesh is None else mesh
  method_name, recipe_name = recipes.parse(config.method)
  recipe, perturb = recipes.create(recipe_name, **config.recipe_args)
  schedule = optimizer.SCHEDULES[config.schedule](
    config.learning_rate, config.steps, config.warmup_steps
  )
  tx = optimizer.create(
    config.optimizer, schedule, config.weight_decay, config.layer_decay
  )

  asks = methods.asks(method_name, **config.method_args)
  model = models.create(
    config.model, info.num_classes, asks.heads, config.dtype, config.remat
  )
  gather = sharding.make_gather(mesh)
  run_network: forward.Forward = make_forward(
    model, config.batch_norm, config.microbatches, gather, asks.populations
  )

  def init_network(rng):
    return model.init(rng, jnp.zeros((1, *image_shape)), train=True)

  context = {
    'steps': config.steps,
    'info': info,
    'tx': tx,
    'forward': run_network,
    'init_network': init_network,
  }
  method = methods.create(method_name, context, **config.method_args)
  make_step = functools.partial(
    train_step.make_train_step,
    run_network,
    method,
    tx,
    ema_decay=config.ema_decay,
    bn_momentum=config.bn_momentum,
    float16=config.dtype == 'float16',
  )

  def init(rng):
    return train_step.create_train_state(
      rng, init_network(rng), tx, method, info, perturb
    )

  return Program(
    init=init,
    step=make_step(recipe=recipe, perturb=perturb),
    pretrain_step=make_step() if recipe.fixed else None,
    clean_losses=(
      train_step.make_clean_losses(run_network, method) if perturb else None
    ),
    probe=probe.make_probe(
      run_network, method, config.recipe_args.get('rho', probe.DEFAULT_RHO)
    ),
    classify=classify.make_classifier(
      model, config.mean, config.std, config.eval_batch_size, mesh
    ),
    method=method,
    forward=run_network,
    views=method.views,
    schedule=schedule,
    mesh=mesh,
  )


def make_sample(
  config, views, batch_sharding, pipeline: Pipeline = resident.PIPELINE
) -> Callable[[Any, TrainState], Batch]:
  """Returns `sample(given, state) -> Batch` for the state's step.

  `given` is what a feed of the pipeline gives.
  """
  draw = pipeline.make_sampler(config, views, batch_sharding)
  return lambda given, state: draw(given, train_step.step_keys(state).data)


def make_mesh(config) -> jax.sharding.Mesh:
  """The devices of this machine, which may be fewer than trained a run."""
  return sharding.make_mesh(math.gcd(config.mesh.fsdp, jax.device_count()))
