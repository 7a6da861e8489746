"""A batch from arrays of one's own, and the pure step that takes it."""

import re

from conftest import NUM_CLASSES, STEPS, Setup
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import ROOT

from flatmatch_jax import methods
from flatmatch_jax.data import batch as batch_lib
from flatmatch_jax.types import UserError

RNG = np.random.default_rng(0)
LABELED = RNG.integers(0, 256, (4, 8, 8, 1), np.uint8)
LABELS = RNG.integers(0, NUM_CLASSES, 4)
UNLABELED = RNG.integers(0, 256, (12, 8, 8, 1), np.uint8)
COLOURS = {'mean': (0.5,), 'std': (0.25,)}


def make(views=('weak', 'weak2'), **options):
  return batch_lib.from_arrays(
    jax.random.key(0), views, LABELED, LABELS, UNLABELED, **COLOURS, **options
  )


def test_without_shift_and_flip_the_weak_view_is_the_image():
  batch = make(pad=0, flip=False)
  for given, found in (
    (LABELED, batch.labeled['weak']),
    (UNLABELED, batch.unlabeled['weak']),
    (UNLABELED, batch.unlabeled['weak2']),
  ):
    np.testing.assert_allclose(found, (given / 255 - 0.5) / 0.25, atol=1e-6)
  np.testing.assert_array_equal(batch.labeled['label'], LABELS)
  np.testing.assert_array_equal(batch.unlabeled['index'], np.arange(12))


def test_each_view_is_a_draw_of_its_own():
  batch = make(('weak', 'weak2', 'labeled_weak2'), index=np.arange(12) + 30)
  assert set(batch.labeled) == {'weak', 'weak2', 'label', 'index'}
  assert (batch.labeled['weak'] != batch.labeled['weak2']).any()
  assert (batch.unlabeled['weak'] != batch.unlabeled['weak2']).any()
  assert batch.unlabeled['index'][0] == 30


def test_a_step_needs_no_truth():
  """One step of the equation from arrays; truth changes a metric only."""
  sure = methods.create('pseudo_label', {'steps': STEPS}, threshold=0.0)
  setup = Setup(sure, 'flatmatch')
  step = jax.jit(setup.step)
  found = []
  for truth, is_known in ((None, False), (RNG.integers(0, 4, 12), True)):
    batch = make(setup.method.views, truth=truth)
    state, metrics = step(setup.init(), batch)
    assert jnp.isfinite(metrics.pop('pseudo_label_accuracy')) == is_known
    found.append(jax.tree.leaves((state.params, metrics)))
  assert jnp.isfinite(metrics['worst_loss'])
  for one, other in zip(*found, strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures('tiny_network')
def test_the_loop_of_the_guide_trains():
  """With a method that compiles fast."""
  guide = (ROOT / 'docs' / 'guide.md').read_text()
  (text,) = re.findall(r'```python\n(import jax\n.*?)```', guide, re.DOTALL)
  text = text.replace("'freematch'", "'pseudo_label', {'steps': steps}")
  names = {
    'steps': 9,
    'images': UNLABELED,
    'yours': 2 * [(LABELED, LABELS, UNLABELED)],
  }
  exec(text, names)
  assert int(names['state'].step) == 2
  assert jnp.isfinite(names['metrics']['labeled_loss'])


def test_images_that_are_not_bytes_are_refused():
  with pytest.raises(UserError, match=r'unlabeled_images are float64 .*uint8'):
    batch_lib.from_arrays(
      jax.random.key(0), ('weak',), LABELED, LABELS, UNLABELED / 255, **COLOURS
    )
