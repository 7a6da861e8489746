"""What every method must keep, whatever it does, under every recipe."""

import functools
from typing import NamedTuple

from conftest import INFO, NUM_CLASSES, Setup, make_batch
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import assert_equal

from flatmatch_jax.data import sources
from flatmatch_jax.data.pipeline import parted
from flatmatch_jax.methods import METHODS
from flatmatch_jax.methods.losses import cross_entropy
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.step import recipes, train_step
from flatmatch_jax.step.forward import LAYOUTS
from flatmatch_jax.step.recipes import RECIPES
from flatmatch_jax.types import Batch, Head, Prediction

HIDDEN = 16
LATE = 10_000  # A step past every ramp and warm-up.


@pytest.fixture(scope='module', params=sorted(METHODS))
def name(request):
  """Of a method. Module scope: pytest runs all tests of one together."""
  return request.param


class Perceptron(NamedTuple):
  """The least network with BatchNorm and heads: cheap to trace and compile."""

  heads: tuple[Head, ...] = ()

  def init(self, rng, images, train):
    del train
    sizes = {'hidden': (images[0].size, HIDDEN)}
    for head in (Head('classifier'), *self.heads):
      if head.hidden:
        sizes[f'{head.name}_hidden'] = (HIDDEN, HIDDEN)
      sizes[head.name] = (HIDDEN, head.size or NUM_CLASSES)
    params = {}
    for number, (name, shape) in enumerate(sizes.items()):
      kernel = jax.random.normal(jax.random.fold_in(rng, number), shape)
      params[name] = {
        'kernel': kernel / jnp.sqrt(shape[0]),
        'bias': jnp.zeros(shape[1]),
      }
    return {'params': params, 'batch_stats': {'mean': jnp.zeros(HIDDEN)}}

  def apply(self, variables, images, train, mutable, rngs):
    del train, mutable, rngs
    params = variables['params']
    dense = lambda name, x: x @ params[name]['kernel'] + params[name]['bias']
    x = dense('hidden', images.reshape(len(images), -1))
    mean = x.mean(0)
    x = (x - mean) / jnp.sqrt(x.var(0) + 1e-5)
    features = jax.nn.leaky_relu(x)
    heads = {}
    for name, _, hidden, _ in self.heads:
      x = jax.nn.relu(dense(f'{name}_hidden', features)) if hidden else features
      heads[name] = dense(name, x)
    prediction = Prediction(dense('classifier', features), features, heads)
    return prediction, {'batch_stats': {'mean': mean}}


def make_setup(name, recipe='plain', layout='split', **recipe_args):
  return Setup(name, recipe, layout, Perceptron, **recipe_args)


@functools.cache
def compiled(name, recipe='plain', **recipe_args):
  """A method's setup and its compiled functions, shared by the tests."""
  setup = make_setup(name, recipe, **recipe_args)
  return setup, jax.jit(setup.init), jax.jit(setup.step)


@functools.cache
def compiled_prepare(name):
  """What the method's loss is called with at θ: teacher, targets, views."""
  setup, _, _ = compiled(name)

  def prepare(state, batch):
    def predict(images, params=state.params):
      outputs, _ = setup.forward(params, state.batch_stats, {'images': images})
      return outputs['images']

    rng = train_step.step_keys(state).method
    views, targets, _ = setup.method.prepare(predict, state, batch, rng)
    teacher, _ = setup.forward(state.params, state.batch_stats, views)
    return teacher, targets, views

  return jax.jit(prepare)


@functools.cache
def compiled_loss(name):
  """The results of the method's loss, and its Jacobian by the student."""
  setup, _, _ = compiled(name)

  def loss(student, teacher, targets, state):
    result = setup.method.loss(
      student, teacher, targets, state.method, state.step
    )
    return jnp.stack([result[0].labeled, result[0].unlabeled]), result

  return jax.jit(jax.jacrev(loss, has_aux=True))


def late(state, sharpness=10.0):
  """The state late in training: no ramps are left, the network is sure."""
  params = dict(state.params)
  params['classifier'] = jax.tree.map(
    lambda x: sharpness * x, params['classifier']
  )
  return state.replace(step=jnp.int32(LATE), params=params)


def batch_of(name, seed=0):
  return make_batch(seed, views=compiled(name)[0].method.views)


def kinds(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def assert_close(a, b, rtol, atol):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol, atol), a, b)


def assert_finite(tree):
  for leaf in jax.tree.leaves(tree):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      assert np.isfinite(leaf).all()


def perturbed(outputs):
  """The same outputs plus noise, as if from other parameters."""
  rng = np.random.default_rng(0)
  noisy = lambda x: x + jnp.float32(5 * rng.normal(size=x.shape))
  return jax.tree.map(noisy, outputs)


def test_targets_are_arrays_over_a_batch(name):
  """Or groups of a batch could not be cut from them."""
  _, init, _ = compiled(name)
  batch = batch_of(name)
  _, targets, _ = jax.eval_shape(compiled_prepare(name), init(), batch)
  sizes = {len(batch.labeled['label']), len(batch.unlabeled['index'])}
  assert {x.shape[0] for x in jax.tree.leaves(targets)} <= sizes


def test_state_and_guesses_ignore_the_student(name):
  setup, init, _ = compiled(name)
  state, batch = late(init()), batch_of(name)
  teacher, targets, _ = compiled_prepare(name)(state, batch)
  loss = compiled_loss(name)
  _, (one, state_one, metrics_one) = loss(teacher, teacher, targets, state)
  student = perturbed(teacher)
  _, (two, state_two, metrics_two) = loss(student, teacher, targets, state)
  assert_equal(state_one, state_two)
  assert_equal(metrics_one, metrics_two)
  # The student did move.
  assert one.labeled != two.labeled
  if setup.method.views:
    assert one.unlabeled != two.unlabeled
    guess, weight = metrics_one['pseudo_labels']
    assert guess.shape == weight.shape == batch.unlabeled['index'].shape
    assert weight.dtype == jnp.float32
    assert jnp.all((weight >= 0) & (weight <= 1))
    assert weight.max() > 0


def test_each_loss_has_rows_of_its_own(name):
  setup, init, _ = compiled(name)
  state = late(init())
  teacher, targets, _ = compiled_prepare(name)(state, batch_of(name))
  rows, _ = compiled_loss(name)(perturbed(teacher), teacher, targets, state)
  labeled = {k: rows.pop(k) for k in list(rows) if k.startswith('labeled')}
  largest = lambda tree, row: max(
    float(jnp.abs(x[row]).max()) for x in jax.tree.leaves(tree)
  )
  assert all(largest(view, 0) > 1e-4 for view in labeled.values())
  assert largest(labeled, 1) == 0
  if setup.method.views:
    assert largest(rows, 0) == 0
    assert largest(rows, 1) > 1e-4


def test_gradient_reaches_only_the_student(name):
  """The step is that of teacher and targets held constant."""
  setup, init, step = compiled(name)
  state, batch = late(init()), batch_of(name)
  after, _ = step(state, batch)
  teacher, targets, views = compiled_prepare(name)(state, batch)

  @jax.jit
  def expected(params):
    def loss(params):
      student, _ = setup.forward(params, state.batch_stats, views)
      value, _, _ = setup.method.loss(
        student, teacher, targets, state.method, state.step
      )
      pairs = zip(setup.method.trains_on, value, strict=True)
      return sum(weight * x for weight, x in pairs)

    updates, _ = setup.tx.update(
      jax.grad(loss)(params), state.opt_state, params
    )
    return optax.apply_updates(params, updates)

  assert_close(after.params, expected(state.params), rtol=1e-4, atol=1e-5)
  moved = optax.tree.norm(
    jax.tree.map(jnp.subtract, after.params, state.params)
  )
  assert moved > 1e-3


def test_state_keeps_its_types_under_every_recipe(name):
  """Traced only: compiling the product would take minutes."""
  for recipe in RECIPES:
    setup = make_setup(name, recipe)
    has_unlabeled = bool(setup.method.views)
    if recipes.objection(name, recipe, has_unlabeled):
      continue
    batch = batch_of(name)
    if RECIPES[recipe].fixed:
      batch = batch._replace(fixed=batch.labeled)
    state = jax.eval_shape(setup.init)
    after, metrics = jax.eval_shape(setup.step, state, batch)
    assert kinds(after) == kinds(state), recipe
    assert {'labeled_loss', 'gradient_norm'} <= set(metrics)
    assert ('used_fraction' in metrics) == has_unlabeled


def test_every_layout_gives_a_step_arrays_of_the_same_types(name):
  """So what holds for a step in one holds in all: it sees no more of them."""
  _, init, _ = compiled(name)
  state, batch = jax.eval_shape(init), batch_of(name)
  _, _, views = jax.eval_shape(compiled_prepare(name), state, batch)
  found = []
  for layout in LAYOUTS:
    forward = make_setup(name, layout=layout).forward
    rng = jax.random.key(0)
    outputs = jax.eval_shape(
      forward, state.params, state.batch_stats, views, rng
    )
    found.append(kinds(outputs))
  assert found == [found[0]] * len(LAYOUTS)
  assert found[0][0].keys() == views.keys()
  assert found[0][1] == kinds(state.batch_stats)


def test_groups_of_a_batch_climb_apart(name):
  setup = make_setup(name, 'flatmatch', groups=2)
  if not setup.method.views:
    return
  state = jax.eval_shape(setup.init)
  after, _ = jax.eval_shape(setup.step, state, batch_of(name))
  assert kinds(after) == kinds(state)


def test_zero_radius_is_the_plain_method(name):
  setup, init, step = compiled(name)
  recipe = 'flatmatch' if setup.method.views else 'sam'
  assert not recipes.objection(name, recipe, bool(setup.method.views))
  _, init_moved, step_moved = compiled(name, recipe, rho=0.0)
  state = late(init())
  assert init_moved().perturb == ()
  for seed in range(3):
    batch = batch_of(name, seed)
    moved, _ = step_moved(state, batch)
    # From the same state each time: or rounding would add up.
    state, _ = step(state, batch)
    assert_close(
      state.replace(rng=()), moved.replace(rng=()), rtol=2e-5, atol=2e-6
    )


def test_resume_is_exact(name, tmp_path):
  """Two steps, saved and read back, and two more are four, bit for bit."""
  # A memory is the same whatever the method: once with thresholds and once with
  # a second network are enough.
  recipe = 'flatmatch_e' if name in ('freematch', 'mpl') else 'plain'
  _, init, step = compiled(name, recipe)
  state = late(init())
  for seed in range(4):
    if seed == 2:
      checkpoints = Checkpoints(tmp_path)
      checkpoints.save(2, state, notes={}, error=None)
      checkpoints.close()
    state, _ = step(state, batch_of(name, seed))
  resumed, _ = Checkpoints(tmp_path, read_only=True).restore(init())
  for seed in (2, 3):
    resumed, _ = step(resumed, batch_of(name, seed))
  whole, resumed = (
    s.replace(rng=jax.random.key_data(s.rng)) for s in (state, resumed)
  )
  assert_equal(whole, resumed)


def one_class(state, batch):
  """Every label is 0, and so is every guess."""
  params = dict(state.params)
  bias = jnp.zeros(NUM_CLASSES).at[0].set(1e4)
  params['classifier'] = params['classifier'] | {'bias': bias}
  batch.labeled['label'] = jnp.zeros_like(batch.labeled['label'])
  return state.replace(params=params, ema_params=params), batch


def scaled(factor, state, batch):
  params = late(state, factor).params
  return state.replace(params=params, ema_params=params), batch


def blank(state, batch):
  return state, jax.tree.map(jnp.zeros_like, batch)


def same(state, batch):
  """The same image everywhere: no variance in a batch."""
  repeat = lambda x: jnp.ones_like(x) * x[:1] if x.ndim == 4 else x
  return state, jax.tree.map(repeat, batch)


ADVERSARIES = {
  'all-zero images': blank,
  'equal images': same,
  'one class': one_class,
  'confident': functools.partial(scaled, 1e4),
  'uniform, empty masks': functools.partial(scaled, 0.0),
}


def test_adversarial_batches_leave_everything_finite(name):
  _, init, step = compiled(name)
  for adversary in ADVERSARIES.values():
    for at in (0, 1, LATE):
      state = init().replace(step=jnp.int32(at))
      state, batch = adversary(state, batch_of(name))
      after, metrics = step(state, batch)
      metrics.pop('pseudo_label_accuracy', None)  # NaN says: none.
      assert_finite((after, metrics))


def test_contradicting_confident_logits_leave_everything_finite(name):
  _, init, _ = compiled(name)
  state = late(init())
  outputs, targets, _ = compiled_prepare(name)(state, batch_of(name))
  rng = np.random.default_rng(0)

  def extreme(scale):
    draw = lambda x: jnp.float32(scale * rng.choice([-1, 1], x.shape))
    return jax.tree.map(draw, outputs)

  for ours, theirs in ((1e4, 1e4), (1e4, 0.0), (0.0, 1e4)):
    student, teacher = extreme(ours), extreme(theirs)
    assert_finite(compiled_loss(name)(student, teacher, targets, state))


def shifted(rng, images):
  """Images moved by up to a pixel, each by its own."""
  moves = rng.integers(-1, 2, size=(len(images), 2))
  pairs = zip(images, moves, strict=True)
  return np.stack([np.roll(image, move, (0, 1)) for image, move in pairs])


def strong(rng, images):
  """Images with noise, and with a square of 3 x 3 pixels missing."""
  images = images + 0.3 * rng.normal(size=images.shape)
  for image, (row, column) in zip(
    images, rng.integers(0, 6, size=(len(images), 2)), strict=True
  ):
    image[row : row + 3, column : column + 3] = 0
  return images


def digit_batches(views, number):
  """Batches of the digits 0 to 3: eight are labeled, fifty unlabeled."""
  data = sources.digits()
  some = np.flatnonzero(data.train_labels < NUM_CLASSES)[: INFO.num_train]
  images = data.train_images[some] / 127.5 - 1
  labels = data.train_labels[some]
  rng = np.random.default_rng(0)
  few = np.concatenate(
    [np.flatnonzero(labels == k)[:2] for k in range(NUM_CLASSES)]
  )
  for _ in range(number):
    index = rng.integers(0, len(some), 16)
    unlabeled = {'index': index.astype(np.int32), 'truth': labels[index]}
    labeled = {'index': np.arange(len(few)), 'label': labels[few]}
    known, others = parted(views)
    pairs = [(unlabeled, view, index) for view in others]
    for batch, view, chosen in [*pairs, *((labeled, k, few) for k in known)]:
      batch[view] = shifted(rng, images[chosen])
      if view.startswith(('medium', 'strong')):
        batch[view] = strong(rng, batch[view])
    yield jax.tree.map(
      lambda x: jnp.asarray(x, 'f4' if x.ndim == 4 else 'i4'),
      Batch(labeled, unlabeled),
    )


def test_forty_steps_on_digits_lower_the_labeled_loss(name):
  setup, init, step = compiled(name)

  @jax.jit
  def labeled_loss(state, batch):
    """On images that no method has mixed, whatever it says its loss is."""
    views = {'labeled': batch.labeled['weak']}
    outputs, _ = setup.forward(state.params, state.batch_stats, views)
    return cross_entropy(outputs['labeled'].logits, batch.labeled['label'])

  state, history = init(), []
  for batch in digit_batches(setup.method.views, 40):
    history.append(labeled_loss(state, batch))
    state, _ = step(state, batch)
  # These two start slowly: MPL's student sees no labels at all.
  bound = 0.85 if name in ('mpl', 'remixmatch') else 0.5
  assert np.mean(history[-10:]) < bound * np.mean(history[:5])
