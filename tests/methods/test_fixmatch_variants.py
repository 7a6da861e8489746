"""Methods that change FixMatch's losses, against their papers in numpy."""

from by_numpy import assert_guesses, cross_entropy, prediction, softmax
from conftest import INFO, NUM_CLASSES
import jax.numpy as jnp
import numpy as np

from flatmatch_jax import methods
from flatmatch_jax.methods.debiaspl import DebiasPLState

B, U = 8, 16
LABEL = np.arange(B) % NUM_CLASSES
BAR = 0.7  # Some rows are above it, some below.

close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def divergence(target, logits):
  return (target * (np.log(target) - np.log(softmax(logits)))).sum(-1)


def guesses(logits):
  """Classes, and which of them are confident; neither all nor none."""
  probs = softmax(logits)
  mask = probs.max(-1) >= BAR
  assert 0 < mask.sum() < len(mask)
  return probs.argmax(-1), mask


def call(name, views=(), state=(), **arguments):
  """The results for random logits, and those of student and teacher."""
  rng = np.random.default_rng(3)
  sizes = {'labeled': B, 'weak': U, 'strong': U} | dict(views)
  student, teacher = (
    {k: 2 * rng.normal(size=(n, NUM_CLASSES)) for k, n in sizes.items()}
    for _ in range(2)
  )
  outputs = (
    {k: prediction(v) for k, v in logits.items()}
    for logits in (student, teacher)
  )
  method = methods.create(name, {'info': INFO}, threshold=BAR, **arguments)
  targets = {'label': jnp.asarray(LABEL)}
  return method.loss(*outputs, targets, state, jnp.asarray(5)), student, teacher


def hard_and_soft(student, teacher):
  """ReFixMatch: cross-entropy of the sure rows, divergence of the others."""
  guess, mask = guesses(teacher['weak'])
  soft = divergence(softmax(teacher['weak'] / 0.5), student['strong'])
  rows = np.where(mask, cross_entropy(student['strong'], guess), soft)
  return rows.mean(), guess, mask


def test_refixmatch():
  (value, _, metrics), student, teacher = call('refixmatch', weight=2.0)
  unlabeled, guess, mask = hard_and_soft(student, teacher)
  close(value.labeled, cross_entropy(student['labeled'], LABEL).mean())
  close(value.unlabeled, 2 * unlabeled)
  assert_guesses(metrics, guess, mask)


def test_sequencematch():
  (value, _, metrics), student, teacher = call(
    'sequencematch', {'medium': U}, weight=2.0
  )
  unlabeled, guess, mask = hard_and_soft(student, teacher)
  for weaker, stronger in (
    ('weak', 'medium'),
    ('medium', 'strong'),
    ('weak', 'strong'),
  ):
    _, sure = guesses(teacher[weaker])
    target = softmax(teacher[weaker] / 0.5)
    unlabeled += (sure * divergence(target, student[stronger])).mean()
  close(value.labeled, cross_entropy(student['labeled'], LABEL).mean())
  close(value.unlabeled, 2 * unlabeled)
  assert_guesses(metrics, guess, mask)


def test_defixmatch_subtracts_what_labeled_images_would_add():
  (value, _, metrics), student, teacher = call(
    'defixmatch', {'labeled_strong': B}
  )
  weak, strong = student['labeled'], student['labeled_strong']
  supervised = (cross_entropy(weak, LABEL) + cross_entropy(strong, LABEL)) / 2
  guess, mask = guesses(teacher['labeled'])
  excess = mask * cross_entropy(strong, guess)
  close(value.labeled, supervised.mean() - excess.mean() / 2)
  guess, mask = guesses(teacher['weak'])
  rows = mask * cross_entropy(student['strong'], guess)
  close(value.unlabeled, rows.mean() / 2)
  assert_guesses(metrics, guess, mask)


def test_debiaspl_takes_from_frequent_classes_and_asks_a_margin_of_them():
  mean = np.array([0.6, 0.2, 0.15, 0.05])
  (value, state, metrics), student, teacher = call(
    'debiaspl', state=DebiasPLState(jnp.float32(mean)), decay=0.9, debias=0.8
  )
  guess, mask = guesses(teacher['weak'] - 0.8 * np.log(mean))
  assert (guess != teacher['weak'].argmax(-1)).any()
  after = 0.9 * mean + 0.1 * softmax(teacher['weak']).mean(0)
  close(state.probs, after)
  rows = cross_entropy(student['strong'] + 0.8 * np.log(after), guess)
  close(value.unlabeled, (mask * rows).mean())
  close(value.labeled, cross_entropy(student['labeled'], LABEL).mean())
  assert_guesses(metrics, guess, mask)


def test_debiaspl_starts_as_fixmatch():
  state = methods.create('debiaspl').init(None, None, INFO)
  (value, _, metrics), *_ = call('debiaspl', state=state, decay=1.0)
  (fixmatch, _, expected), *_ = call('fixmatch')
  close(value, fixmatch)
  assert_guesses(metrics, *expected['pseudo_labels'])
