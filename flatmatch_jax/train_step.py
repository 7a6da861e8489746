"""One training step is one equation:

  g = ∇(clean·L)(θ) + ∇(worst·L)(θ + ε),   ε = perturb(∇(source·L)(θ))

L = (labeled, unlabeled) are the method's losses. Targets always come from θ; in
the second term only the student moves to θ + ε. That is cross-sharpness.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax.forward import Forward
from flatmatch_jax.methods.base import Method
from flatmatch_jax.perturb import Perturbation
from flatmatch_jax.recipes import RECIPES, Recipe
from flatmatch_jax.types import Losses, Outputs, PyTree, TrainState


class Pass(NamedTuple):
  """What one pass through the network leaves behind, besides gradients."""

  outputs: Outputs
  batch_stats: PyTree
  method_state: PyTree
  losses: Losses
  metrics: dict[str, jax.Array]


def create_train_state(
  rng, variables, tx, method: Method, info, perturb: Perturbation | None = None
) -> TrainState:
  """The state before the first step, from a model's initial variables."""
  params = variables['params']
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    batch_stats=variables.get('batch_stats', {}),
    opt_state=tx.init(params),
    ema_params=jax.tree.map(jnp.copy, params),
    perturb=() if perturb is None else perturb.init(params),
    method=method.init(rng, variables, info),
    rng=rng,
  )


def step_keys(state: TrainState) -> tuple[jax.Array, jax.Array]:
  """This step's random keys: of the data, and of the method."""
  data, method = jax.random.split(jax.random.fold_in(state.rng, state.step))
  return data, method


def _prepare(forward, method, state, batch):
  """Returns the objective of this step's batch, with the targets of θ."""

  def predict(images, params=state.params):
    outputs, _ = forward(params, state.batch_stats, {'images': images})
    return outputs['images']

  _, rng = step_keys(state)
  views, targets = method.prepare(predict, state, batch, rng)

  def objective(params, weights, teacher=None):
    """Weighs the losses at `params`; without a teacher it is its own."""
    student, batch_stats = forward(params, state.batch_stats, views)
    teacher = jax.lax.stop_gradient(student if teacher is None else teacher)
    losses, method_state, metrics = method.loss(
      student, teacher, targets, state.method, state.step
    )
    # XLA keeps 0.0 * x: a loss of weight zero is left out, and with it all
    # that it alone needs.
    total = sum(
      (w * loss for w, loss in zip(weights, losses, strict=True) if w),
      start=jnp.zeros(()),
    )
    return total, Pass(student, batch_stats, method_state, losses, metrics)

  return objective


def make_train_step(
  forward: Forward,
  method: Method,
  tx: optax.GradientTransformation,
  recipe: Recipe = RECIPES['plain'],
  perturb: Perturbation | None = None,
  ema_decay: float = 0.999,
):
  """Returns `train_step(state, batch) -> (state, metrics)`, ready for jit."""

  def train_step(state, batch):
    objective = _prepare(forward, method, state, batch)
    gradient = jax.grad(objective, has_aux=True)

    grads, clean = gradient(state.params, recipe.clean)
    memory, metrics = state.perturb, {}
    if perturb is None:
      metrics['unlabeled_loss'] = clean.losses.unlabeled
    else:
      source = grads  # Equal rows share one backward pass.
      if recipe.source != recipe.clean:
        source, _ = gradient(state.params, recipe.source)
      offset, memory = perturb.update(source, memory)
      worst_params = optax.apply_updates(state.params, offset)
      # This pass leaves no trace in the running statistics.
      worst_grads, worst = gradient(worst_params, recipe.worst, clean.outputs)
      grads = jax.tree.map(jnp.add, grads, worst_grads)
      metrics['worst_loss'] = sum(
        loss for w, loss in zip(recipe.worst, worst.losses, strict=True) if w
      )
      metrics['offset_norm'] = optax.tree.norm(offset)

    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    after = state.replace(
      step=state.step + 1,
      params=params,
      batch_stats=clean.batch_stats,
      opt_state=opt_state,
      ema_params=optax.incremental_update(
        params, state.ema_params, 1 - _warm(ema_decay, state.step)
      ),
      perturb=memory,
      method=clean.method_state,
    )
    metrics |= _describe(clean, batch)
    metrics['labeled_loss'] = clean.losses.labeled
    metrics['gradient_norm'] = optax.tree.norm(grads)
    return after, metrics

  return train_step


def make_clean_losses(forward: Forward, method: Method):
  """Returns `clean_losses(state, batch) -> Losses`, both at θ.

  A perturbed step takes its unlabeled loss at θ + ε only. This is the extra
  pass that the step must not pay for, to be run where one wants to look.
  """

  def clean_losses(state, batch):
    objective = _prepare(forward, method, state, batch)
    return objective(state.params, Losses(1.0, 1.0))[1].losses

  return clean_losses


def _warm(decay, step):
  """The decay of an average that starts from nothing to remember."""
  return jnp.minimum(decay, (1 + step) / (10 + step))


def _describe(clean: Pass, batch):
  """The method's metrics, its pseudo-labels [U] turned into numbers."""
  metrics = dict(clean.metrics)
  if 'pseudo_labels' not in metrics:
    return metrics
  label, weight = metrics.pop('pseudo_labels')
  num_classes = clean.outputs['labeled'].logits.shape[-1]
  truth = batch.unlabeled['truth']
  known = jnp.where(truth >= 0, weight, 0.0)
  return metrics | {
    'used_fraction': jnp.mean(weight),
    # 0/0, hence NaN, where nothing is used or no truth is known.
    'pseudo_label_accuracy': (
      100 * jnp.sum(known * (label == truth)) / jnp.sum(known)
    ),
    'class_histogram': jnp.mean(jax.nn.one_hot(label, num_classes), axis=0),
  }
