"""Losses shared by the methods: stateless, over [.., K] logits."""

import jax
import jax.numpy as jnp
import optax


def cross_entropy(
  logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
  """Mean cross-entropy to classes [B] or to distributions [B, K].

  `weights` [B] mask or weigh the rows; the mean is over all rows all the same,
  as FixMatch defines it.
  """
  if labels.ndim == logits.ndim:
    rows = optax.softmax_cross_entropy(logits, labels)
  else:
    rows = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return jnp.mean(rows if weights is None else rows * weights)
