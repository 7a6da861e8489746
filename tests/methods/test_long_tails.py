"""ABC, SAW and DASO against their papers in numpy."""

import collections

from by_numpy import (
  assert_guesses,
  close,
  cross_entropy,
  prediction,
  softmax,
  unit,
)
from conftest import INFO, NUM_CLASSES, Setup, make_batch
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flatmatch_jax import methods
from flatmatch_jax.methods.abc import balance
from flatmatch_jax.methods.daso import DASOState, enter, prototypes
from flatmatch_jax.methods.saw import weights
from flatmatch_jax.types import DatasetInfo

B, U, SIZE = 8, 16, 6
STEPS = 100
LABEL = np.arange(B) % NUM_CLASSES
COUNTS = np.array([40, 20, 10, 5])
TAILED = DatasetInfo(NUM_CLASSES, 50, 50, tuple(COUNTS.tolist()))
BALANCED = TAILED._replace(class_counts=(10,) * NUM_CLASSES)


def arrays(seed):
  """Random logits, those of a second classifier, and features."""
  rng = np.random.default_rng(seed)
  draw = lambda n, width: 2 * rng.normal(size=(n, width))
  return {
    name: (draw(n, NUM_CLASSES), draw(n, NUM_CLASSES), draw(n, SIZE))
    for name, n in {'labeled': B, 'weak': U, 'strong': U}.items()
  }


def call(name, info=TAILED, state=(), step=0, seed=0, targets=(), **arguments):
  """The method's results, and the student's and teacher's arrays."""
  student, teacher = arrays(2 * seed), arrays(2 * seed + 1)
  predict = lambda found: {
    k: prediction(x, z, balanced=y) for k, (x, y, z) in found.items()
  }
  context = {'info': info, 'steps': STEPS}
  method = methods.create(name, context, threshold=0.6, **arguments)
  targets = {'label': jnp.asarray(LABEL)} | dict(targets)
  results = method.loss(
    predict(student), predict(teacher), targets, state, jnp.asarray(step)
  )
  return results, student, teacher


def call_fixmatch(**arguments):
  (value, _, metrics), *_ = call('fixmatch', **arguments)
  return value, metrics['pseudo_labels']


# ABC


def draws(seed=7):
  rng = np.random.default_rng(seed)
  return {'label_draw': rng.random(B), 'index_draw': rng.random(U)}


@pytest.mark.parametrize('step', [0, 40, 100])
def test_abc_takes_equally_many_images_of_each_class(step):
  drawn = draws()
  (value, state, metrics), student, teacher = call(
    'abc', step=step, targets=drawn, weight=2.0, balanced_weight=3.0
  )
  chance = COUNTS.min() / COUNTS
  kept = drawn['label_draw'] < chance[LABEL]
  assert 0 < kept.sum() < B
  fixmatch, guesses = call_fixmatch(weight=2.0)
  rows = kept * cross_entropy(student['labeled'][1], LABEL)
  close(value.labeled, fixmatch.labeled + 3 * rows.mean())

  probs = softmax(teacher['weak'][1])
  falling = 1 - step / STEPS * (1 - chance)
  sure = probs.max(-1) >= 0.6
  used = sure & (drawn['index_draw'] < falling[probs.argmax(-1)])
  assert used.any()
  assert (used.sum() == sure.sum()) == (step == 0)
  rows = used * cross_entropy(student['strong'][1], probs)
  close(value.unlabeled, fixmatch.unlabeled + 3 * rows.mean())
  assert state == ()
  assert_guesses(metrics, *guesses)


def test_abc_of_balanced_labels_leaves_nothing_to_chance():
  def losses(info, draw):
    targets = {'label_draw': jnp.full(B, draw), 'index_draw': jnp.full(U, draw)}
    (value, *_), *_ = call('abc', info, step=STEPS, targets=targets)
    return value

  assert losses(BALANCED, 0.0) == losses(BALANCED, 0.99)
  everything, little = losses(TAILED, 0.0), losses(TAILED, 0.99)
  assert everything == losses(BALANCED, 0.0)
  assert everything.labeled > little.labeled
  assert everything.unlabeled > little.unlabeled


def test_abc_expects_as_many_images_of_each_class():
  close(balance(COUNTS) * COUNTS, np.full(NUM_CLASSES, COUNTS.min()))
  close(balance((4, 0, 2, 1)), [1 / 4, 1, 1 / 2, 1])


def test_abc_draws_for_every_image():
  method = methods.create('abc', {'info': INFO, 'steps': STEPS})
  batch = make_batch()
  _, targets, _ = method.prepare(None, None, batch, jax.random.key(0))
  found = np.concatenate([targets['label_draw'], targets['index_draw']])
  sizes = len(batch.labeled['label']), len(batch.unlabeled['index'])
  assert len(np.unique(found)) == sum(sizes)
  assert 0 <= found.min() < found.max() < 1


def test_abc_classifies_by_its_balanced_classifier():
  setup = Setup('abc')
  params = jax.tree.map(jnp.zeros_like, setup.init().params)
  params['balanced']['bias'] = jnp.arange(NUM_CLASSES, dtype=jnp.float32)
  variables = {'params': params, 'batch_stats': setup.init().batch_stats}
  result = setup.model.apply(variables, jnp.zeros((2, 8, 8, 1)), train=False)
  close(result.logits, [[0, 1, 2, 3]] * 2)


# SAW


def effective(counts):
  """1 + β + … + βⁿ⁻¹, of a number per class."""
  beta = 1 - 1 / np.mean(counts)
  return np.array([sum(beta**k for k in range(n)) for n in counts])


def test_saw_weighs_by_effective_numbers():
  found = weights(COUNTS)
  ratio = 1 / effective(COUNTS)
  close(found, ratio / ratio.mean())
  assert (np.diff(found) > 0).all()
  # One who has no image counts as one who has one.
  close(weights((30, 9, 1, 0)), weights((30, 9, 1, 1)), rtol=0.03)
  close(weights(np.zeros(3)), np.ones(3))


def call_saw(info=TAILED, state=None, seed=0, **arguments):
  if state is None:
    state = methods.create('saw', {'info': info}).init(None, None, info)
  targets = {'index': jnp.arange(U) + 10}
  return call('saw', info, state, 0, seed, targets, **arguments)


def test_saw_weighs_both_losses_by_class():
  state = None
  table = np.full(50, -1)
  for seed in range(3):
    (value, pending, metrics), student, teacher = call_saw(
      state=state, seed=seed, weight=2.0
    )
    scale = np.asarray(weights(COUNTS))[LABEL]
    rows = scale * cross_entropy(student['labeled'][0], LABEL)
    close(value.labeled, rows.mean())
    counts = np.array([(table == k).sum() for k in range(NUM_CLASSES)])
    counts = counts + (table == -1).sum() / NUM_CLASSES
    probs = softmax(teacher['weak'][0])
    guess, mask = probs.argmax(-1), probs.max(-1) >= 0.6
    scale = np.asarray(weights(counts))[guess]
    rows = mask * scale * cross_entropy(student['strong'][0], guess)
    close(value.unlabeled, 2 * rows.mean())
    assert_guesses(metrics, guess, mask)
    table[10 : 10 + U] = guess  # Sure or not.
    state = pending.written()
    np.testing.assert_array_equal(state.table, table)
  assert np.ptp(weights(counts)) > 0.05


def test_saw_of_balanced_classes_is_fixmatch():
  (value, *_), *_ = call_saw(BALANCED)
  fixmatch, _ = call_fixmatch()
  close(value, fixmatch, rtol=1e-6)


# DASO


def daso_state(length=3, seed=3):
  """In the middle of training."""
  rng = np.random.default_rng(seed)
  state = DASOState(
    queue=jnp.zeros((NUM_CLASSES * length, SIZE)),
    sums=jnp.zeros((NUM_CLASSES, SIZE)),
    entered=jnp.zeros(NUM_CLASSES, jnp.int32),
    counts=jnp.array([5, 0, 2, 1]),
    shares=jnp.array([0.6, 0.2, 0.15, 0.05]),
  )
  features = jnp.float32(rng.normal(size=(9, SIZE)))
  return enter(state, features, jnp.arange(9) % NUM_CLASSES, 0).written()


def test_daso_keeps_the_last_images_of_each_class():
  length, rng = 3, np.random.default_rng(0)
  queues = [collections.deque(maxlen=length) for _ in range(NUM_CLASSES)]
  state = daso_state(length)._replace(
    queue=jnp.zeros((NUM_CLASSES * length, SIZE)),
    sums=jnp.zeros((NUM_CLASSES, SIZE)),
    entered=jnp.zeros(NUM_CLASSES, jnp.int32),
  )
  close(prototypes(state), np.zeros((NUM_CLASSES, SIZE)))
  # Often more of a class than it keeps; the last class is rare.
  for step in range(6):
    label = rng.choice(NUM_CLASSES, B, p=[0.6, 0.2, 0.18, 0.02])
    features = rng.normal(size=(B, SIZE))
    state = enter(state, jnp.float32(features), label, step).written()
    for row, k in zip(features, label, strict=True):
      queues[k].append(row)
    expected = [np.mean(q, 0) if q else np.zeros(SIZE) for q in queues]
    close(prototypes(state), expected)
  assert state.entered.max() > 4 * length


def test_daso_forgets_the_rounding_of_large_features():
  state, label = daso_state(2), np.arange(B) % NUM_CLASSES
  rng = np.random.default_rng(0)
  for step, size in enumerate([1, 1e8, *(2 * NUM_CLASSES * [1])]):
    features = jnp.float32(size * rng.normal(size=(B, SIZE)))
    state = enter(state, features, label, step).written()
  sums = state.queue.reshape(NUM_CLASSES, 2, SIZE).sum(1)
  close(state.sums, sums, rtol=1e-4, atol=1e-5)


def call_daso(state, step=50, **arguments):
  features = np.random.default_rng(9).normal(size=(B, SIZE))
  return call(
    'daso',
    state=state,
    step=step,
    targets={'features': jnp.float32(features)},
    pretrain_steps=50,
    interval=20,
    **arguments,
  ), features


def test_daso_blends_by_how_often_a_class_is_guessed():
  state = daso_state()
  ((value, after, metrics), student, teacher), features = call_daso(
    state, weight=2.0, alignment_weight=3.0
  )
  entered = enter(state, jnp.float32(features), jnp.asarray(LABEL), 50).state
  centers = unit(np.float64(prototypes(entered)))
  similar = lambda found: unit(found[2]) @ centers.T / 0.05
  semantic = softmax(similar(teacher['weak']))
  probs = softmax(teacher['weak'][0])
  shares = np.array([0.6, 0.2, 0.15, 0.05]) ** (1 / 1.5)
  part = (shares / shares.max())[probs.argmax(-1)][:, None]
  blended = (1 - part) * probs + part * semantic
  guess, mask = blended.argmax(-1), blended.max(-1) >= 0.6
  assert (guess != probs.argmax(-1)).any()
  rows = mask * cross_entropy(student['strong'][0], guess)
  aligned = cross_entropy(similar(student['strong']), semantic)
  close(value.unlabeled, 2 * rows.mean() + 3 * aligned.mean(), rtol=1e-3)
  close(value.labeled, cross_entropy(student['labeled'][0], LABEL).mean())
  assert_guesses(metrics, guess, mask)
  counts = np.bincount(guess, minlength=NUM_CLASSES)
  np.testing.assert_array_equal(after.state.counts, state.counts + counts)
  np.testing.assert_array_equal(after.state.shares, state.shares)


def test_daso_starts_as_fixmatch_and_counts_by_intervals():
  state = daso_state()
  ((value, after, metrics), *_), _ = call_daso(state, step=39)
  fixmatch, guesses = call_fixmatch()
  close(value, fixmatch, rtol=1e-6)
  assert_guesses(metrics, *guesses)
  counts = state.counts + np.bincount(guesses.label, minlength=NUM_CLASSES)
  close(after.state.shares, counts / counts.sum())
  np.testing.assert_array_equal(after.state.counts, np.zeros(NUM_CLASSES))


def test_daso_keeps_features_of_the_averaged_weights():
  setup = Setup('daso')
  state = setup.init()
  assert state.method.queue.shape == (256 * NUM_CLASSES, 16)
  average = jax.tree.map(lambda x: 2 * x, state.params)
  state = state.replace(ema_params=average)
  batch = make_batch()

  def predict(images, params=state.params):
    found, _ = setup.forward(params, state.batch_stats, {'images': images})
    return found['images']

  _, targets, _ = setup.method.prepare(predict, state, batch, None)
  images = batch.labeled['weak']
  close(targets['features'], predict(images, average).features)
  assert np.abs(targets['features'] - predict(images).features).max() > 1e-2
