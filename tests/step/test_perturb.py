"""The offset has length rho, points uphill, and never is NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flatmatch_jax.step import perturb

TREE = {'a': jnp.array([3.0, 0.0]), 'b': {'c': jnp.array([[0.0], [-4.0]])}}


def norm(tree):
  return np.sqrt(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(tree)))


def test_ascent_has_length_rho_along_the_gradient():
  offset, _ = perturb.ascent(0.05).update(TREE, ())
  assert norm(offset) == pytest.approx(0.05, rel=1e-6)
  np.testing.assert_allclose(offset['a'], [0.03, 0.0], rtol=1e-6)
  np.testing.assert_allclose(offset['b']['c'], [[0.0], [-0.04]], rtol=1e-6)


@pytest.mark.parametrize('scale', [1e-15, 1e15])
def test_length_does_not_depend_on_the_gradient_s(scale):
  tree = jax.tree.map(lambda x: scale * x, TREE)
  offset, _ = perturb.ascent(0.05).update(tree, ())
  assert norm(offset) == pytest.approx(0.05, rel=1e-5)


@pytest.mark.parametrize('make', [perturb.ascent, perturb.memory, perturb.last])
def test_zero_gradient_gives_zero_offset(make):
  zero = jax.tree.map(jnp.zeros_like, TREE)
  perturbation = make(0.05)
  offset, memory = perturbation.update(zero, perturbation.init(zero))
  for leaf in jax.tree.leaves((offset, memory)):
    np.testing.assert_array_equal(leaf, 0.0)


def test_ascent_climbs():
  loss = lambda x: jnp.sum((x['a'] - 1.0) ** 2) + jnp.sum(x['b']['c'] ** 4)
  offset, _ = perturb.ascent(0.1).update(jax.grad(loss)(TREE), ())
  assert loss(jax.tree.map(jnp.add, TREE, offset)) > loss(TREE)


def test_memory_steps_along_the_past_only():
  perturbation = perturb.memory(1.0, decay=0.9)
  memory = perturbation.init(TREE)
  expected = jax.tree.map(np.zeros_like, TREE)
  for number in range(4):
    gradient = jax.tree.map(lambda x, n=number: x + n, TREE)
    offset, memory = perturbation.update(gradient, memory)
    length = norm(expected)
    for got, past in zip(
      jax.tree.leaves(offset), jax.tree.leaves(expected), strict=True
    ):
      direction = past / length if length else past
      np.testing.assert_allclose(got, direction, rtol=1e-5, atol=1e-7)
    expected = jax.tree.map(
      lambda m, g: 0.9 * m + 0.1 * np.asarray(g), expected, gradient
    )
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), memory, expected
    )


def test_a_constant_gradient_makes_memory_and_ascent_agree():
  perturbation = perturb.memory(0.05, decay=0.999)
  _, memory = perturbation.update(TREE, perturbation.init(TREE))
  offset, _ = perturbation.update(TREE, memory)
  expected, _ = perturb.ascent(0.05).update(TREE, ())
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), offset, expected
  )


def test_last_forgets_all_but_the_batch_before():
  perturbation = perturb.last(0.05)
  other = jax.tree.map(lambda x: x[::-1] + 1.0, TREE)
  _, memory = perturbation.update(other, perturbation.init(TREE))
  _, memory = perturbation.update(TREE, memory)
  jax.tree.map(np.testing.assert_array_equal, memory, TREE)
