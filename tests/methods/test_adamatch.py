"""AdaMatch against the equations of its paper, in numpy."""

from by_numpy import close, cross_entropy, prediction, softmax
from conftest import INFO, NUM_CLASSES, make_batch
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from flatmatch_jax import methods
from flatmatch_jax.methods.adamatch import warm_up
from flatmatch_jax.step import forward
from flatmatch_jax.training import program
from flatmatch_jax.types import DatasetInfo

STEPS = 1000
LABELED, UNLABELED = 6, 12


def create(**arguments):
  context = {'steps': STEPS, 'info': INFO}
  return methods.create('adamatch', context, **arguments)


def random_logits(rng):
  sizes = {'weak': UNLABELED, 'strong': UNLABELED}
  sizes |= {'labeled': LABELED, 'labeled_joint': LABELED}
  logits = {k: 2 * rng.normal(size=(n, NUM_CLASSES)) for k, n in sizes.items()}
  logits['weak'][:, 0] += 2  # Predicted too often: there is much to align.
  return logits


def outputs(logits):
  return {k: prediction(v) for k, v in logits.items()}


@pytest.mark.parametrize(('step', 'mu'), [(0, 0.0), (250, 0.5), (900, 1.0)])
def test_losses_follow_the_equations(step, mu):
  rng = np.random.default_rng(1)
  student, teacher = random_logits(rng), random_logits(rng)
  share = rng.random((LABELED, NUM_CLASSES))  # λ
  label = np.arange(LABELED) % NUM_CLASSES
  method = create(weight=3.0)
  losses, state, metrics = method.loss(
    outputs(student),
    outputs(teacher),
    {'label': jnp.asarray(label), 'share': jnp.float32(share)},
    (),
    jnp.asarray(step),
  )
  between = lambda z: share * z['labeled_joint'] + (1 - share) * z['labeled']
  known, probs = softmax(between(teacher)), softmax(teacher['weak'])
  aligned = probs * known.mean(0) / probs.mean(0)
  aligned /= aligned.sum(-1, keepdims=True)
  bar = 0.9 * known.max(-1).mean()
  mask = aligned.max(-1) >= bar
  assert 0 < mask.sum() < UNLABELED
  assert (aligned.argmax(-1) != probs.argmax(-1)).any()
  rows = mask * cross_entropy(student['strong'], aligned)
  close(losses.unlabeled, 3 * mu * rows.mean())
  one_hot = np.eye(NUM_CLASSES)[label]
  close(losses.labeled, cross_entropy(between(student), one_hot).mean())
  assert state == ()
  close(metrics['threshold'], bar)
  np.testing.assert_array_equal(metrics['pseudo_labels'].weight, mask)
  np.testing.assert_array_equal(
    metrics['pseudo_labels'].label, aligned.argmax(-1)
  )


def test_unlabeled_weight_rises_along_a_cosine_up_to_half_of_training():
  steps = np.arange(0, STEPS + 1, 50)
  expected = 0.5 - np.cos(np.minimum(np.pi, 2 * np.pi * steps / STEPS)) / 2
  close(warm_up(jnp.asarray(steps), STEPS), expected)
  assert expected[5] == pytest.approx(0.5)
  assert (expected[10:] == 1).all()


def test_every_labeled_logit_has_a_share_of_its_own():
  batch = make_batch()
  views, targets, _ = create().prepare(None, None, batch, jax.random.key(0))
  assert set(views) == {'labeled', 'labeled_joint', 'weak', 'strong'}
  for name in ('labeled', 'labeled_joint'):
    np.testing.assert_array_equal(views[name], batch.labeled['weak'])
  share = np.asarray(targets['share'])
  assert share.shape == (len(batch.labeled['label']), NUM_CLASSES)
  assert len(np.unique(share)) == share.size
  assert 0 <= share.min() < 0.2 < 0.8 < share.max() < 1


@pytest.mark.parametrize('layout', forward.LAYOUTS)
def test_labeled_images_are_alone_and_with_all_unlabeled_views(layout):
  """In the network that a config trains."""
  made = []

  def make_forward(model, *args):
    made.append(args)
    return forward.make_forward(model, *args)

  config = digits.get_config('method=adamatch')
  config.batch_norm = layout
  program.create(
    config, DatasetInfo(10, 9, 9, (1,) * 10), (8, 8, 1), make_forward
  )
  (_, _, _, own), names = made[0], ['labeled', 'weak', 'strong']
  assert forward.populations([*names, 'labeled_joint'], layout, own) == [
    ['labeled'],
    ['labeled_joint', 'weak', 'strong'],
  ]
