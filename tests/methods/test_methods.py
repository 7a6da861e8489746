"""The methods that ask for consistency, against their papers in numpy."""

from conftest import NUM_CLASSES, Setup, make_batch
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flatmatch_jax import methods
from flatmatch_jax.methods import losses
from flatmatch_jax.methods.vat import curvature, unit
from flatmatch_jax.types import Prediction, UserError

STEPS = 100
B, U = 5, 12
LABELS = np.arange(B) % NUM_CLASSES


def random_outputs(seed, *views, scale=3.0):
  """Outputs with random logits: B rows of 'labeled', U of the others."""
  rng = np.random.default_rng(seed)
  outputs = {}
  for name in ('labeled', *views):
    rows = B if name == 'labeled' else U
    logits = scale * rng.normal(size=(rows, NUM_CLASSES))
    outputs[name] = Prediction(jnp.float32(logits), jnp.zeros((rows, 1)), {})
  return outputs


def random_probs(seed, rows=U):
  return softmax(np.random.default_rng(seed).normal(size=(rows, NUM_CLASSES)))


def softmax(logits):
  powers = np.exp(np.asarray(logits, np.float64))
  return powers / powers.sum(-1, keepdims=True)


def log_probs(outputs, view):
  return np.log(softmax(outputs[view].logits))


def supervised_rows(outputs):
  return -log_probs(outputs, 'labeled')[np.arange(B), LABELS]


def call(name, student, teacher, step, targets=None, **arguments):
  """The method's losses and metrics at `step` of 100."""
  method = methods.create(name, {'steps': STEPS}, **arguments)
  targets = {'label': jnp.asarray(LABELS)} | (targets or {})
  value, state, metrics = jax.jit(method.loss)(
    student, teacher, targets, (), jnp.asarray(step)
  )
  assert state == ()
  return value, metrics


def assert_losses(value, labeled, unlabeled):
  np.testing.assert_allclose(value.labeled, labeled, rtol=1e-5)
  np.testing.assert_allclose(value.unlabeled, unlabeled, rtol=1e-5)


def assert_all_used(metrics, guess):
  np.testing.assert_array_equal(metrics['pseudo_labels'].label, guess)
  np.testing.assert_array_equal(metrics['pseudo_labels'].weight, np.ones(U))


@pytest.mark.parametrize(
  ('step', 'expected'), [(0, 0.0), (10, 0.25), (40, 1.0), (99, 1.0)]
)
def test_ramp_rises_over_four_tenths_of_training(step, expected):
  value = losses.ramp(jnp.asarray(step), steps=100, fraction=0.4)
  np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_no_ramp_is_no_division_by_zero():
  assert losses.ramp(jnp.asarray(0), steps=100, fraction=0.0) == 0
  assert losses.ramp(jnp.asarray(1), steps=100, fraction=0.0) == 1


def test_sharpen_raises_to_the_inverse_temperature():
  probs = random_probs(0)
  expected = probs**2 / (probs**2).sum(-1, keepdims=True)
  np.testing.assert_allclose(losses.sharpen(probs, 0.5), expected, rtol=1e-6)
  # 0.25^1000 is no float32.
  sharp = losses.sharpen(jnp.full((1, 4), 0.25), 1e-3)
  np.testing.assert_allclose(sharp, np.full((1, 4), 0.25))


def test_divergence_and_entropy_take_zero_probabilities():
  logits = jnp.asarray([[1e4, -1e4, 0.0]])
  one_hot = jnp.asarray([[0.0, 1.0, 0.0]])
  for loss in (lambda z: losses.kl(one_hot, z), losses.entropy):
    value, gradient = jax.value_and_grad(loss)(logits)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
  np.testing.assert_allclose(losses.kl(one_hot, logits), 2e4)
  np.testing.assert_allclose(losses.entropy(jnp.zeros((2, 8))), np.log(8), 1e-6)


def test_pi_model_is_a_mean_over_examples_and_classes():
  student = random_outputs(1, 'weak', 'weak2')
  teacher = random_outputs(2, 'weak', 'weak2')
  value, metrics = call('pi_model', student, teacher, step=20)
  p, q = softmax(student['weak2'].logits), softmax(teacher['weak'].logits)
  squares = np.sum((p - q) ** 2) / (U * NUM_CLASSES)
  assert_losses(value, supervised_rows(student).mean(), 10 * 0.5 * squares)
  assert_all_used(metrics, q.argmax(-1))
  value, _ = call('pi_model', student, teacher, step=0)
  assert value.unlabeled == 0


def test_pseudo_label_keeps_the_confident():
  student = random_outputs(1, 'weak')
  teacher = random_outputs(2, 'weak')
  value, metrics = call('pseudo_label', student, teacher, step=30)
  q = softmax(teacher['weak'].logits)
  mask = q.max(-1) >= 0.95
  assert 0 < mask.sum() < U
  rows = -log_probs(student, 'weak')[np.arange(U), q.argmax(-1)]
  unlabeled = 0.75 * np.sum(mask * rows) / U
  assert_losses(value, supervised_rows(student).mean(), unlabeled)
  np.testing.assert_array_equal(metrics['pseudo_labels'].weight, mask)
  np.testing.assert_array_equal(metrics['pseudo_labels'].label, q.argmax(-1))
  value, _ = call('pseudo_label', student, teacher, step=0)
  assert value.unlabeled == 0


def test_pseudo_label_takes_a_confidence_at_the_threshold():
  teacher = random_outputs(2, 'weak', scale=0.0)  # 1/4 exactly.
  _, metrics = call('pseudo_label', teacher, teacher, 1, threshold=0.25)
  assert metrics['pseudo_labels'].weight.all()


def test_mean_teacher_compares_the_student_with_its_targets():
  student = random_outputs(1, 'weak2')
  q = random_probs(3)
  targets = {'probs': jnp.float32(q)}
  value, metrics = call('mean_teacher', student, student, 20, targets)
  squares = np.sum((softmax(student['weak2'].logits) - q) ** 2)
  unlabeled = 50 * 0.5 * squares / (U * NUM_CLASSES)
  assert_losses(value, supervised_rows(student).mean(), unlabeled)
  assert_all_used(metrics, q.argmax(-1))
  value, _ = call('mean_teacher', student, student, 0, targets)
  assert value.unlabeled == 0


def prepared(setup, state, batch):
  """The method's views and targets, as the step has them."""

  def predict(images, params=state.params):
    outputs, _ = setup.forward(params, state.batch_stats, {'images': images})
    return outputs['images']

  return setup.method.prepare(predict, state, batch, jax.random.key(7))


def test_mean_teacher_has_the_averaged_weights_and_the_statistics_of_a_batch():
  setup = Setup('mean_teacher')
  batch = make_batch(views=('weak', 'weak2'))
  state = jax.jit(setup.init)()
  average = jax.tree.map(lambda x: x + 0.1, state.params)
  state = state.replace(ema_params=average)
  views, targets, _ = prepared(setup, state, batch)
  assert set(views) == {'labeled', 'weak2'}
  np.testing.assert_array_equal(views['weak2'], batch.unlabeled['weak2'])
  variables = {'params': average, 'batch_stats': state.batch_stats}
  teacher, _ = setup.model.apply(
    variables, batch.unlabeled['weak'], train=True, mutable=['batch_stats']
  )
  np.testing.assert_allclose(
    targets['probs'], softmax(teacher.logits), rtol=1e-5
  )


def test_mean_teacher_teaches_the_student():
  """In USB the student's logits were the teacher's: no loss, no gradient."""
  student = random_outputs(1, 'weak2')
  targets = {'probs': jnp.float32(random_probs(3))}

  def loss(student):
    return call('mean_teacher', student, student, 50, targets)[0].unlabeled

  assert jnp.abs(jax.grad(loss)(student)['weak2'].logits).max() > 1e-3


def small_network(seed, pixels=12, hidden=9):
  """Logits of images as a function; its rows are coupled, as by BatchNorm."""
  rng = np.random.default_rng(seed)
  first = rng.normal(size=(pixels, hidden))
  second = rng.normal(size=(hidden, NUM_CLASSES))

  def logits(images):
    x = images.reshape(len(images), -1) @ first
    return jnp.tanh(x - 0.5 * x.mean(0)) @ second

  return logits, rng.normal(size=(U, 2, 2, 3)), rng.normal(size=(U, 2, 2, 3))


def divergence(logits, images):
  q = jax.lax.stop_gradient(jax.nn.softmax(logits(images)))
  return lambda d: U * losses.kl(q, logits(images + d))


def test_vat_direction_is_that_of_finite_differences():
  with jax.enable_x64(True):
    logits, images, noise = small_network(0)
    noise = unit(noise)
    product = curvature(logits, images, noise)
    gradient = jax.grad(divergence(logits, images))
    difference = (gradient(1e-4 * noise) - gradient(-1e-4 * noise)) / 2e-4
    np.testing.assert_allclose(product, difference, rtol=1e-5, atol=1e-7)
    # The same without the algebra: forward over reverse.
    exact = jax.jvp(gradient, (jnp.zeros_like(noise),), (noise,))[1]
    np.testing.assert_allclose(product, exact, rtol=1e-9, atol=1e-12)


def test_vat_view_is_radius_away_and_worse_than_noise():
  setup = Setup('vat')
  state, batch = jax.jit(setup.init)(), make_batch(views=('weak',))
  views, targets, _ = prepared(setup, state, batch)
  weak = batch.unlabeled['weak']
  np.testing.assert_array_equal(views['weak'], weak)
  assert set(views) == {'labeled', 'weak', 'strong'}
  np.testing.assert_array_equal(targets['label'], batch.labeled['label'])
  change = views['strong'] - weak
  norms = jnp.sqrt((change**2).sum((1, 2, 3)))
  np.testing.assert_allclose(norms, np.full(len(weak), 6.0), rtol=1e-5)

  def moved(change):
    forward = lambda x: (
      setup.forward(state.params, state.batch_stats, {'weak': x})[0][
        'weak'
      ].logits
    )
    return losses.kl(jax.nn.softmax(forward(weak)), forward(weak + change))

  noise = 6.0 * unit(jax.random.normal(jax.random.key(1), weak.shape))
  # Small steps: the direction is the best one only near the image.
  assert moved(0.01 * change) > 2 * moved(0.01 * noise)


def test_vat_unit_of_nothing_is_nothing_and_of_little_is_one():
  directions = jnp.stack([jnp.zeros((2, 2, 1)), jnp.full((2, 2, 1), 1e-30)])
  result = unit(directions)
  np.testing.assert_array_equal(result[0], jnp.zeros((2, 2, 1)))
  np.testing.assert_allclose(result[1], jnp.full((2, 2, 1), 0.5), rtol=1e-6)


def test_vat_ramps_the_divergence_but_not_the_entropy():
  student = random_outputs(1, 'weak', 'strong')
  teacher = random_outputs(2, 'weak', 'strong')
  q = softmax(teacher['weak'].logits)
  p = softmax(student['weak'].logits)
  kl = np.sum(q * (np.log(q) - log_probs(student, 'strong'))) / U
  entropy = -np.sum(p * np.log(p)) / U
  for step, ramp in ((0, 0.0), (20, 0.5), (80, 1.0)):
    value, metrics = call('vat', student, teacher, step)
    unlabeled = 0.3 * ramp * kl + 0.06 * entropy
    assert_losses(value, supervised_rows(student).mean(), unlabeled)
  assert_all_used(metrics, q.argmax(-1))


def test_mixmatch_mixes_labels_as_it_mixes_images():
  """Image i is the i-th unit vector: the mixed images are the mixing matrix."""
  n = B + 2 * U
  rows = np.eye(n, 64, dtype=np.float32).reshape(n, 8, 8, 1)
  batch = make_batch(labeled=B, unlabeled=U, views=())
  batch.labeled['weak'] = rows[:B]
  batch.unlabeled['weak'] = rows[B : B + U]
  batch.unlabeled['weak2'] = rows[B + U :]
  kernel = np.random.default_rng(0).normal(size=(64, NUM_CLASSES))

  def predict(images):
    logits = jnp.float32(images.reshape(len(images), -1) @ kernel)
    return Prediction(logits, logits, {})

  p = softmax(kernel[B : B + U]) / 2 + softmax(kernel[B + U : n]) / 2
  q = p**2 / np.sum(p**2, -1, keepdims=True)
  one_hot = np.eye(NUM_CLASSES)[batch.labeled['label']]
  labels = np.concatenate([one_hot, q, q])
  method = methods.create('mixmatch', {'steps': STEPS})
  shares = []
  for seed in range(8):
    key = jax.random.key(seed)
    views, targets, _ = method.prepare(predict, None, batch, key)
    assert list(views) == ['labeled', 'weak', 'weak2']
    mixing = np.concatenate([v.reshape(-1, 64)[:, :n] for v in views.values()])
    mixed = np.concatenate([targets[name] for name in views])
    np.testing.assert_allclose(mixed, mixing @ labels, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(targets['guess'], q.argmax(-1))
    # One share for all rows, and one permutation of all rows.
    other = mixing - np.diag(np.diag(mixing))
    moves = np.flatnonzero(other.sum(1) > 1e-6)
    share = np.diag(mixing)[moves]
    np.testing.assert_allclose(share, np.full(len(moves), share[0]), rtol=1e-5)
    np.testing.assert_allclose(mixing.sum(0), np.ones(n), rtol=1e-5)
    np.testing.assert_allclose(mixing.sum(1), np.ones(n), rtol=1e-5)
    assert len(moves) > n / 2
    # Rows go from any part to any other.
    assert np.abs(other[:B, B:]).sum() > 0
    shares.append(share[0])
  assert min(shares) >= 0.5
  assert len(np.unique(shares)) == 8


def test_mixing_share_is_of_the_beta_distribution():
  """Alpha may be traced. Beta(1/2, 1/2) is the arcsine: cdf(3/4) = 2/3."""
  images, labels = jnp.eye(2), jnp.eye(2)

  @jax.jit
  def shares(alpha):
    mix = lambda key: losses.mixup(key, images, labels, alpha)[0].max()
    return jax.vmap(mix)(jax.random.split(jax.random.key(0), 4000))

  half, large = np.asarray(shares(0.5)), np.asarray(shares(50.0))
  moved = half < 1  # Half of the permutations of two rows move nothing.
  assert 0.45 < moved.mean() < 0.55
  assert half.min() >= 0.5
  # max(λ, 1 - λ) >= 3/4 has twice the mass of λ >= 3/4.
  assert 0.62 < np.mean(half[moved] >= 0.75) < 0.71
  assert large[large < 1].mean() < 0.56


def test_mixmatch_is_cross_entropy_on_labeled_and_squares_on_the_rest():
  student = random_outputs(1, 'weak', 'weak2')
  targets = {
    name: random_probs(i, len(student[name].logits))
    for i, name in enumerate(student)
  }
  guess = np.arange(U) % NUM_CLASSES
  value, metrics = call(
    'mixmatch',
    student,
    student,
    step=10,
    targets={k: jnp.float32(v) for k, v in targets.items()} | {'guess': guess},
  )
  labeled = -np.sum(targets['labeled'] * log_probs(student, 'labeled')) / B
  squares = sum(
    np.sum((softmax(student[name].logits) - targets[name]) ** 2)
    for name in ('weak', 'weak2')
  )
  unlabeled = 100 * 0.25 * squares / (2 * U * NUM_CLASSES)
  assert_losses(value, labeled, unlabeled)
  assert_all_used(metrics, guess)


def test_uda_sharpens_targets_and_masks_by_unsharpened_confidence():
  student = random_outputs(1, 'weak', 'strong')
  teacher = random_outputs(2, 'weak', 'strong', scale=1.5)
  value, metrics = call('uda', student, teacher, step=0, weight=2.0)
  logits = np.asarray(teacher['weak'].logits)
  mask = softmax(logits).max(-1) >= 0.8
  sharp = softmax(logits / 0.4)
  assert mask.any()
  assert (sharp.max(-1) >= 0.8).sum() > mask.sum()  # It matters which.
  rows = -np.sum(sharp * log_probs(student, 'strong'), -1)
  unlabeled = 2 * np.sum(mask * rows) / U
  assert_losses(value, supervised_rows(student).mean(), unlabeled)
  np.testing.assert_array_equal(metrics['pseudo_labels'].weight, mask)
  np.testing.assert_array_equal(
    metrics['pseudo_labels'].label, logits.argmax(-1)
  )


SCHEDULES = {
  'linear': lambda t: t,
  'exp': lambda t: np.exp(5 * (t - 1)),
  'log': lambda t: 1 - np.exp(-5 * t),
}


@pytest.mark.parametrize('tsa', SCHEDULES)
def test_uda_counts_images_whose_label_is_not_too_likely(tsa):
  student = random_outputs(1, 'weak', 'strong')
  teacher = random_outputs(4, 'weak', 'strong')
  right = softmax(teacher['labeled'].logits)[np.arange(B), LABELS]
  seen = []
  for step in (0, 5, 20, 25, 30, 40, 50, 80, 95, 100):
    limit = SCHEDULES[tsa](step / STEPS) * (1 - 1 / 4) + 1 / 4
    counts = right <= limit
    value, _ = call('uda', student, teacher, step, tsa=tsa)
    total = np.sum(counts * supervised_rows(student))
    labeled = total / max(counts.sum(), 1)
    np.testing.assert_allclose(value.labeled, labeled, rtol=1e-5)
    seen.append(counts.sum())
  assert len(set(seen)) > 2
  assert seen == sorted(seen)


def test_uda_without_schedule_keeps_even_the_certain():
  outputs = {
    name: Prediction(1e4 * jnp.eye(NUM_CLASSES), jnp.zeros((4, 1)), {})
    for name in ('labeled', 'weak', 'strong')
  }
  method = methods.create('uda', {'steps': STEPS})
  wrong = {'label': jnp.asarray([1, 2, 3, 0])}
  value, _, _ = method.loss(outputs, outputs, wrong, (), jnp.asarray(0))
  np.testing.assert_allclose(value.labeled, 1e4)


def test_uda_refuses_an_unknown_schedule():
  with pytest.raises(UserError, match='none, linear, exp, log'):
    methods.create('uda', {'steps': STEPS}, tsa='cosine')
