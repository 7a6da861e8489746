"""Landscapes, sharpness, curvature and probes against what defines them."""

import json
import re

from conftest import NUM_CLASSES, Setup, make_batch
import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax
import pytest

from flatmatch_jax.analysis import (
  figures,
  hessian,
  landscape,
  outcomes,
  pseudo_labels,
  setting,
  sharpness,
  summary,
)
from flatmatch_jax.step import probe
from flatmatch_jax.training import setup


def small_params(seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  return {
    'first': {
      'kernel': jax.random.normal(keys[0], (3, 4)),
      'bias': jnp.ones(4),
    },
    'second': {'kernel': jax.random.normal(keys[1], (4, 2))},
  }


@jax.tree_util.Partial
def small_loss(params):
  """Of a perceptron with 24 parameters, on eight points."""
  x = jnp.linspace(-1, 1, 24).reshape(8, 3)
  hidden = jnp.tanh(x @ params['first']['kernel'] + params['first']['bias'])
  logits = hidden @ params['second']['kernel']
  labels = jnp.arange(8) % 2
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.tree_util.Partial
def other_loss(params):
  return jnp.sum(jnp.sin(ravel_pytree(params)[0]))


# Landscapes.


def test_directions_have_the_filters_norms_and_leave_vectors_alone():
  params = Setup('fixmatch').init().params
  direction = landscape.random_direction(jax.random.key(3), params)
  for p, d in zip(
    jax.tree.leaves(params), jax.tree.leaves(direction), strict=True
  ):
    if p.ndim == 1:
      assert not d.any()
    else:
      flat = lambda x: np.asarray(x).reshape(-1, x.shape[-1])
      np.testing.assert_allclose(
        np.linalg.norm(flat(d), axis=0),
        np.linalg.norm(flat(p), axis=0),
        rtol=1e-5,
      )
      assert not np.allclose(d, p)


def test_middle_of_a_landscape_is_the_loss_at_the_weights():
  params = small_params()
  keys = jax.random.split(jax.random.key(1))
  directions = tuple(landscape.random_direction(k, params) for k in keys)
  at = np.linspace(-1, 1, 5)
  surface = landscape.surface(small_loss, params, directions, at)
  curve = landscape.surface(small_loss, params, directions[:1], at)
  assert surface.shape == (5, 5)
  np.testing.assert_allclose(surface[2, 2], small_loss(params), rtol=1e-6)
  np.testing.assert_allclose(surface[:, 2], curve, rtol=1e-6)


def test_axes_of_a_landscape_follow_the_directions():
  plane = jax.tree_util.Partial(lambda p: p['x'] + 10 * p['y'])
  params = {'x': jnp.zeros(()), 'y': jnp.zeros(())}
  directions = ({'x': 1.0, 'y': 0.0}, {'x': 0.0, 'y': 1.0})
  at = np.array([-1.0, 0.0, 1.0])
  surface = landscape.surface(plane, params, directions, at)
  np.testing.assert_allclose(surface, at[:, None] + 10 * at)


def test_rotated_images_are_pillows():
  from PIL import Image

  images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), np.uint8)
  rotated = setting.rotate(np.random.default_rng(5), images, 90.0)
  angles = np.random.default_rng(5).uniform(-90, 90, 3)
  for image, result, angle in zip(images, rotated, angles, strict=True):
    expected = Image.fromarray(image[..., 0]).rotate(angle)
    np.testing.assert_array_equal(result[..., 0], expected)
  same = setting.rotate(np.random.default_rng(5), images, 0.0)
  np.testing.assert_array_equal(same, images)


# Sharpness.


def test_sharpness_starts_at_zero_with_the_slope_of_the_gradient():
  params = small_params()
  rhos = np.array([0.0, 1e-2])
  zero, small = sharpness.rises(small_loss, small_loss, params, rhos)
  assert zero == 0
  norm = optax.tree.norm(jax.grad(small_loss)(params))
  np.testing.assert_allclose(small, 1e-2 * norm, rtol=0.02)


def test_cross_sharpness_climbs_one_loss_and_measures_the_other():
  params = small_params()
  (found,) = sharpness.rises(other_loss, small_loss, params, [0.3])
  climb = jax.grad(small_loss)(params)
  length = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(climb)))
  worst = jax.tree.map(lambda p, g: p + 0.3 * g / length, params, climb)
  np.testing.assert_allclose(
    found, other_loss(worst) - other_loss(params), rtol=1e-4
  )


# Curvature.


def test_largest_eigenvalues_are_those_of_the_full_hessian():
  params = small_params()
  flat, unravel = ravel_pytree(params)
  full = jax.hessian(lambda x: small_loss(unravel(x)))(flat)
  expected = np.linalg.eigvalsh(full)[::-1][:3]
  found, errors = hessian.top_eigenvalues(small_loss, params, 3, 20)
  np.testing.assert_allclose(found, expected, rtol=1e-3)
  assert (errors < 1e-3).all()


def test_few_iterations_say_how_far_they_are():
  params = small_params()
  flat, unravel = ravel_pytree(params)
  full = jax.hessian(lambda x: small_loss(unravel(x)))(flat)
  (found,), (error,) = hessian.top_eigenvalues(small_loss, params, 1, 3)
  nearest = np.abs(np.linalg.eigvalsh(full) - found).min()
  assert nearest <= error + 1e-6
  assert error > 0


def test_lanczos_ends_where_nothing_is_left():
  bowl = jax.tree_util.Partial(lambda p: 3 * jnp.sum(p**2))
  found, errors = hessian.top_eigenvalues(bowl, jnp.ones(7), 2, 5)
  np.testing.assert_allclose(found, [6.0], rtol=1e-5)
  np.testing.assert_allclose(errors, [0.0], atol=1e-4)


# Angles and probes.


@pytest.mark.parametrize(
  ('other', 'degrees'),
  [
    ((2.0, 0.0), 0.0),
    ((0.0, 3.0), 90.0),
    ((1.0, 1e-4), np.degrees(1e-4)),
  ],
)
def test_angle(other, degrees):
  tree = lambda x, y: {'a': jnp.array([x]), 'b': jnp.array([[y]])}
  found = probe.angle(tree(1.0, 0.0), tree(*other))
  np.testing.assert_allclose(found, degrees, rtol=1e-5, atol=1e-6)


def test_angle_to_nothing_is_not_a_number():
  assert np.isnan(probe.angle({'a': jnp.ones(2)}, {'a': jnp.zeros(2)}))


@pytest.fixture(scope='module')
def probed():
  """A state, its batch and what a probe with ρ = 0.3 sees there."""
  setup, batch = Setup('freematch'), make_batch()
  state = setup.init()
  look = probe.make_probe(setup.forward, setup.method, rho=0.3)
  images = jax.random.normal(jax.random.key(9), (8, 8, 8, 1))
  held_out = images, jnp.arange(8) % 4
  return state, batch, held_out, jax.jit(look)(state, batch, held_out)


@pytest.fixture(scope='module')
def plain(probed):
  """What a plain step says of the same batch."""
  state, batch, *_ = probed
  return jax.jit(Setup('freematch').step)(state, batch)[1]


def test_probe_sees_what_the_recipes_compute(probed, plain):
  state, batch, _, found = probed
  _, cross = jax.jit(Setup('freematch', 'flatmatch', rho=0.3).step)(
    state, batch
  )
  _, own = jax.jit(Setup('freematch', 'sharp_labeled', rho=0.3).step)(
    state, batch
  )
  expected = {
    'labeled_loss': plain['labeled_loss'],
    'unlabeled_loss': plain['unlabeled_loss'],
    'total_gradient_norm': plain['gradient_norm'],
    'sharpness': own['worst_loss'] - plain['labeled_loss'],
    'cross_sharpness': cross['worst_loss'] - plain['unlabeled_loss'],
  }
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)
  assert abs(found['cross_sharpness']) > 1e-3


def test_angle_and_norms_of_a_probe_obey_the_law_of_cosines(probed):
  *_, found = probed
  labeled, unlabeled, total = (
    float(found[f'{name}_gradient_norm'])
    for name in ('labeled', 'unlabeled', 'total')
  )
  cosine = np.cos(np.radians(found['gradient_angle']))
  np.testing.assert_allclose(
    unlabeled**2,
    labeled**2 + total**2 - 2 * labeled * total * cosine,
    rtol=1e-3,
  )


def test_sharpness_of_held_out_images_is_their_own(probed):
  state, _, (images, labels), found = probed
  setup = Setup('freematch')

  @jax.tree_util.Partial
  def loss(params):
    outputs, _ = setup.forward(params, state.batch_stats, {'x': images})
    logits = outputs['x'].logits
    rows = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return rows.mean()

  (expected,) = sharpness.rises(loss, loss, state.params, [0.3])
  np.testing.assert_allclose(found['held_out_sharpness'], expected, rtol=1e-4)


def test_supervised_training_has_one_gradient():
  setup = Setup('supervised')
  look = probe.make_probe(setup.forward, setup.method, rho=0.3)
  found = jax.jit(look)(setup.init(), make_batch(views=()))
  assert found['gradient_angle'] == 0
  assert found['cross_sharpness'] == 0
  assert found['unlabeled_gradient_norm'] == 0


def test_held_out_images_are_of_all_classes_where_these_come_in_order():
  labels = np.repeat(np.arange(5), 20)
  images = np.broadcast_to(labels[:, None, None, None], (100, 2, 2, 1))
  config = config_dict.ConfigDict(
    {
      'probe_every': 1,
      'unlabeled_batch_size': 11,
      'microbatches': 2,
      'mean': (0.0,),
      'std': (1.0,),
    }
  )
  sets = {'': (images.astype(np.uint8), labels)}
  pixels, chosen = setup.probe_images(config, sets)
  assert len(chosen) == 10
  np.testing.assert_array_equal(np.bincount(chosen), [2] * 5)
  np.testing.assert_allclose(255 * pixels[:, 0, 0, 0], chosen, rtol=1e-5)


# Pseudo-labels.


def test_quality_of_pseudo_labels_by_class():
  found = pseudo_labels.quality(
    label=np.array([0, 0, 1, 1, 2, 0]),
    weight=np.array([1.0, 0.5, 0.0, 1.0, 1.0, 1.0]),
    truth=np.array([0, 0, 0, 1, 0, -1]),
    num_classes=3,
  )
  np.testing.assert_array_equal(found['images'], [4, 1, 0])
  np.testing.assert_allclose(found['used'], [2.5 / 4, 1.0, np.nan])
  np.testing.assert_allclose(found['accuracy'], [60.0, 100.0, np.nan])
  np.testing.assert_allclose(
    found['confusion'], [[1.5, 0, 1], [0, 1, 0], [0, 0, 0]]
  )


def test_guesses_are_those_of_the_step(probed, plain):
  state, batch, *_ = probed
  setup = Setup('freematch')
  guess = pseudo_labels.make_guess(setup.forward, setup.method)
  found = pseudo_labels.quality(
    *guess(state, batch), batch.unlabeled['truth'], NUM_CLASSES
  )
  used = (found['used'] * found['images']).sum() / found['images'].sum()
  np.testing.assert_allclose(used, plain['used_fraction'], rtol=1e-6)
  accuracy = np.trace(found['confusion']) / found['confusion'].sum()
  np.testing.assert_allclose(
    100 * accuracy, plain['pseudo_label_accuracy'], rtol=1e-6
  )


# Figures.


def outcome(error, **config):
  return {
    'error_last': error,
    'error_best': error - 1,
    'step_seconds': 0.1,
    'config': json.dumps(config),
  }


def test_sensitivity_is_over_the_number_that_differs():
  runs = {
    'a': [outcome(5.0, recipe_args={'rho': 0.5}, seed=0)],
    'b': [outcome(3.0, recipe_args={'rho': 0.1}, seed=0)],
    'c': [outcome(4.0, recipe_args={'rho': 1.0}, seed=0)],
  }
  (axis,) = outcomes.sensitivity(runs).axes
  assert axis.get_xlabel() == 'config.recipe_args.rho'
  last, best = axis.lines
  np.testing.assert_array_equal(last.get_xdata(), [0.1, 0.5, 1.0])
  np.testing.assert_array_equal(last.get_ydata(), [3.0, 5.0, 4.0])
  np.testing.assert_array_equal(best.get_ydata(), [2.0, 4.0, 3.0])


def test_sensitivity_is_the_mean_over_seeds():
  errors = {0.5: [5.0], 0.1: [3.0, 4.0, 8.0]}
  runs = {
    str(rho): [
      outcome(error, rho=rho, seed=seed, split_seed=seed)
      for seed, error in enumerate(values)
    ]
    for rho, values in errors.items()
  }
  (axis,) = outcomes.sensitivity(runs).axes
  last, _ = axis.lines
  np.testing.assert_array_equal(last.get_xdata(), [0.1, 0.5])
  np.testing.assert_array_equal(last.get_ydata(), [5.0, 5.0])
  low, high = axis.collections[0].get_segments()[0][:, 1]
  np.testing.assert_allclose(high - low, 2 * np.sqrt(7.0))


@pytest.mark.parametrize(
  'others',
  [
    [],
    [{'rho': 0.1, 'seed': 1, 'steps': 2}],
    [{'rho': 0.2, 'seed': 0, 'steps': 3}],
    [{'rho': 'large', 'seed': 0, 'steps': 2}],
  ],
)
def test_no_sensitivity_without_one_number_that_differs(others):
  configs = [{'rho': 0.1, 'seed': 0, 'steps': 2}, *others]
  runs = {str(n): [outcome(5.0, **c)] for n, c in enumerate(configs)}
  assert outcomes.sensitivity(runs) is None


def bowl_of(height):
  """The landscape of a loss that is a bowl."""
  at = np.linspace(-1, 1, 3)
  bowl = height * (0.1 + at[:, None] ** 2 + at**2)
  found = {'at': at, 'curve_at': at}
  for kind in ('labeled', 'unlabeled'):
    found |= {f'{kind}_surface': bowl, f'{kind}_curve': bowl[1]}
  return found


def test_compared_landscapes_share_their_scale():
  figure = figures.landscape({'low': [bowl_of(1.0)], 'high': [bowl_of(10.0)]})
  maps = [axis for axis in figure.axes if axis.get_aspect() == 1.0]
  assert len(maps) == 4
  for axis in maps:  # From the lowest to the highest of all.
    np.testing.assert_allclose(axis.collections[0].get_clim(), (0.1, 21.0))
  curves = [axis for axis in figure.axes if 'curves' in axis.get_title()]
  assert len({axis.get_ylim() for axis in curves}) == 1


def test_seeds_are_a_mean_in_a_band_of_all():
  seeds = [
    {'rho': np.array([0.0, 0.1]), 'labeled_rise': np.array([0.0, rise])}
    for rise in (1.0, 2.0, 6.0)
  ]
  figure = figures.sharpness({'a': seeds, 'b': seeds[:1]})
  (axis,) = figure.axes
  mean, alone = axis.lines
  np.testing.assert_array_equal(mean.get_ydata(), [0.0, 3.0])
  np.testing.assert_array_equal(alone.get_ydata(), [0.0, 1.0])
  (band,) = axis.collections
  heights = band.get_paths()[0].vertices
  assert {1.0, 6.0} == {y for x, y in heights if x == 0.1}
  texts = [text.get_text() for text in figure.legends[0].get_texts()]
  assert texts == ['a, 3 seeds', 'b']


def test_seeds_measured_at_other_steps_have_lines_of_their_own():
  seeds = [
    {'log_step': np.arange(n), 'log_labeled_loss': np.ones(n)}
    | {'log_unlabeled_loss': np.full(n, 3.0)}
    for n in (2, 3)
  ]
  _, labeled, _, apart = outcomes.convergence({'a': seeds}).axes
  assert [len(line.get_xdata()) for line in labeled.lines] == [2, 3]
  np.testing.assert_array_equal(apart.lines[1].get_ydata(), [2.0] * 3)


def test_pseudo_labels_of_seeds_are_counted_together():
  make = lambda *rows: {
    'confusion': np.array(rows, float),
    'images': np.array([4, 4]),
    'class_names': np.array(['a', 'b']),
  }
  seeds = [make([4, 0], [0, 0]), make([0, 2], [0, 4])]
  bars = figures.pseudo_labels({'x': seeds}).axes[0].patches
  heights = [bar.get_height() for bar in bars]
  np.testing.assert_allclose(heights, [75.0, 50.0, 400 / 6, 100.0])


# Tables.


def test_rise_of_a_bowl_is_that_of_its_radius():
  at = np.linspace(-1, 1, 41)
  bowl = 7 + 3 * (at[:, None] ** 2 + at**2)
  np.testing.assert_allclose(summary.around(bowl, at), 3 * 0.25, rtol=1e-2)


def test_table_is_of_means_and_deviations_over_seeds():
  seeds = [outcome(error) for error in (3.0, 4.0, 8.0)]
  lines = summary.table('efficiency', {'a': seeds, 'b': seeds[:1]}).split('\n')
  assert lines[0].split() == ['efficiency', 'a', 'b']
  assert lines[1].split('  ')[0] == 'last test error, %'
  assert lines[1].split()[4:] == ['5', '±', '2.6', '3']


def test_method_that_trusts_nothing_has_no_share_of_right_guesses():
  data = {'confusion': np.zeros((2, 2)), 'images': np.array([3, 4])}
  _, used = summary.table('pseudo_labels', {'a': [data]}).split('\n')
  assert used.split() == ['used,', '%', 'of', 'the', 'images', '0']


def test_mean_of_the_second_half_leaves_the_first_out():
  steps = np.array([1, 2, 3, 4])
  data = {
    'rho': np.array([0.0, 0.5]),
    'labeled_rise': np.array([0.0, 2.0]),
    'log_step': steps,
    'log_cross_sharpness': np.array([9.0, 9.0, 1.0, 2.0]),
  }
  text = summary.table('sharpness', {'a': [data]})
  assert 'labeled, at ρ = 0.5' in text
  assert re.search('second half of training +1.5$', text)
