"""Where the worst-case loss is evaluated: pairs of functions, as in optax."""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax.system.arguments import Decay, Number, PositiveCount
from flatmatch_jax.types import PyTree

Radius = Annotated[float, Number(0, 1e3)]  # ρ, the length of ε.


class Perturbation(NamedTuple):
  """An offset ε of the parameters and the memory it is drawn from.

  Attributes:
    init: params -> memory, the part of the train state called `perturb`.
    update: (gradient, memory) -> (offset, memory).
    groups: the batch is cut into this many parts, and each climbs its own
      gradient, as SAM does on each of its devices.
  """

  init: Callable[[PyTree], PyTree]
  update: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
  groups: int = 1


def ascent(rho: Radius = 0.05, groups: PositiveCount = 1) -> Perturbation:
  """Steps `rho` up the normalized gradient (Eq. 1): SAM's step."""

  def update(gradient, memory):
    return _of_length(rho, gradient), memory

  return Perturbation(lambda params: (), update, groups)


def memory(rho: Radius = 0.05, decay: Decay = 0.999) -> Perturbation:
  """Steps `rho` up the average of *past* gradients (Alg. 1, FlatMatch-e).

  This step's gradient enters the average afterwards, so the first offset is
  zero. Only the direction of the average counts: no bias correction.
  """

  def init(params):
    return jax.tree.map(jnp.zeros_like, params)

  def update(gradient, average):
    offset = _of_length(rho, average)
    average = jax.tree.map(
      lambda m, g: decay * m + (1 - decay) * g, average, gradient
    )
    return offset, average

  return Perturbation(init, update)


def last(rho: Radius = 0.05) -> Perturbation:
  """Steps up the gradient of the batch before: a memory without average."""
  return memory(rho, decay=0.0)


def _of_length(rho, direction):
  """Scales a tree to global norm `rho`; a zero tree stays zero."""
  norm = optax.tree.norm(direction)
  scale = jnp.where(norm > 0, rho / jnp.where(norm > 0, norm, 1.0), 0.0)
  return jax.tree.map(lambda leaf: scale * leaf, direction)
