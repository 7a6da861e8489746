"""The largest eigenvalues of a loss's Hessian, by Lanczos' method.

Written out because a library's loop runs inside XLA, where a CPU computes
convolutions on one core; and it is short.
"""

from collections.abc import Callable, Iterable

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.types import PyTree


@jax.jit
def hessian_vector(
  loss: Callable, params: PyTree, vector: jax.Array
) -> jax.Array:
  """The Hessian at `params` times a flat vector, forward over reverse."""
  _, unravel = ravel_pytree(params)
  product = jax.jvp(jax.grad(loss), (params,), (unravel(vector),))[1]
  return ravel_pytree(product)[0]


@jax.jit
def _orthogonal(vector, basis):
  """What of `vector` lies outside the span of the rows of `basis`."""
  for _ in range(2):  # Once is not enough in float32.
    vector = vector - basis.T @ (basis @ vector)
  return vector


def top_eigenvalues(
  loss: Callable,
  params: PyTree,
  count: int = 1,
  iterations: int = 20,
  rng: jax.Array | None = None,
  progress: Callable[[Iterable], Iterable] = iter,
) -> tuple[np.ndarray, np.ndarray]:
  """The largest eigenvalues, and how far each may be from one of the Hessian.

  Each of the `iterations` takes one Hessian-vector product and keeps a vector
  as large as the parameters, against which all later ones are orthogonalized.
  """
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  iterations = min(iterations, size)
  rng = jax.random.key(0) if rng is None else rng
  vector = jax.random.normal(rng, (size,))
  vector /= jnp.linalg.norm(vector)
  basis = jnp.zeros((iterations, size))
  diagonal, beside = [], []
  for number in progress(range(iterations)):
    basis = basis.at[number].set(vector)
    product = hessian_vector(loss, params, vector)
    diagonal.append(float(vector @ product))
    rest = _orthogonal(product, basis)
    beside.append(float(jnp.linalg.norm(rest)))
    if beside[-1] <= 1e-6 * abs(diagonal[0]):  # An invariant space: exact.
      break
    vector = rest / beside[-1]
  matrix = np.diag(diagonal) + sum(
    np.diag(beside[:-1], side) for side in (-1, 1)
  )
  values, vectors = np.linalg.eigh(matrix)
  errors = beside[-1] * np.abs(vectors[-1])
  return values[::-1][:count], errors[::-1][:count]
