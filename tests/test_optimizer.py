"""The optimizer follows its recursion, and decays kernels only."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flatmatch_jax import optimizer


@pytest.mark.parametrize(
  ('part', 'factor'), [(0.0, 1.0), (0.5, 0.77301), (1.0, 0.19509)]
)
def test_cosine_falls_to_a_fifth(part, factor):
  schedule = optimizer.cosine_schedule(0.03, 2**20)
  value = float(schedule(part * 2**20)) / 0.03
  assert value == pytest.approx(factor, abs=5e-6)


def test_nesterov_and_decay_follow_the_recursion():
  rng = np.random.RandomState(0)
  kernel, bias = rng.randn(3, 2), rng.randn(2)
  params = {'kernel': jnp.asarray(kernel), 'bias': jnp.asarray(bias)}
  tx = optimizer.sgd(optimizer.cosine_schedule(0.1, 10), weight_decay=0.01)
  state = tx.init(params)
  velocity = [np.zeros((3, 2)), np.zeros(2)]
  for step in range(5):
    gradients = [rng.randn(3, 2), rng.randn(2)]
    updates, state = tx.update(
      dict(zip(('kernel', 'bias'), map(jnp.asarray, gradients), strict=True)),
      state,
      params,
    )
    params = optax.apply_updates(params, updates)
    rate = 0.1 * math.cos(7 * math.pi / 16 * step / 10)
    gradients[0] = gradients[0] + 0.01 * kernel  # Not the bias.
    velocity = [0.9 * v + g for v, g in zip(velocity, gradients, strict=True)]
    kernel = kernel - rate * (gradients[0] + 0.9 * velocity[0])
    bias = bias - rate * (gradients[1] + 0.9 * velocity[1])
    np.testing.assert_allclose(params['kernel'], kernel, rtol=1e-5)
    np.testing.assert_allclose(params['bias'], bias, rtol=1e-5)
