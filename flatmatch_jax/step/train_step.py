"""One training step is one equation:

  g = ∇(clean·L)(θ) + ∇(worst·L)(θ + ε),   ε = perturb(∇(source·L)(θ))

L = (labeled, unlabeled) are the method's losses. Targets always come from θ; in
the second term only the student moves to θ + ε. That is cross-sharpness.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax.methods.base import Method, Prepared
from flatmatch_jax.methods.losses import cross_entropy
from flatmatch_jax.step.forward import Forward, with_scaled_gradients
from flatmatch_jax.step.perturb import Perturbation
from flatmatch_jax.step.recipes import RECIPES, Recipe
from flatmatch_jax.types import (
  Losses,
  Outputs,
  Pending,
  PyTree,
  Skipped,
  TrainState,
)

_FLOAT16_SCALE = 15  # The exponent of the first scale of gradients.
_SHOWN_CLASSES = 100  # In a histogram at every interval.

# Metrics of which one that is not finite makes a step to be skipped.
MUST_BE_FINITE = (
  'labeled_loss',
  'unlabeled_loss',
  'worst_loss',
  'gradient_norm',
)


class Pass(NamedTuple):
  """What one pass through the network leaves behind, besides gradients."""

  outputs: Outputs
  batch_stats: PyTree  # The batch's own, not yet averaged.
  method_state: Pending
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
    # Strongly typed, as the step returns it: else jit would compile twice.
    method=jax.tree.map(
      lambda x: jax.lax.convert_element_type(x, x.dtype),
      method.init(rng, variables, info),
    ),
    rng=rng,
    skipped=Skipped(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)),
  )


class StepKeys(NamedTuple):
  """All random keys of a step."""

  data: jax.Array
  method: jax.Array
  # One sub-network a step, in all its passes: else ε would be measured on
  # another network than it was made for.
  network: jax.Array


def step_keys(state: TrainState) -> StepKeys:
  """Follow from the state's key and step: there is nothing else to save."""
  key = jax.random.fold_in(state.rng, state.step)
  data, method = jax.random.split(key)
  return StepKeys(data, method, network=jax.random.fold_in(key, 2))


def make_objective(forward, method, state):
  """Returns the weighted losses as a function of parameters and views."""

  def objective(params, weights, views, targets, teacher=None):
    """Weighs the losses at `params`; without a teacher it is its own."""
    student, batch_stats = forward(
      params, state.batch_stats, views, step_keys(state).network
    )
    teacher = jax.lax.stop_gradient(student if teacher is None else teacher)
    losses, method_state, metrics = method.loss(
      student, teacher, targets, state.method, state.step
    )
    if not isinstance(method_state, Pending):
      method_state = Pending(method_state, {})
    total = _weighted(weights, losses)
    return total, Pass(student, batch_stats, method_state, losses, metrics)

  return objective


def _weighted(weights, losses):
  """XLA keeps 0.0 * x: a loss of weight zero is left out, and its passes."""
  terms = (w * x for w, x in zip(weights, losses, strict=True) if w)
  return sum(terms, start=jnp.zeros(()))


def prepare(forward, method, state, batch) -> Prepared:
  """The method's views and targets for this step's batch, at θ."""

  def predict(images, params=state.params):
    outputs, _ = forward(params, state.batch_stats, {'images': images})
    return outputs['images']

  rng = step_keys(state).method
  return jax.lax.stop_gradient(method.prepare(predict, state, batch, rng))


def make_train_step(
  forward: Forward,
  method: Method,
  tx: optax.GradientTransformation,
  recipe: Recipe = RECIPES['plain'],
  perturb: Perturbation | None = None,
  ema_decay: float = 0.999,
  bn_momentum: float = 0.999,
  float16: bool = False,
):
  """Returns `train_step(state, batch) -> (state, metrics)`, ready for jit.

  `ema_decay` is the decay of the averaged weights, and `bn_momentum` that of
  BatchNorm's running statistics. Both start lower: see `_warm`. With `float16`
  the network's gradients are scaled up, and half as much after each step that
  is skipped because they were too large.
  """
  unscaled = forward
  clean_row, worst_row = (
    Losses(*(a * b for a, b in zip(row, method.trains_on, strict=True)))
    for row in (recipe.clean, recipe.worst)
  )
  groups = perturb.groups if perturb else 1

  def train_step(state, batch):
    forward = unscaled
    if float16:
      exponent = jnp.maximum(_FLOAT16_SCALE - state.skipped.total, 0)
      forward = with_scaled_gradients(unscaled, jnp.ldexp(1.0, exponent))
    views, targets, kept = prepare(forward, method, state, batch)
    objective = make_objective(forward, method, state)
    gradient = jax.grad(objective, has_aux=True)
    grads, clean = gradient(state.params, clean_row, views, targets)

    def source_gradient(views, targets, teacher, fixed):
      """The gradient that ε climbs, and the labeled loss at θ."""
      if fixed is not None:
        climb = jax.grad(_fixed_loss)(state.params, forward, state, fixed)
        return climb, clean.losses.labeled
      if recipe.source == clean_row and groups == 1:
        return grads, clean.losses.labeled  # Equal rows share one pass.
      climb, source = gradient(
        state.params, recipe.source, views, targets, teacher
      )
      # Of the pass that has it anyway.
      has_it = recipe.source.labeled and not clean_row.labeled
      return climb, (source if has_it else clean).losses.labeled

    def worst_pass(views, targets, teacher, fixed):
      """At θ + ε; it leaves no trace in the running statistics."""
      assert perturb is not None
      climb, labeled_loss = source_gradient(views, targets, teacher, fixed)
      offset, memory = perturb.update(climb, state.perturb)
      params = optax.apply_updates(state.params, offset)
      grads, worst = gradient(params, worst_row, views, targets, teacher)
      metrics = {
        'labeled_loss': labeled_loss,
        'worst_loss': _weighted(worst_row, worst.losses),
        'offset_norm': optax.tree.norm(offset),
      }
      return grads, memory, metrics

    if perturb is None:
      memory = state.perturb
      metrics = {
        'labeled_loss': clean.losses.labeled,
        'unlabeled_loss': clean.losses.unlabeled,
      }
    else:
      parts = views, targets, clean.outputs, batch.fixed
      if groups == 1:
        worst_grads, memory, metrics = worst_pass(*parts)
      else:
        worst_grads, memory, metrics = jax.tree.map(
          lambda x: x.mean(0),
          # One after the other: XLA would send images to compute the
          # gradients of several at once.
          jax.lax.map(lambda part: worst_pass(*part), _cut(groups, parts)),
        )
      grads = jax.tree.map(jnp.add, grads, worst_grads)

    metrics |= _describe(clean, batch)
    metrics['gradient_norm'] = optax.tree.norm(grads)
    after = _advance(state, grads, clean, memory, tx, ema_decay, bn_momentum)
    after = after.replace(
      method=method.feedback(state, after, batch, targets, kept)
    )
    entries = clean.method_state.entries
    after = _unless_finite_keep(state, after, metrics, entries)
    return after, metrics | {
      'skipped_steps': after.skipped.total,
      'skipped_in_a_row': after.skipped.in_a_row,
    }

  return train_step


def _fixed_loss(params, forward, state, fixed):
  """On D^l ∪ D^fix, whose labels serve the perturbation only."""
  views = {'fixed': fixed['weak']}
  rng = step_keys(state).network
  outputs, _ = forward(params, state.batch_stats, views, rng)
  return cross_entropy(outputs['fixed'].logits, fixed['label'])


def _advance(state, grads, clean: Pass, memory, tx, ema_decay, bn_momentum):
  """The state after the optimizer's update."""
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  return state.replace(
    step=state.step + 1,
    params=params,
    batch_stats=_running(
      state.batch_stats, clean.batch_stats, bn_momentum, state.step
    ),
    opt_state=opt_state,
    ema_params=optax.incremental_update(
      params, state.ema_params, 1 - _warm(ema_decay, state.step)
    ),
    perturb=memory,
    method=clean.method_state.state,
  )


def _unless_finite_keep(before, after, metrics, entries):
  """The state `after` a step, or where its numbers broke, that `before` it.

  What follows from finite gradients needs no look of its own; running
  statistics, the method's state and ε's memory, which may keep a gradient that
  no parameter saw, come from elsewhere. Only the count of steps, which the
  data follow, goes on.
  """
  looked_at = [metrics[name] for name in MUST_BE_FINITE if name in metrics]
  # Tables are unchanged so far, and too large to check at every step.
  method = after.method
  if entries:
    method = method._replace(**dict.fromkeys(entries, ()))
  looked_at += jax.tree.leaves((after.batch_stats, method, after.perturb))
  finite = jnp.all(jnp.stack([jnp.isfinite(x).all() for x in looked_at]))
  # A table is the same in both, and XLA leaves it where it is.
  state = jax.tree.map(
    lambda new, old: jnp.where(finite, new, old),
    after.replace(rng=()),
    before.replace(rng=()),
  )
  broken = 1 - finite.astype(jnp.int32)
  return state.replace(
    step=after.step,
    rng=before.rng,
    method=Pending(state.method, entries).written(finite),
    skipped=Skipped(
      before.skipped.total + broken, (before.skipped.in_a_row + 1) * broken
    ),
  )


def _cut(groups, tree):
  """Reshapes every array of a batch from [n, …] to [groups, n/groups, …].

  Every group takes rows from everywhere: they stay on their devices.
  """
  return jax.tree.map(
    lambda x: x.reshape(-1, groups, *x.shape[1:]).swapaxes(0, 1), tree
  )


def make_clean_losses(forward: Forward, method: Method):
  """Returns `clean_losses(state, batch) -> Losses`, both at θ.

  A perturbed step takes its unlabeled loss at θ + ε only. This is the extra
  pass that the step must not pay for, to be run where one wants to look.
  """

  def clean_losses(state, batch):
    views, targets, _ = prepare(forward, method, state, batch)
    objective = make_objective(forward, method, state)
    weights = Losses(1.0, 1.0)
    return objective(state.params, weights, views, targets)[1].losses

  return clean_losses


def _warm(decay, step):
  """The decay of an average that starts from nothing to remember."""
  return jnp.minimum(decay, (1 + step) / (10 + step))


def _running(old, new, momentum, step):
  """Running statistics of BatchNorm, warmed up as the averaged weights are.

  Once warm, they are flax's to the bit, which rounds 1 - momentum only once.
  A layer that training does not apply has equal `old` and `new`: it stays.
  """
  is_warm = momentum <= (1 + step) / (10 + step)
  keep = jnp.where(is_warm, momentum, (1 + step) / (10 + step))
  take = jnp.where(is_warm, 1 - momentum, 9 / (10 + step))
  return jax.tree.map(
    lambda a, b: jnp.where(a == b, a, keep * a + take * b), old, new
  )


def _describe(clean: Pass, batch):
  """The method's metrics, its pseudo-labels [U] turned into numbers."""
  metrics = dict(clean.metrics)
  if 'pseudo_labels' not in metrics:
    return metrics
  label, weight = metrics.pop('pseudo_labels')
  num_classes = clean.outputs['labeled'].logits.shape[-1]
  truth = batch.unlabeled.get('truth', -1)
  known = jnp.where(truth >= 0, weight, 0.0)
  histogram = jnp.mean(jax.nn.one_hot(label, num_classes), axis=0)
  if num_classes <= _SHOWN_CLASSES:
    metrics['class_histogram'] = histogram
  return metrics | {
    'largest_class': jnp.max(histogram),
    'used_fraction': jnp.mean(weight),
    # 0/0, hence NaN, where nothing is used or no truth is known.
    'pseudo_label_accuracy': (
      100 * jnp.sum(known * (label == truth)) / jnp.sum(known)
    ),
  }
