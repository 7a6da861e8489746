"""Methods that keep a state, against a few lines of numpy."""

import math

from by_numpy import cross_entropy, softmax
from conftest import INFO, NUM_CLASSES, Setup, make_batch
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import cifar10, svhn
from flatmatch_jax import methods
from flatmatch_jax.methods.dash import DashState
from flatmatch_jax.methods.flexmatch import FlexMatchState, write
from flatmatch_jax.methods.freematch import FreeMatchState, fairness
from flatmatch_jax.methods.mpl import smooth
from flatmatch_jax.methods.remixmatch import rotate
from flatmatch_jax.methods.softmatch import SoftMatchState
from flatmatch_jax.step import train_step
from flatmatch_jax.types import Batch, DatasetInfo, Prediction

close = lambda a, b, rtol=1e-5: np.testing.assert_allclose(
  a, b, rtol=rtol, atol=1e-6
)


def random_logits(seed, rows=12, classes=NUM_CLASSES, scale=3.0):
  draw = np.random.default_rng(seed).normal(size=(rows, classes))
  return (scale * draw).astype(np.float32)


def outputs(**logits):
  return {k: Prediction(jnp.asarray(v), None, {}) for k, v in logits.items()}


def call(method, weak, state=None, step=1, seed=0, index=None, info=INFO):
  """The loss of fresh random students, and what it was computed from."""
  state = method.init(None, None, info) if state is None else state
  labeled, strong = random_logits(seed + 50, 6), random_logits(seed + 51)
  targets = {
    'label': jnp.arange(6) % NUM_CLASSES,
    'index': jnp.arange(12) if index is None else index,
  }
  results = method.loss(
    outputs(labeled=labeled, strong=strong),
    outputs(labeled=labeled, weak=weak),
    targets,
    state,
    jnp.asarray(step),
  )
  return *results, labeled, strong


def confident_logits(classes, confidence):
  """Logits whose largest probability is `confidence`, at these classes."""
  others = (1 - confidence) / (NUM_CLASSES - 1)
  rows = np.full((len(classes), NUM_CLASSES), others)
  rows[np.arange(len(classes)), classes] = confidence
  return np.log(rows).astype(np.float32)


# FlexMatch


def test_flexmatch_uses_everything_before_the_first_confident_guess():
  method = methods.create('flexmatch')
  weak = random_logits(0, scale=0.5)
  losses, state, metrics, _, strong = call(method, weak)
  assert metrics['threshold'] == 0
  close(metrics['pseudo_labels'].weight, np.ones(12))
  close(losses.unlabeled, cross_entropy(strong, weak.argmax(-1)).mean())
  assert (np.asarray(state.written().table) == -1).all()


def test_flexmatch_warms_up_by_the_images_without_a_class():
  """β_c = k/(N - k) after k writes to one class."""
  method = methods.create('flexmatch')
  for k in (7, 20):
    state = write(
      method.init(None, None, INFO),
      jnp.arange(k),
      jnp.full(k, 2),
      jnp.full(k, True),
    ).written()
    beta = k / (50 - k)
    bar = 0.95 * beta / (2 - beta)
    _, _, metrics, *_ = call(method, random_logits(0), state)
    close(metrics['threshold'], bar / NUM_CLASSES)
  for confidence, used in ((bar + 0.01, 1), (bar - 0.01, 0)):
    weak = confident_logits([2] * 6 + [1] * 6, confidence)
    _, _, metrics, *_ = call(method, weak, state)
    # Nothing is asked of the other class.
    close(metrics['pseudo_labels'].weight, [used] * 6 + [1] * 6)


def test_flexmatch_maps_the_status_convexly_after_the_warm_up():
  method = methods.create('flexmatch')
  state = FlexMatchState(
    table=jnp.full(50, -1), counts=jnp.asarray([30, 15, 3, 0, 2])
  )
  weak = random_logits(1, scale=1.0)
  losses, _, metrics, labeled, strong = call(method, weak, state)
  beta = np.array([30, 15, 3, 0]) / 30
  bars = 0.95 * beta / (2 - beta)
  probs = softmax(weak)
  mask = probs.max(-1) >= bars[probs.argmax(-1)]
  assert 0 < mask.sum() < 12
  close(metrics['pseudo_labels'].weight, mask)
  rows = cross_entropy(strong, probs.argmax(-1))
  close(losses.unlabeled, (rows * mask).mean())
  close(losses.labeled, cross_entropy(labeled, np.arange(6) % 4).mean())


def test_flexmatch_masks_before_it_writes():
  method = methods.create('flexmatch')
  weak = confident_logits([0] * 11 + [1], 0.99)
  _, state, first, *_ = call(method, weak)
  assert first['threshold'] == 0
  state = state.written()
  np.testing.assert_array_equal(state.counts, [11, 1, 0, 0, 38])
  _, _, second, *_ = call(method, weak, state)
  beta = np.array([11, 1, 0, 0]) / 38
  close(second['threshold'], (0.95 * beta / (2 - beta)).mean())


def test_flexmatch_writes_by_the_fixed_threshold_and_never_erases():
  method = methods.create('flexmatch')
  _, state, *_ = call(method, confident_logits([3] * 12, 0.96))
  state = state.written()
  np.testing.assert_array_equal(state.table[:13], [3] * 12 + [-1])
  # Used, since above the lowered threshold, but not confident.
  _, state, metrics, *_ = call(method, confident_logits([1] * 12, 0.94), state)
  assert (np.asarray(metrics['pseudo_labels'].weight) == 1).all()
  np.testing.assert_array_equal(state.written().table[:13], [3] * 12 + [-1])


def test_flexmatch_keeps_the_last_guess_of_an_image_drawn_twice():
  rng = np.random.default_rng(0)
  method = methods.create('flexmatch')
  info = DatasetInfo(NUM_CLASSES, 20, 15, (1,) * NUM_CLASSES)
  state = method.init(None, None, info)
  enter = jax.jit(lambda *args: write(*args).written())
  table = np.full(20, -1)
  for _ in range(12):
    index = rng.integers(0, 15, 16)  # Sixteen out of fifteen: some repeat.
    guess = rng.integers(0, NUM_CLASSES, 16)
    confident = rng.random(16) < 0.4
    state = enter(state, index, guess, confident)
    for i in np.flatnonzero(confident):
      table[index[i]] = guess[i]
    np.testing.assert_array_equal(state.table, table)
    # Images outside the pool are not waiting for a class.
    counts = [(table[:15] == c).sum() for c in (0, 1, 2, 3, -1)]
    np.testing.assert_array_equal(state.counts, counts)
  assert state.counts[-1] < 15


# SoftMatch


def test_softmatch_follows_its_recursion():
  method = methods.create('softmatch', decay=0.9)
  mean, variance, average = 1 / NUM_CLASSES, 1.0, None
  state = method.init(None, None, INFO)
  for step in range(3):
    weak = random_logits(step, scale=2.0) + np.array([1.5, 0, 0, 0], np.float32)
    losses, state, metrics, _, strong = call(method, weak, state, step, step)
    probs = softmax(weak)
    # The first batch is the average; then it is moved before it is used.
    average = (
      probs.mean(0) if step == 0 else 0.9 * average + 0.1 * probs.mean(0)
    )
    aligned = probs * (1 / NUM_CLASSES + 1e-6) / (average + 1e-6)
    top = (aligned / aligned.sum(-1, keepdims=True)).max(-1)
    mean = 0.9 * mean + 0.1 * top.mean()
    variance = 0.9 * variance + 0.1 * top.var(ddof=1)
    weights = np.exp(-2 * np.minimum(top - mean, 0) ** 2 / variance)
    close(state.probs, average)
    close(state.mean, mean)
    close(state.variance, variance)
    close(metrics['pseudo_labels'].weight, weights)
    rows = cross_entropy(strong, weak.argmax(-1))
    close(losses.unlabeled, (weights * rows).mean())


def test_softmatch_guesses_before_alignment():
  method = methods.create('softmatch', decay=1.0)
  # The model says class 0 all the time: alignment turns 0.4 into a minority.
  state = SoftMatchState(
    jnp.asarray([0.97, 0.01, 0.01, 0.01]), jnp.asarray(0.5), jnp.asarray(1.0)
  )
  probs = np.tile(np.array([0.4, 0.3, 0.2, 0.1], np.float32), (12, 1))
  _, _, metrics, *_ = call(method, np.log(probs), state)
  assert (np.asarray(metrics['pseudo_labels'].label) == 0).all()


def test_softmatch_survives_a_variance_of_nothing():
  method = methods.create('softmatch')
  uniform = jnp.full(NUM_CLASSES, 1 / NUM_CLASSES)
  # All are equally confident, and none below the mean: 0/0.
  state = SoftMatchState(uniform, jnp.asarray(0.1), jnp.asarray(0.0))
  losses, *_ = call(method, np.zeros((12, NUM_CLASSES), np.float32), state)
  assert np.isfinite(losses.unlabeled)


# Dash


def test_dash_threshold_falls_to_its_floor():
  method = methods.create('dash', warmup_steps=1, interval=3)
  state = DashState(jnp.asarray(math.log(10)))
  threshold = {}
  for k in range(19):
    for step in (1 + 3 * k, 3 + 3 * k):  # First and last step of interval k.
      _, state, metrics, *_ = call(method, random_logits(k), state, step)
      threshold[k] = metrics['threshold']
      expected = max(1.0001 * 1.27**-k * math.log(10), 0.05)
      close(threshold[k], expected)
  close(threshold[0], 2.3028, rtol=1e-4)
  close(threshold[16], 0.0503, rtol=1e-3)
  close(threshold[17], 0.05)


def test_dash_targets_are_soft_above_the_floor_and_hard_at_it():
  method = methods.create('dash', warmup_steps=1, interval=1)
  state = DashState(jnp.asarray(math.log(10)))
  weak = random_logits(5)
  guess = weak.argmax(-1)
  for k, target in ((9, softmax(weak / 0.5)), (17, np.eye(NUM_CLASSES)[guess])):
    losses, _, metrics, _, strong = call(method, weak, state, 1 + k)
    threshold = max(1.0001 * 1.27**-k * math.log(10), 0.05)
    mask = cross_entropy(weak, target) <= threshold
    assert 0 < mask.sum() < 12
    close(metrics['pseudo_labels'].weight, mask)
    close(metrics['pseudo_labels'].label, guess)
    close(losses.unlabeled, (mask * cross_entropy(strong, target)).mean())
  # Hard labels at the floor: FixMatch with a threshold of exp(-0.05).
  close(mask, softmax(weak).max(-1) >= math.exp(-0.05))


def test_dash_starts_from_the_first_labeled_loss_and_waits():
  method = methods.create('dash', warmup_steps=2, interval=1)
  losses, state, metrics, labeled, _ = call(method, random_logits(1), step=0)
  first = cross_entropy(labeled, np.arange(6) % NUM_CLASSES).mean()
  close(state.initial_loss, first)
  close(losses.labeled, first)
  for step in (1, 2):
    losses, state, metrics, *_ = call(
      method, random_logits(1), state, step, seed=step
    )
    close(state.initial_loss, first)
    used = np.asarray(metrics['pseudo_labels'].weight).sum()
    assert (used > 0) == (losses.unlabeled > 0) == (step == 2)


# FreeMatch


def freematch_numpy(state, weak, decay):
  probs = softmax(weak)
  guess = probs.argmax(-1)
  frequency = np.bincount(guess, minlength=NUM_CLASSES) / len(guess)
  new = (probs.max(-1).mean(), probs.mean(0), frequency)
  state = [decay * a + (1 - decay) * b for a, b in zip(state, new, strict=True)]
  return state, state[0] * state[1] / state[1].max()


def fairness_numpy(logits, mask, state):
  """Minus cross-entropy of the two normalized ratios, over the selected."""
  probs = softmax(np.float64(logits))[mask]
  guess = probs.argmax(-1)
  histogram = np.bincount(guess, minlength=NUM_CLASSES) / len(guess)
  inverse = lambda h: np.array([1 / x if x > 0 else 0.0 for x in h])
  expected = state[1] * inverse(state[2])
  present = probs.mean(0) * inverse(histogram)
  expected, present = expected / expected.sum(), present / present.sum()
  return (expected * np.log(present + 1e-12)).sum()


def test_freematch_follows_its_equations():
  method = methods.create('freematch', decay=0.9)
  state = method.init(None, None, INFO)
  expected = [1 / NUM_CLASSES, np.full(4, 0.25), np.full(4, 0.25)]
  for step in range(3):
    weak = random_logits(20 + step, scale=1.0)
    losses, state, metrics, _, strong = call(method, weak, state, step, step)
    expected, thresholds = freematch_numpy(expected, weak, 0.9)
    for a, b in zip(state, expected, strict=True):
      close(a, b)
    guess = weak.argmax(-1)
    mask = softmax(weak).max(-1) >= thresholds[guess]
    close(metrics['pseudo_labels'].weight, mask)
    unlabeled = (mask * cross_entropy(strong, guess)).mean()
    unlabeled += 0.05 * fairness_numpy(strong, mask, expected)
    close(losses.unlabeled, unlabeled)


def test_freematch_fairness_leaves_absent_classes_out():
  state = FreeMatchState(
    jnp.asarray(0.5),
    jnp.asarray([0.4, 0.3, 0.2, 0.1]),
    jnp.asarray([0.6, 0.4, 0.0, 0.0]),
  )
  # Nothing is predicted to be class 3, and of the selected nothing class 2.
  logits = confident_logits([0, 1, 1, 0, 2, 2], 0.7)
  logits += random_logits(1, 6, scale=0.1)
  mask = np.array([1, 1, 1, 0, 0, 0], bool)
  value, gradient = jax.value_and_grad(fairness)(
    logits, jnp.float32(mask), state
  )
  numpy_state = [np.asarray(x) for x in state]
  close(value, fairness_numpy(logits, mask, numpy_state))
  assert value <= 0
  assert np.isfinite(gradient).all()
  assert (np.asarray(gradient)[~mask] == 0).all()
  assert np.abs(np.asarray(gradient)[mask]).max() > 1e-4


def test_freematch_fairness_of_nothing_is_zero_with_a_finite_gradient():
  state = methods.create('freematch').init(None, None, INFO)
  value, gradient = jax.value_and_grad(fairness)(
    random_logits(0), jnp.zeros(12), state
  )
  assert value == 0
  close(gradient, np.zeros((12, NUM_CLASSES)))


def test_freematch_thresholds_stay_within_bounds():
  method = methods.create('freematch', min_threshold=0.9, max_threshold=0.95)
  low = method.init(None, None, INFO)
  high = FreeMatchState(jnp.asarray(0.999), low.probs, low.histogram)
  classes = np.arange(12) % NUM_CLASSES
  for state, confidence, used in (
    (low, 0.89, 0),
    (low, 0.91, 1),
    (high, 0.94, 0),
    (high, 0.96, 1),
  ):
    weak = confident_logits(classes, confidence)
    _, _, metrics, *_ = call(method, weak, state)
    close(metrics['pseudo_labels'].weight, np.full(12, used))


def test_freematch_warms_up_on_labels_alone():
  method = methods.create('freematch', warmup_steps=3)
  weak = random_logits(9)
  start = method.init(None, None, INFO)
  for step in (0, 2, 3):
    losses, state, *_ = call(method, weak, start, step)
    changed = [bool(np.any(a != b)) for a, b in zip(state, start, strict=True)]
    assert changed == [step == 3] * 3
    assert (losses.unlabeled != 0) == (step == 3)
    assert losses.labeled > 0


# MPL, on networks that are one matrix


RATE = 0.5


def linear(params, batch_stats, views, rng=None):
  del rng
  rows = lambda images: images.reshape(len(images), -1) @ params['kernel']
  return outputs(**{k: rows(v) for k, v in views.items()}), batch_stats


def linear_mpl(**kwargs):
  def init_network(rng):
    return {'params': {'kernel': jax.random.normal(rng, (6, NUM_CLASSES))}}

  tx = optax.sgd(RATE)
  context = {'forward': linear, 'tx': tx, 'init_network': init_network}
  method = methods.create('mpl', context, **kwargs)
  rng = jax.random.key(3)
  state = train_step.create_train_state(
    rng, init_network(rng), tx, method, INFO
  )
  return method, state, train_step.make_train_step(linear, method, tx)


def linear_batch(seed=0):
  rng = np.random.default_rng(seed)
  image = lambda n: jnp.asarray(rng.normal(size=(n, 1, 2, 3)), jnp.float32)
  integer = lambda n: jnp.asarray(rng.integers(0, NUM_CLASSES, n))
  return Batch(
    {'weak': image(5), 'label': integer(5)},
    {k: image(7) for k in ('weak', 'strong')}
    | {'index': jnp.arange(7), 'truth': integer(7)},
  )


def flat(images):
  return np.asarray(images).reshape(len(images), -1)


def test_mpl_student_learns_the_teachers_labels_of_strong_views():
  _, state, step = linear_mpl(threshold=0.7)
  batch = linear_batch()
  after, metrics = jax.jit(step)(state, batch)
  strong = flat(batch.unlabeled['strong'])
  teacher = strong @ np.asarray(state.method.params['kernel'])
  student = strong @ np.asarray(state.params['kernel'])
  mask = softmax(teacher).max(-1) >= 0.7
  assert 0 < mask.sum() < 7
  close(metrics['used_fraction'], mask.mean())
  target = softmax(teacher / 0.7)
  close(
    metrics['unlabeled_loss'], (mask * cross_entropy(student, target)).mean()
  )
  # No labeled term: the gradient of the soft cross-entropy is p - q.
  error = mask[:, None] * (softmax(student) - target)
  expected = state.params['kernel'] - RATE * strong.T @ error / 7
  close(after.params['kernel'], expected, rtol=1e-4)


@pytest.mark.parametrize('at', [0, 9_999])
def test_mpl_teacher_step_is_its_three_gradients(at):
  _, state, step = linear_mpl()
  state = state.replace(
    step=jnp.asarray(at), method=state.method._replace(mean_feedback=0.03)
  )
  batch = linear_batch()
  after, _ = jax.jit(step)(state, batch)
  x, w, s = (
    flat(batch.labeled['weak']),
    flat(batch.unlabeled['weak']),
    flat(batch.unlabeled['strong']),
  )
  label = np.asarray(batch.labeled['label'])
  kernel = np.asarray(state.method.params['kernel'])
  improvement = (
    cross_entropy(x @ np.asarray(state.params['kernel']), label).mean()
    - cross_entropy(x @ np.asarray(after.params['kernel']), label).mean()
  )
  mean = 0.99 * 0.03 + 0.01 * improvement
  close(after.method.mean_feedback, mean, rtol=1e-4)
  # Each gradient of a mean cross-entropy is xᵀ(p - q)/n.
  smoothed = np.full((5, NUM_CLASSES), 0.1 / 3)
  smoothed[np.arange(5), label] = 0.9
  gradient = x.T @ (softmax(x @ kernel) - smoothed) / 5
  mask = softmax(w @ kernel).max(-1) >= 0.6
  assert 0 < mask.sum() < 7
  uda = mask[:, None] * (softmax(s @ kernel) - softmax(w @ kernel / 0.7))
  gradient += 8 * min(1, (at + 1) / 5000) * s.T @ uda / 7
  hard = np.eye(NUM_CLASSES)[(s @ kernel).argmax(-1)]
  meta = s.T @ (softmax(s @ kernel) - hard) / 7
  assert np.abs((improvement - mean) * meta).max() > 1e-3
  gradient += (improvement - mean) * meta
  close(after.method.params['kernel'], kernel - RATE * gradient, rtol=1e-4)


@pytest.mark.parametrize('helpful', [True, False])
def test_mpl_feedback_rewards_labels_that_help(helpful):
  """The unlabeled image is the labeled one; only its label is in question."""
  method, state, step = linear_mpl(threshold=0.0)
  # The student knows nothing yet.
  state = state.replace(params=jax.tree.map(jnp.zeros_like, state.params))
  image = linear_batch().labeled['weak'][:1]
  teacher = flat(image) @ np.asarray(state.method.params['kernel'])
  guess = int(teacher.argmax())
  label = guess if helpful else int(teacher.argmin())
  batch = Batch(
    {'weak': image, 'label': jnp.asarray([label])},
    {'weak': image, 'strong': image}
    | {'index': jnp.arange(1), 'truth': jnp.asarray([label])},
  )
  after, _ = step(state, batch)
  _, targets, kept = method.prepare(None, state, batch, None)
  taught = method.feedback(
    state, after.replace(method=state.method), batch, targets, kept
  )
  untaught = method.feedback(state, state, batch, targets, kept)
  assert (taught.mean_feedback > 0) == helpful
  difference = flat(image) @ np.asarray(
    taught.params['kernel'] - untaught.params['kernel']
  )
  assert (difference[0, guess] > 1e-4) == helpful
  assert (difference[0, guess] < -1e-4) != helpful


def test_mpl_teacher_is_another_network_than_the_student():
  state = Setup('mpl').init()
  kernel = lambda params: np.asarray(params['classifier']['kernel'])
  assert np.abs(kernel(state.params) - kernel(state.method.params)).min() > 0


def test_mpl_smooths_over_the_other_classes():
  close(smooth(jnp.asarray([1]), 5, 0.1), [[0.025, 0.9] + [0.025] * 3])


def test_mpl_perturbs_by_parts_of_the_batch(batch):
  """What the teacher keeps for its own step is no batch, and is not cut."""
  setup = Setup('mpl', 'flatmatch', groups=2)
  state = jax.eval_shape(setup.init)
  after, _ = jax.eval_shape(setup.step, state, batch)
  assert jax.tree.structure(after) == jax.tree.structure(state)


# ReMixMatch


def remixmatch_numpy(probs, average):
  """Aligned, then sharpened with temperature 0.5."""
  aligned = probs * (0.25 + 1e-6) / (average + 1e-6)
  aligned /= aligned.sum(-1, keepdims=True)
  return aligned**2 / (aligned**2).sum(-1, keepdims=True)


def prepare_remixmatch(method, weak, step, batch=None):
  batch = make_batch(views=method.views) if batch is None else batch
  state = Setup('supervised').init()
  state = state.replace(
    step=jnp.asarray(step), method=method.init(None, None, INFO)
  )
  predict = lambda images: Prediction(jnp.asarray(weak), None, {})
  return method.prepare(predict, state, batch, jax.random.key(7)), batch


@pytest.mark.parametrize('step', [0, 5])
def test_remixmatch_aligns_with_the_updated_average(step):
  method = methods.create('remixmatch', {'steps': 640}, decay=0.9)
  weak = random_logits(2, 16, scale=1.5)
  (_, targets, _), _ = prepare_remixmatch(method, weak, step)
  probs = softmax(weak)
  mean = probs.mean(0)
  average = mean if step == 0 else 0.9 * 0.25 + 0.1 * mean
  close(targets['guess'], remixmatch_numpy(probs, average), rtol=1e-4)
  student = {
    k: Prediction(jnp.zeros((len(targets[k]), 4)), None, {})
    for k in ('labeled', 'strong', 'strong2', 'weak')
  }
  student['strong_plain'] = Prediction(jnp.zeros((16, 4)), None, {})
  student['strong_rotated'] = Prediction(
    None, None, {'rotation': jnp.zeros((16, 4))}
  )
  start = method.init(None, None, INFO)
  _, state, _ = method.loss(student, None, targets, start, jnp.asarray(step))
  close(state.probs, average)


def test_remixmatch_mixes_images_and_labels_alike():
  method = methods.create('remixmatch', {'steps': 640})
  weak = random_logits(2, 16)
  guess = remixmatch_numpy(softmax(weak), softmax(weak).mean(0))
  guess = jnp.asarray(guess, jnp.float32)
  batch = make_batch(views=method.views)
  # Every image shows its own label.
  one_hot = jax.nn.one_hot(batch.labeled['label'], NUM_CLASSES)
  shown = lambda labels: jnp.asarray(labels)[:, None, None, :]
  batch = batch._replace(
    labeled=batch.labeled | {'weak': shown(one_hot)},
    unlabeled=batch.unlabeled | {name: shown(guess) for name in method.views},
  )
  (views, targets, _), _ = prepare_remixmatch(method, weak, 0, batch)
  moved = 0
  for name, own in (
    ('labeled', one_hot),
    ('strong', guess),
    ('strong2', guess),
    ('weak', guess),
  ):
    close(views[name][:, 0, 0], targets[name], rtol=1e-4)
    moved += np.abs(targets[name] - own).sum()
    # The larger share is a row's own.
    assert (np.abs(targets[name] - own).sum(-1) <= 1 + 1e-5).all()
  assert moved > 1
  close(views['strong_plain'][:, 0, 0], guess)


def test_remixmatch_turns_the_first_strong_view():
  method = methods.create('remixmatch', {'steps': 640})
  (views, targets, _), batch = prepare_remixmatch(
    method, random_logits(2, 16), step=0
  )
  strong = np.asarray(batch.unlabeled['strong'])
  np.testing.assert_array_equal(views['strong_plain'], strong)
  turns = np.asarray(targets['turns'])
  assert set(turns) == {0, 1, 2, 3}
  for image, turn, turned in zip(
    strong, turns, views['strong_rotated'], strict=True
  ):
    np.testing.assert_array_equal(turned, np.rot90(image, turn))
  corner = jnp.zeros((1, 2, 2, 1)).at[0, 0, 1].set(1)  # Above, right.
  left = rotate(corner, jnp.asarray([1]))
  assert left[0, 0, 0, 0] == 1  # Counter-clockwise: above, left.


@pytest.mark.parametrize(('step', 'ramp'), [(0, 0.0), (5, 0.5), (10, 1.0)])
def test_remixmatch_loss_weighs_and_ramps_its_terms(step, ramp):
  method = methods.create('remixmatch', {'steps': 640})
  names = ('strong', 'strong2', 'weak')
  logits = {k: random_logits(i, 5) for i, k in enumerate(names)}
  logits |= {
    'labeled': random_logits(7, 3),
    'strong_plain': random_logits(8, 5),
  }
  targets = {
    k: softmax(random_logits(20 + i, len(v)))
    for i, (k, v) in enumerate(logits.items())
  }
  targets['guess'] = targets.pop('strong_plain')
  targets |= {'turns': np.array([0, 1, 2, 3, 3]), 'probs': targets['guess']}
  rotation = random_logits(9, 5)
  student = outputs(**logits)
  student['strong_rotated'] = Prediction(None, None, {'rotation': rotation})
  losses, _, _ = method.loss(
    student,
    None,
    jax.tree.map(jnp.asarray, targets),
    method.init(None, None, INFO),
    jnp.asarray(step),
  )
  mean = lambda name, target: cross_entropy(logits[name], target).mean()
  mixed = np.mean([mean(k, targets[k]) for k in names])
  plain = mean('strong_plain', targets['guess'])
  close(losses.labeled, mean('labeled', targets['labeled']))
  close(
    losses.unlabeled,
    ramp * (1.5 * mixed + 0.5 * plain)
    + 0.5 * cross_entropy(rotation, targets['turns']).mean(),
  )


# The numbers that go with a dataset


def test_svhn_holds_the_thresholds_of_freematch_alone():
  for method in ('freematch', 'flatmatch', 'flatmatch_e'):
    args = svhn.get_config(f'method={method}').method_args
    assert (args.min_threshold, args.max_threshold) == (0.9, 0.95)
    assert args.warmup_steps == 2049
  assert svhn.get_config('method=dash').method_args.warmup_steps == 2048
  args = cifar10.get_config('method=freematch').method_args
  assert (args.min_threshold, args.max_threshold) == (0.0, 1.0)
