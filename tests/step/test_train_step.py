"""The step is its equation, and the recipes are what they say."""

import dataclasses
import functools

from conftest import NUM_CLASSES, Setup, make_batch
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import assert_equal

from flatmatch_jax import methods
from flatmatch_jax.methods import losses
from flatmatch_jax.models.wide_resnet import WideResNet
from flatmatch_jax.step import perturb, recipes, train_step
from flatmatch_jax.step.forward import LAYOUTS, populations
from flatmatch_jax.step.recipes import Recipe
from flatmatch_jax.types import Losses, Prediction


def trees_close(a, b, rtol=2e-5, atol=1e-6):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b
  )


def comparable(state):
  """The state without its key, which numpy cannot compare."""
  return dataclasses.replace(state, rng=jax.random.key_data(state.rng))


class Small(nn.Module):
  """BatchNorm and dropout, each if wanted, and next to nothing to compile."""

  heads: tuple = ()
  momentum: float | None = 0.0
  rate: float = 0.0

  @nn.compact
  def __call__(self, x, train):
    x = x.reshape(len(x), -1)
    if self.momentum is not None:
      x = nn.BatchNorm(use_running_average=not train, momentum=self.momentum)(x)
    kept = not (train and self.has_rng('dropout'))
    x = nn.Dropout(self.rate, deterministic=kept)(x)
    return Prediction(nn.Dense(NUM_CLASSES, name='classifier')(x), x, {})


ALONE = functools.partial(Small, momentum=None)
DROPPING = functools.partial(Small, rate=0.5)


@functools.cache
def compiled(
  method, recipe='plain', layout='split', network=Small, number=1, **args
):
  """A setup, its first state and its jitted step, shared by the tests."""
  setup = Setup(method, recipe, layout, network, number, **args)
  return setup, setup.init(), jax.jit(setup.step)


@functools.cache
def after_three(recipe, layout, network=DROPPING, name='fixmatch', **args):
  """The state after three steps of a method that uses most guesses."""
  # Fused as outside of the tests: programs that compute the same then round
  # alike.
  usual = {'xla_cpu_use_fusion_emitters': True}
  given = {'threshold': 0.3} if name == 'fixmatch' else {}
  method = methods.create(name, **given)
  setup = Setup(method, recipe, layout, network, **args)
  state, step = setup.init(), jax.jit(setup.step, compiler_options=usual)
  for seed in range(3):
    state, _ = step(state, make_batch(seed))
  return comparable(state)


EVERYTHING = Recipe(
  clean=Losses(0.0, 0.0),
  worst=Losses(1.0, 1.0),
  source=Losses(1.0, 1.0),
  perturb=perturb.ascent,
)


@pytest.mark.parametrize(
  ('recipe', 'layout', 'name'),
  [
    *((EVERYTHING, layout, 'fixmatch') for layout in LAYOUTS),
    (EVERYTHING, 'split', 'freematch'),  # It has thresholds in its state.
    ('flatmatch', 'split', 'fixmatch'),
  ],
)
def test_zero_radius_is_the_plain_method_bit_for_bit(recipe, layout, name):
  """The second pass is the first, and drops the same."""
  moved = after_three(recipe, layout, name=name, rho=0.0)
  assert_equal(after_three('plain', layout, name=name), moved)


def test_network_with_dropout_drops():
  """Else the test above would not say that both passes drop the same."""
  dropped, calm = (after_three('plain', 'split', n) for n in (DROPPING, Small))
  kernel = lambda state: state.params['classifier']['kernel']
  assert not np.array_equal(kernel(dropped), kernel(calm))


@pytest.mark.parametrize('layout', ['joint', 'split'])
def test_step_equals_hand_written_gradient(layout, batch):
  """FixMatch under FlatMatch, Eq. 5, with nothing of the package's step."""
  setup = Setup('fixmatch', 'flatmatch', layout, rho=0.5)
  state = setup.init()
  # Confident teachers: otherwise the unlabeled loss is zero.
  state.params['classifier']['kernel'] = (
    state.params['classifier']['kernel'] * 30
  )
  state = state.replace(ema_params=jax.tree.map(jnp.copy, state.params))
  after, metrics = jax.jit(setup.step)(state, batch)
  assert metrics['used_fraction'] > 0.2
  x, u, s = (
    batch.labeled['weak'],
    batch.unlabeled['weak'],
    batch.unlabeled['strong'],
  )

  def network(params, images):
    variables = {'params': params, 'batch_stats': state.batch_stats}
    prediction, _ = setup.model.apply(
      variables, images, train=True, mutable=['batch_stats']
    )
    return prediction.logits

  def logits(params):
    if layout == 'split':
      return [network(params, images) for images in (x, u, s)]
    return jnp.split(network(params, jnp.concatenate([x, u, s])), [8, 24])

  def labeled_loss(params):
    log_probs = jax.nn.log_softmax(logits(params)[0])
    return -jnp.mean(log_probs[jnp.arange(8), batch.labeled['label']])

  @jax.jit
  def by_hand(params):
    """Parameters after the step, and after a plain one, and the losses."""
    teacher = jax.nn.softmax(logits(params)[1])

    def unlabeled_loss(params):
      log_probs = jax.nn.log_softmax(logits(params)[2])
      rows = -log_probs[jnp.arange(16), teacher.argmax(-1)]
      return jnp.sum(jnp.where(teacher.max(-1) >= 0.95, rows, 0.0)) / 16

    labeled, g = jax.value_and_grad(labeled_loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(g)))
    worst = jax.tree.map(lambda p, d: p + 0.5 * d / norm, params, g)

    def moved(other):
      total = jax.tree.map(jnp.add, g, jax.grad(unlabeled_loss)(other))
      updates, _ = setup.tx.update(total, state.opt_state, params)
      return optax.apply_updates(params, updates)

    return moved(worst), moved(params), labeled, unlabeled_loss(worst)

  expected, plain, labeled, unlabeled = by_hand(state.params)
  trees_close(after.params, expected)
  difference = optax.tree.norm(jax.tree.map(jnp.subtract, plain, expected))
  assert difference > 1e-4  # The radius matters.
  np.testing.assert_allclose(metrics['labeled_loss'], labeled, rtol=1e-5)
  np.testing.assert_allclose(metrics['worst_loss'], unlabeled, rtol=1e-4)


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('recipe', ['flatmatch', 'flatmatch_e'])
def test_worst_pass_leaves_running_statistics(recipe, layout, batch):
  _, state, step = compiled('freematch', recipe, layout, rho=1.0)
  # FlatMatch-e starts with an empty memory: give it something to remember.
  state = state.replace(perturb=jax.tree.map(jnp.ones_like, state.perturb))
  after, _ = step(state, batch)
  _, before, plain = compiled('freematch', layout=layout)
  expected, _ = plain(before, batch)
  trees_close(after.batch_stats, expected.batch_stats, rtol=1e-6)
  with np.testing.assert_raises(AssertionError):
    trees_close(after.batch_stats, state.batch_stats)


def test_first_step_of_flatmatch_e_is_unperturbed(batch):
  _, state, step = compiled('freematch', 'flatmatch_e', rho=1.0)
  after, metrics = step(state, batch)
  assert metrics['offset_norm'] == 0
  _, before, plain = compiled('freematch')
  trees_close(after.params, plain(before, batch)[0].params)


def test_memory_of_flatmatch_e_follows_its_recursion():
  _, state, step = compiled('fixmatch', 'flatmatch_e', rho=0.3, decay=0.9)
  memory = jax.tree.map(jnp.zeros_like, state.params)
  for seed in range(3):
    batch = make_batch(seed)
    g = gradient((1, 0), state.params, state, batch, targets_of(state, batch))
    memory = jax.tree.map(lambda m, d: 0.9 * m + 0.1 * d, memory, g)
    state, metrics = step(state, batch)
    trees_close(state.perturb, memory, rtol=1e-4)
  np.testing.assert_allclose(metrics['offset_norm'], 0.3, rtol=1e-5)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_views_follow_the_populations_of_a_method_before_the_layout(layout):
  own = (('labeled',), ('labeled_joint', 'weak', 'strong2'))
  names = ['weak', 'labeled', 'fixed', 'labeled_joint', 'strong']
  others = {
    'joint': [['fixed', 'strong']],
    'clean_strong': [['fixed'], ['strong']],
    'split': [['fixed'], ['strong']],
  }
  expected = [['labeled'], ['labeled_joint', 'weak'], *others[layout]]
  assert populations(names, layout, own) == expected


def test_images_in_two_populations_are_normalized_by_both(batch):
  """Labeled images alone and together with unlabeled ones, as by hand."""
  own = (('labeled',), ('labeled_joint', 'weak'))
  method = methods.create('fixmatch')._replace(populations=own)
  setup = Setup(method, network=Small)
  state = jax.jit(setup.init)()
  labeled, weak = batch.labeled['weak'], batch.unlabeled['weak']
  views = {'labeled': labeled, 'labeled_joint': labeled, 'weak': weak}
  found, stats = jax.jit(setup.forward)(state.params, state.batch_stats, views)

  @jax.jit
  def by_hand(images):
    variables = {'params': state.params, 'batch_stats': state.batch_stats}
    return setup.model.apply(
      variables, images, train=True, mutable=['batch_stats']
    )

  alone, _ = by_hand(labeled)
  joint, updates = by_hand(jnp.concatenate([labeled, weak]))
  labeled_joint, weak_joint = jnp.split(joint.logits, [len(labeled)])
  logits = {name: output.logits for name, output in found.items()}
  expected = {
    'labeled': alone.logits,
    'labeled_joint': labeled_joint,
    'weak': weak_joint,
  }
  trees_close(logits, expected, rtol=1e-4, atol=1e-5)
  assert jnp.abs(alone.logits - labeled_joint).max() > 1e-3
  trees_close(stats, updates['batch_stats'], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_running_statistics_come_from_the_weak_population(layout, batch):
  setup, state, step = compiled('fixmatch', layout=layout)
  x, u, s = (
    batch.labeled['weak'],
    batch.unlabeled['weak'],
    batch.unlabeled['strong'],
  )
  population = {'joint': [x, u, s], 'clean_strong': [x, u], 'split': [u]}[
    layout
  ]
  after, _ = step(state, batch)
  own = flax_statistics(setup.model, state, jnp.concatenate(population))
  expected = jax.tree.map(
    lambda old, new: 0.1 * old + 0.9 * new, state.batch_stats, own
  )
  trees_close(after.batch_stats, expected, rtol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def flax_statistics(model, state, images):
  """Running statistics after a pass in training, as flax updates them."""
  variables = {'params': state.params, 'batch_stats': state.batch_stats}
  _, updates = model.apply(
    variables, images, train=True, mutable=['batch_stats']
  )
  return updates['batch_stats']


def late(state, step=100_000):
  return state.replace(step=jnp.asarray(step))


@pytest.mark.parametrize('momentum', [0.9, 0.999])
def test_late_running_statistics_are_flaxs_bit_for_bit(momentum, batch):
  """Not jitted: compilers round a product and a sum once or twice."""
  setup = Setup('supervised', network=Small)
  step = train_step.make_train_step(
    setup.forward, setup.method, setup.tx, bn_momentum=momentum
  )
  stats = jax.tree.map(lambda x: x + 0.3, setup.init().batch_stats)
  state = late(setup.init()).replace(batch_stats=stats)
  after, _ = step(state, batch)
  _, expected = Small(momentum=momentum).apply(
    {'params': state.params, 'batch_stats': stats},
    batch.unlabeled['weak'],
    train=True,
    mutable=['batch_stats'],
  )
  assert_equal(after.batch_stats, expected['batch_stats'])
  with np.testing.assert_raises(AssertionError):
    assert_equal(after.batch_stats, stats)


def test_running_statistics_warm_up_as_the_averaged_weights_do():
  setup, state, step = compiled('fixmatch')
  expected = state.batch_stats
  for number in range(4):
    batch = make_batch(number)
    own = flax_statistics(setup.model, state, batch.unlabeled['weak'])
    decay = (1 + number) / (10 + number)
    expected = jax.tree.map(
      lambda old, new, d=decay: d * old + (1 - d) * new, expected, own
    )
    state, _ = step(state, batch)
    trees_close(state.batch_stats, expected, rtol=1e-5)


WIDENING = functools.partial(
  WideResNet, NUM_CLASSES, blocks=1, width=1, strides=(1, 2)
)


@pytest.mark.parametrize('start', [0, 7, 100_000])
@pytest.mark.parametrize('microbatches', [1, 2])
def test_statistics_of_dead_norms_stay(start, microbatches):
  """Training does not apply the first norm of a block that widens."""
  _, state, step = compiled('fixmatch', network=WIDENING, number=microbatches)
  state = late(state, start)
  # The two parts of some of these, rounded, do not add up to the whole.
  stats = jax.tree.map(
    lambda x: jnp.linspace(0.1, 0.9, len(x)), state.batch_stats
  )
  before = state = state.replace(batch_stats=stats)
  for number in range(3):
    state, _ = step(state, make_batch(number))
  moved = jax.tree.map(
    lambda a, b: bool((a != b).any()), state.batch_stats, before.batch_stats
  )
  dead = moved['stage2_block1'].pop('norm1')
  assert not any(dead.values())
  assert all(jax.tree.leaves(moved))


def test_scaled_gradients_are_the_plain_ones_bit_for_bit(batch):
  setup, before, step = compiled('freematch', 'flatmatch', rho=0.5)
  parts = setup.forward, setup.method, setup.tx, setup.recipe, setup.perturb
  scaled = train_step.make_train_step(*parts, float16=True)
  plain, _ = step(before, batch)
  after, _ = jax.jit(scaled)(before, batch)
  assert_equal(comparable(after), comparable(plain))


@pytest.mark.parametrize('recipe', ['plain', 'flatmatch'])
def test_scaled_gradients_cost_no_pass(recipe, batch):
  setup = Setup('fixmatch', recipe)
  parts = setup.forward, setup.method, setup.tx, setup.recipe, setup.perturb
  scaled = train_step.make_train_step(*parts, float16=True)
  state = jax.eval_shape(setup.init)
  count = lambda step: jax.jit(step).lower(state, batch).cost_analysis()
  assert count(scaled)['flops'] < 1.1 * count(setup.step)['flops']


def test_each_skipped_step_halves_the_scale_of_float16(batch):
  """Seen where gradients leave the network in float16's place."""
  seen = []

  @jax.custom_vjp
  def look(x):
    return x

  def backward(_, grad):
    jax.debug.callback(lambda g: seen.append(np.abs(g).max()), grad)
    return (grad,)

  look.defvjp(lambda x: (x, None), backward)
  setup, before, _ = compiled('supervised')

  def forward(*args):
    outputs, stats = setup.forward(*args)
    head = outputs['labeled']
    return outputs | {'labeled': head._replace(logits=look(head.logits))}, stats

  plain, scaled = (
    jax.jit(
      train_step.make_train_step(
        forward, setup.method, setup.tx, float16=float16
      )
    )
    for float16 in (False, True)
  )
  for step, skipped in ((plain, 0), (scaled, 0), (scaled, 3), (scaled, 40)):
    total = before.skipped._replace(total=jnp.int32(skipped))
    jax.block_until_ready(step(before.replace(skipped=total), batch))
    jax.effects_barrier()
  largest, *others = seen
  assert others == [largest * 2.0**exponent for exponent in (15, 12, 0)]


def test_weights_average_warms_up(batch):
  _, state, step = compiled('supervised')
  after, _ = step(state, batch)
  expected = jax.tree.map(
    lambda old, new: 0.1 * old + 0.9 * new, state.ema_params, after.params
  )
  trees_close(after.ema_params, expected)
  after, _ = step(late(state), batch)
  expected = jax.tree.map(
    lambda old, new: 0.999 * old + 0.001 * new, state.ema_params, after.params
  )
  trees_close(after.ema_params, expected, rtol=1e-6, atol=1e-7)


def test_metrics_describe_the_pseudo_labels(batch):
  setup, state, step = compiled('freematch')
  _, metrics = step(state, batch)
  outputs, _ = setup.forward(
    state.params, state.batch_stats, {'weak': batch.unlabeled['weak']}
  )
  probs = jax.nn.softmax(outputs['weak'].logits)
  guess = np.asarray(probs.argmax(-1))
  histogram = np.bincount(guess, minlength=NUM_CLASSES) / len(guess)
  np.testing.assert_allclose(metrics['class_histogram'], histogram, rtol=1e-6)
  assert 0 <= metrics['used_fraction'] <= 1
  unknown = batch._replace(
    unlabeled=batch.unlabeled | {'truth': jnp.full(16, -1)}
  )
  _, metrics = step(state, unknown)
  assert np.isnan(metrics['pseudo_label_accuracy'])


def confident(state):
  """Sharp predictions: otherwise FixMatch uses nothing."""
  kernel = 5 * state.params['classifier']['kernel']
  params = state.params | {
    'classifier': state.params['classifier'] | {'kernel': kernel}
  }
  return state.replace(params=params)


FIXMATCH = Setup('fixmatch', network=Small)


def logits_of(params, state, images):
  outputs, _ = FIXMATCH.forward(params, state.batch_stats, {'x': images})
  return outputs['x'].logits


@jax.jit
def targets_of(state, batch):
  """FixMatch's guesses, and which it uses: from θ."""
  teacher = logits_of(state.params, state, batch.unlabeled['weak'])
  teacher = jax.nn.softmax(teacher)
  return teacher.argmax(-1), teacher.max(-1) >= 0.95


@jax.jit
def gradient(weights, params, state, batch, targets):
  """Of the weighted (labeled, unlabeled) losses of FixMatch at any θ̃."""

  def loss(params):
    labeled = logits_of(params, state, batch.labeled['weak'])
    unlabeled = logits_of(params, state, batch.unlabeled['strong'])
    return weights[0] * losses.cross_entropy(
      labeled, batch.labeled['label']
    ) + weights[1] * losses.cross_entropy(unlabeled, *targets)

  return jax.grad(loss)(params)


@jax.jit
def updated(state, *gradients):
  """Parameters after the optimizer's step along a sum."""
  total = jax.tree.map(lambda *x: sum(x), *gradients)
  updates, _ = FIXMATCH.tx.update(total, state.opt_state, state.params)
  return optax.apply_updates(state.params, updates)


@jax.jit
def towards(params, direction):
  norm = optax.tree.norm(direction)
  return jax.tree.map(lambda p, d: p + 0.5 * d / norm, params, direction)


# clean, worst, source as (labeled, unlabeled), typed here once more.
ROWS = {
  'flatmatch': ((1, 0), (0, 1), (1, 0)),
  'sharp_labeled': ((0, 1), (1, 0), (1, 0)),
  'sharp_unlabeled': ((1, 0), (0, 1), (0, 1)),
  'sharp_all': ((0, 0), (1, 1), (1, 1)),
  'flatmatch_official': ((1, 0), (1, 1), (1, 0)),
  'sam': ((0, 0), (1, 0), (1, 0)),
}


@pytest.mark.parametrize('recipe', ROWS)
def test_recipe_is_its_row_of_the_equation(recipe, batch):
  _, state, step = compiled('fixmatch', recipe, rho=0.5)
  state = confident(state)
  targets = targets_of(state, batch)
  assert 0 < targets[1].sum() < 16
  at = lambda row, params: gradient(row, params, state, batch, targets)
  clean, worst, source = ROWS[recipe]
  moved = towards(state.params, at(source, state.params))
  terms = at(clean, state.params), at(worst, moved)
  after, _ = step(state, batch)
  trees_close(after.params, updated(state, *terms), rtol=1e-4)


def test_groups_climb_their_own_gradients(batch):
  _, state, step = compiled('fixmatch', 'flatmatch', rho=0.5, groups=2)
  state = confident(state)
  targets = targets_of(state, batch)
  terms = [gradient((1, 0), state.params, state, batch, targets)]
  for part in range(2):
    rows = jax.tree.map(lambda x, n=part: x[n::2], (batch, targets))
    climb = gradient((1, 0), state.params, state, *rows)
    moved = towards(state.params, climb)
    terms.append(gradient((0, 0.5), moved, state, *rows))
  after, _ = step(state, batch)
  trees_close(after.params, updated(state, *terms), rtol=1e-4)


def test_fixed_labels_serve_the_perturbation_only(batch):
  _, state, step = compiled('fixmatch', 'flatmatch', rho=0.5)
  state = confident(state)
  targets = targets_of(state, batch)
  at = lambda row, params, batch: gradient(row, params, state, batch, targets)
  other = make_batch(7)
  moved = towards(state.params, at((1, 0), state.params, other))
  terms = at((1, 0), state.params, batch), at((0, 1), moved, batch)
  after, _ = step(state, batch._replace(fixed=dict(other.labeled)))
  trees_close(after.params, updated(state, *terms), rtol=1e-4)


@pytest.mark.parametrize(
  ('method', 'recipe'), [('freematch', 'flatmatch'), ('vat', 'plain')]
)
def test_microbatches_are_the_plain_step(method, recipe):
  """Where nothing couples the images of a batch: without BatchNorm."""
  states = []
  for number in (1, 4):
    setup, state, step = compiled(method, recipe, 'joint', ALONE, number)
    for seed in range(2):
      state, _ = step(state, make_batch(seed, views=setup.method.views))
    states.append(comparable(state))
  trees_close(*states, rtol=1e-4, atol=1e-6)


def test_microbatches_need_the_memory_of_one():
  """The reason for them: no activations of other parts are kept."""

  class Deep(nn.Module):
    heads: tuple = ()

    @nn.compact
    def __call__(self, x, train):
      x = x.reshape(len(x), -1)
      for _ in range(8):
        x = nn.tanh(nn.Dense(256)(x))
      return Prediction(nn.Dense(NUM_CLASSES)(x), x, {})

  batch = make_batch(labeled=256, unlabeled=512)
  memory = []
  for microbatches in (1, 8):
    setup = Setup('fixmatch', network=Deep, microbatches=microbatches)
    state = jax.eval_shape(setup.init)
    program = jax.jit(setup.step).lower(state, batch).compile()
    memory.append(program.memory_analysis().temp_size_in_bytes)
  assert memory[1] < 0.5 * memory[0]


@pytest.mark.parametrize(
  ('method', 'recipe', 'fits'),
  [
    ('supervised', 'plain', True),
    ('supervised', 'sam', True),
    ('supervised', 'flatmatch', False),
    ('fixmatch', 'sam', False),
    ('fixmatch', 'flatmatch_fix', True),
  ],
)
def test_meaningless_combinations_are_named(method, recipe, fits):
  reason = recipes.objection(method, recipe, method != 'supervised')
  assert (reason is None) == fits
  assert fits or (method in reason and recipe in reason)
