"""How much a loss rises at the worst point in a ball around the weights.

The worst point is that of the paper's Eq. 1: ε = ρ·∇S(θ)/‖∇S(θ)‖, one step up
the gradient of a source S. Sharpness is L(θ + ε) − L(θ) with S = L. Cross-
sharpness is that of the unlabeled loss with S the labeled one: the targets are
the guesses of θ, so what rises is how much θ + ε disagrees with them.
"""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from flatmatch_jax.step.probe import worst_case
from flatmatch_jax.system import sharding
from flatmatch_jax.types import PyTree


@jax.jit
def value_and_gradient(loss: Callable, params: PyTree):
  return jax.value_and_grad(loss)(params)


@jax.jit
def _loss_above(loss, params, gradient, rho):
  return loss(worst_case(params, gradient, rho))


def rises(
  loss: Callable, source: Callable, params: PyTree, rhos: Iterable[float]
) -> np.ndarray:
  """How much `loss` rises by a step of each length up the gradient of `source`.

  Sharpness if both are the same.
  """
  _, gradient = value_and_gradient(source, params)
  losses = [
    sharding.settle(_loss_above(loss, params, gradient, rho))
    for rho in [0.0, *rhos]
  ]
  at_center, *above = jax.device_get(losses)
  return np.array(above) - at_center
