"""What methods are made of, in a few lines of numpy."""

import jax.numpy as jnp
import numpy as np

from flatmatch_jax.types import Prediction


def softmax(logits):
  powers = np.exp(logits - logits.max(-1, keepdims=True))
  return powers / powers.sum(-1, keepdims=True)


def cross_entropy(logits, target):
  """Rows [n] for classes [n] or distributions [n, K]."""
  target = np.asarray(target)
  if target.ndim == 1:
    target = np.eye(logits.shape[-1])[target]
  return -(target * np.log(softmax(np.float64(logits)))).sum(-1)


def unit(vectors):
  return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def prediction(logits, features=None, **heads):
  """The arrays as a network would give them."""
  single = lambda x: None if x is None else jnp.float32(x)
  heads = {name: single(x) for name, x in heads.items()}
  return Prediction(single(logits), single(features), heads)


def close(a, b, rtol=1e-4, atol=1e-5):
  np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def assert_guesses(metrics, label, mask):
  """Of the method, neither all nor none of them used."""
  assert 0 < np.sum(mask) < len(mask)
  np.testing.assert_array_equal(metrics['pseudo_labels'].label, label)
  np.testing.assert_array_equal(metrics['pseudo_labels'].weight, mask)
