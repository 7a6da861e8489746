"""What the paper's figures show along training, measured beside the step.

A probe takes passes of its own, so it runs at intervals and never inside the
compiled step; it returns numbers and changes nothing.
"""

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax.methods.base import Method
from flatmatch_jax.methods.losses import cross_entropy
from flatmatch_jax.step import train_step
from flatmatch_jax.step.forward import Forward
from flatmatch_jax.step.perturb import ascent
from flatmatch_jax.types import Losses, PyTree

# Of a plain recipe, which has no ρ: the default of the others.
DEFAULT_RHO = 0.05


def angle(a: PyTree, b: PyTree) -> jax.Array:
  """Degrees between two trees, exact also where they are almost parallel.

  NaN where one of them is zero.
  """
  unit = lambda tree: optax.tree.scale(1 / optax.tree.norm(tree), tree)
  a, b = unit(a), unit(b)
  apart = optax.tree.norm(optax.tree.sub(a, b))
  together = optax.tree.norm(optax.tree.add(a, b))
  return jnp.degrees(2 * jnp.arctan2(apart, together))


def worst_case(params: PyTree, gradient: PyTree, rho) -> PyTree:
  """θ + ε, a step of length `rho` up the gradient (Eq. 1)."""
  offset, _ = ascent(rho).update(gradient, ())
  return optax.apply_updates(params, offset)


def make_probe(forward: Forward, method: Method, rho: float):
  """Returns `probe(state, batch, held_out) -> metrics`, all at θ.

  Both losses and the norms of their gradients; the angle between the gradient
  of the labeled loss and that of the sum; how much each loss rises by ε = `rho`
  up the labeled gradient: sharpness for the labeled loss, cross-sharpness for
  the unlabeled one, whose targets stay those of θ. `held_out` is (images,
  labels), normalized, for the sharpness of the supplement's figure, or None.
  Every pass normalizes by the statistics of its batch, as training does.
  """

  def probe(state, batch, held_out=None):
    views, targets, _ = train_step.prepare(forward, method, state, batch)
    objective = train_step.make_objective(forward, method, state)

    gradient = jax.grad(objective, has_aux=True)
    # A row at a time: XLA would take a pass for a loss of weight zero.
    labeled, clean = gradient(state.params, Losses(1.0, 0.0), views, targets)
    unlabeled, _ = gradient(state.params, Losses(0.0, 1.0), views, targets)
    total = optax.tree.add(labeled, unlabeled)
    _, worst = objective(
      worst_case(state.params, labeled, rho),
      Losses(1.0, 1.0),
      views,
      targets,
      clean.outputs,
    )
    losses, worst_losses = clean.losses, worst.losses
    metrics = {
      'labeled_loss': losses.labeled,
      'unlabeled_loss': losses.unlabeled,
      'sharpness': worst_losses.labeled - losses.labeled,
      'cross_sharpness': worst_losses.unlabeled - losses.unlabeled,
      'gradient_angle': angle(labeled, total),
      'labeled_gradient_norm': optax.tree.norm(labeled),
      'unlabeled_gradient_norm': optax.tree.norm(unlabeled),
      'total_gradient_norm': optax.tree.norm(total),
    }
    if held_out is None:
      return metrics
    images, labels = held_out

    def held_out_loss(params):
      outputs, _ = forward(params, state.batch_stats, {'held_out': images})
      return cross_entropy(outputs['held_out'].logits, labels)

    loss, climb = jax.value_and_grad(held_out_loss)(state.params)
    worst = held_out_loss(worst_case(state.params, climb, rho))
    return metrics | {'held_out_sharpness': worst - loss}

  return probe
