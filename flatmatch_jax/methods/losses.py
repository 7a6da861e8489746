"""Shared by the methods: losses over [.., K] logits, sharpening, mixing."""

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


def mse(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Mean squared error of the probabilities, over rows *and* classes."""
  return jnp.mean((jax.nn.softmax(logits) - targets) ** 2)


def kl(
  targets: jax.Array, logits: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
  """Mean over the rows of KL(targets ‖ softmax(logits)) times `weights` [B]."""
  rows = optax.kl_divergence(jax.nn.log_softmax(logits), targets)
  return jnp.mean(rows if weights is None else rows * weights)


def entropy(logits: jax.Array) -> jax.Array:
  """Mean over the rows of the entropy of softmax(logits)."""
  return -jnp.mean(
    jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1)
  )


def sharpen(probs: jax.Array, temperature: float) -> jax.Array:
  """Raises `probs` [.., K] to 1/temperature; the rows sum to one again."""
  # The largest becomes one: no power of it can vanish.
  powered = (probs / probs.max(-1, keepdims=True)) ** (1 / temperature)
  return powered / powered.sum(-1, keepdims=True)


def align(probs: jax.Array, average: jax.Array) -> jax.Array:
  """Distribution alignment: divides `probs` [.., K] by their `average` [K].

  Towards uniform classes, which balanced labels have; the rows sum to one.
  """
  ratio = probs / (average + 1e-6)
  return ratio / ratio.sum(-1, keepdims=True)


def mixup(rng, images: jax.Array, labels: jax.Array, alpha: float):
  """Mixes each row with another, images and labels [n, K] by the same share.

  One share for all rows, from Beta(alpha, alpha), and always the larger part:
  row i remains mostly row i.
  """
  share_rng, order_rng = jax.random.split(rng)
  share = jax.random.beta(share_rng, alpha, alpha)
  share = jnp.maximum(share, 1 - share)
  order = jax.random.permutation(order_rng, len(images))
  mix = lambda x: share * x + (1 - share) * x[order]
  return mix(images), mix(labels)


def ramp(step: jax.Array, steps: int, fraction: float) -> jax.Array:
  """Rises from 0 to 1 over the first `fraction` of all `steps`, then stays."""
  return jnp.clip(step / jnp.maximum(fraction * steps, 1), 0.0, 1.0)


def unit(vectors: jax.Array) -> jax.Array:
  """Vectors [.., D] of length one; zero stays zero."""
  squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
  return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))


def by_place(place, rows, label, size: int):
  """Means [size, D] of the `rows` [B, D] with each place [B], and their label.

  The label [size] is -1 at a place without rows. A product of matrices: unlike
  a scatter it has one result on all devices, whichever places come twice.
  """
  is_there = place[:, None] == jnp.arange(size)  # [B, size]
  counts = jnp.maximum(is_there.sum(0), 1)
  means = (is_there.astype(rows.dtype).T @ rows) / counts[:, None]
  return means, jnp.max(jnp.where(is_there, label[:, None], -1), axis=0)
