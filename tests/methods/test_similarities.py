"""CoMatch, SimMatch and CRMatch against their papers in numpy."""

from by_numpy import (
  assert_guesses,
  close,
  cross_entropy,
  prediction,
  softmax,
  unit,
)
from conftest import INFO, NUM_CLASSES, make_batch
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flatmatch_jax import methods
from flatmatch_jax.types import UserError

B, U = 5, 12
LABEL = np.arange(B) % NUM_CLASSES
IMAGES = sum(INFO.class_counts)


def arrays(seed, head, size, *views):
  """Random logits, and outputs of a head, for labeled images and `views`."""
  rng = np.random.default_rng(seed)
  rows = {'labeled': B} | dict.fromkeys(views, U)
  draw = lambda n, width: 2 * rng.normal(size=(n, width))
  return {k: (draw(n, NUM_CLASSES), draw(n, size)) for k, n in rows.items()}


def outputs(head, found):
  return {k: prediction(x, **{head: y}) for k, (x, y) in found.items()}


def call(name, head, size, views, state, step=5, seed=0, targets=(), **args):
  """The method's results, and the student's and teacher's arrays."""
  student, teacher = (
    arrays(2 * seed + k, head, size, *views) for k in range(2)
  )
  method = methods.create(name, {'info': INFO}, **args)
  if state is None:
    state = method.init(None, None, INFO)
  results = method.loss(
    outputs(head, student),
    outputs(head, teacher),
    {'label': jnp.asarray(LABEL)} | dict(targets),
    state,
    jnp.asarray(step),
  )
  return results, student, teacher


def aligned(probs, average):
  ratio = probs / (average + 1e-6)
  return ratio / ratio.sum(-1, keepdims=True)


# CoMatch


def call_comatch(state, step, seed, **args):
  views = 'weak', 'strong', 'strong2'
  sizes = {'memory': 2 * (B + U) + 3, 'threshold': 0.7, 'decay': 0.9}
  sizes['contrast_threshold'] = 0.5
  return call(
    'comatch', 'embedding', 64, views, state, step, seed, **sizes | args
  )


def comatch_losses(student, target, threshold=0.7, edge=0.5, temperature=0.2):
  """Both unlabeled losses, pair by pair."""
  first, second = (unit(student[k][1]) for k in ('strong', 'strong2'))
  contrast = edges = 0
  for i in range(U):
    alike = target @ target[i]
    alike[i] = 1
    alike = np.where(alike >= edge, alike, 0)
    edges += (alike > 0).sum()
    shares = softmax(second @ first[i] / temperature)
    contrast -= alike @ np.log(shares) / alike.sum() / U
  assert U < edges < U * U  # More than each image with itself.
  mask = target.max(-1) >= threshold
  classes = mask * cross_entropy(student['strong'][0], target)
  return classes.mean(), contrast, mask


def test_comatch_smooths_when_its_memory_is_full():
  state, memory, mean = None, [], None
  for step in range(5):
    (value, state, metrics), student, teacher = call_comatch(
      state, step, step, weight=2.0, contrast_weight=3.0
    )
    probs, embedded = softmax(teacher['weak'][0]), unit(teacher['weak'][1])
    now = probs.mean(0)
    mean = now if step == 0 else 0.9 * mean + 0.1 * now
    own = target = aligned(probs, mean)
    if step >= 3:  # 17 images a step into 37 places.
      keys, known = (np.stack(x) for x in zip(*memory[:37], strict=True))
      target = 0.9 * own + 0.1 * softmax(embedded @ keys.T / 0.2) @ known
    classes, contrast, mask = comatch_losses(student, target)
    close(value.unlabeled, 2 * classes + 3 * contrast)
    close(value.labeled, cross_entropy(student['labeled'][0], LABEL).mean())
    assert_guesses(metrics, target.argmax(-1), mask)
    own = np.concatenate([own, np.eye(NUM_CLASSES)[LABEL]])
    embedded = np.concatenate([embedded, unit(teacher['labeled'][1])])
    memory = [*zip(embedded, own, strict=True), *memory]
  keys, known = (np.stack(x) for x in zip(*memory[:37], strict=True))
  close(state.embeddings, keys)
  close(state.probs, known)
  close(state.mean, mean)


# SimMatch


def test_simmatch_lets_classes_and_similarities_correct_each_other():
  bank, label, state, mean = {}, {}, None, None
  places = [[3, 1, 3, 7, 0], [1, 4, 0, 9, 8], [3, 3, 3, 1, 5], [2, 0, 6, 6, 1]]
  # An image has one label.
  labels = np.arange(IMAGES) % NUM_CLASSES
  for step, place in enumerate(places):
    targets = {'place': jnp.asarray(place), 'label': jnp.asarray(labels[place])}
    (value, state, metrics), student, teacher = call(
      'simmatch',
      'embedding',
      128,
      ('weak', 'strong'),
      state,
      step,
      step,
      targets,
      threshold=0.7,
      decay=0.9,
      weight=2.0,
      similarity_weight=3.0,
    )
    now = softmax(teacher['weak'][0])
    mean = now.mean(0) if step == 0 else 0.9 * mean + 0.1 * now.mean(0)
    probs = target = aligned(now, mean)
    similarity = 0
    if bank:
      keys = np.stack(list(bank.values()))
      classes = np.array([labels[k] for k in bank])
      alike = softmax(unit(teacher['weak'][1]) @ keys.T / 0.1)
      unfolded = alike * probs[:, classes]
      unfolded /= unfolded.sum(-1, keepdims=True)
      target = 0.9 * probs + 0.1 * alike @ np.eye(NUM_CLASSES)[classes]
      logits = unit(student['strong'][1]) @ keys.T / 0.1
      similarity = cross_entropy(logits, unfolded).mean()
    mask = target.max(-1) >= 0.7
    rows = mask * cross_entropy(student['strong'][0], target)
    close(value.unlabeled, 2 * rows.mean() + 3 * similarity)
    close(
      value.labeled, cross_entropy(student['labeled'][0], labels[place]).mean()
    )
    assert_guesses(metrics, target.argmax(-1), mask)
    embedded = unit(teacher['labeled'][1])
    for k in set(place):
      new = embedded[np.array(place) == k].mean(0)
      bank[k] = unit(0.7 * bank.get(k, 0) + 0.3 * new)
      label[k] = labels[k]
  for k in range(IMAGES):
    close(state.bank[k], bank.get(k, np.zeros(128)))
    assert state.label[k] == label.get(k, -1)
  close(state.probs, mean)


def test_simmatch_finds_labeled_images_by_their_index():
  batch = make_batch()
  _, targets, _ = methods.create('simmatch').prepare(None, None, batch, None)
  np.testing.assert_array_equal(targets['place'], batch.labeled['index'])


# CRMatch


TURNS = [f'turned{k}' for k in range(4)]


def crmatch_outputs(seed):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: 2 * rng.normal(size=shape)
  return {
    name: (draw(n, NUM_CLASSES), draw(n, 128), draw(n, 4))
    for name, n in {'labeled': B, 'weak': U, 'strong': U}.items()
  } | {name: (draw(6, NUM_CLASSES), draw(6, 128), draw(6, 4)) for name in TURNS}


def call_crmatch(name='crmatch', **args):
  student, teacher = crmatch_outputs(0), crmatch_outputs(1)
  predict = lambda found: {
    k: prediction(x, distance=y, rotation=z) for k, (x, y, z) in found.items()
  }
  method = methods.create(name, threshold=0.7, **args)
  targets = {'label': jnp.asarray(LABEL)}
  results = method.loss(predict(student), predict(teacher), targets, (), 0)
  return results, student, teacher


def test_crmatch_parts_features_of_one_class():
  (value, _, metrics), student, teacher = call_crmatch(
    weight=2.0, distance_weight=3.0, rotation_weight=4.0
  )
  probs = softmax(teacher['weak'][0])
  guess, mask = probs.argmax(-1), probs.max(-1) >= 0.7
  cosine = (unit(student['strong'][1]) * unit(teacher['weak'][1])).sum(-1)
  assert (cosine[mask] > 0).any()
  assert (cosine[mask] < 0).any()
  # Those further apart than a right angle are far enough.
  distance = (mask * np.maximum(cosine, 0)).mean()
  rotation = np.mean(
    [
      cross_entropy(student[name][2], np.full(6, k))
      for k, name in enumerate(TURNS)
    ]
  )
  rows = mask * cross_entropy(student['strong'][0], guess)
  close(value.unlabeled, 2 * rows.mean() + 3 * distance + 4 * rotation)
  close(value.labeled, cross_entropy(student['labeled'][0], LABEL).mean())
  assert_guesses(metrics, guess, mask)


def test_crmatch_without_its_two_losses_is_fixmatch():
  (value, *_), *_ = call_crmatch(distance_weight=0.0, rotation_weight=0.0)
  (fixmatch, *_), *_ = call_crmatch('fixmatch')
  assert value == fixmatch


@pytest.mark.parametrize(
  ('labeled', 'unlabeled', 'every'), [(4, 14, 3), (8, 6, 1)]
)
def test_crmatch_turns_as_many_images_as_are_labeled_if_there_are(
  labeled, unlabeled, every
):
  batch = make_batch(labeled=labeled, unlabeled=unlabeled)
  views, _, _ = methods.create('crmatch').prepare(
    None, None, batch, jax.random.key(0)
  )
  images = np.asarray(batch.unlabeled['weak'])[::every][:labeled]
  for k, name in enumerate(TURNS):
    for image, turned in zip(images, views[name], strict=True):
      np.testing.assert_array_equal(turned, np.rot90(image, k))


def test_crmatch_refuses_images_that_cannot_be_turned():
  batch = make_batch()
  tall = jnp.zeros((16, 9, 8, 1))
  batch = batch._replace(unlabeled=batch.unlabeled | {'weak': tall})
  with pytest.raises(UserError, match='square, but these are of 8 x 9'):
    methods.create('crmatch').prepare(None, None, batch, jax.random.key(0))
