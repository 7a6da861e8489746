"""Numbers that go wrong: steps are skipped, counted, and end a run in time."""

import json
import math

from conftest import Setup
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from flatmatch_jax import methods
from flatmatch_jax.data import splits
from flatmatch_jax.run import watch
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.step import perturb, train_step
from flatmatch_jax.step.recipes import RECIPES
from flatmatch_jax.training import loop
from flatmatch_jax.types import UserError


def raw(state):
  """Leaves of a state by name, in bytes."""
  state = state.replace(rng=jax.random.key_data(state.rng))
  return {
    jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
    for path, leaf in jax.tree.leaves_with_path(state)
  }


def broken(batch, part):
  """The batch with one pixel that is not a number."""
  spoil = lambda x: x.at[0, 0, 0, 0].set(jnp.nan)
  parts = getattr(batch, part)
  name = 'strong' if 'strong' in parts else 'weak'
  return batch._replace(**{part: parts | {name: spoil(parts[name])}})


# MPL has a second network and optimizer in its state, FlatMatch-e a memory.
@pytest.mark.parametrize(
  ('method', 'recipe', 'part'),
  [
    ('freematch', 'plain', 'labeled'),
    ('freematch', 'flatmatch_e', 'unlabeled'),
    ('mpl', 'plain', 'unlabeled'),
  ],
)
def test_step_that_is_not_finite_is_skipped(method, recipe, part, batch):
  setup = Setup(method, recipe)
  step = jax.jit(setup.step)
  state, metrics = step(setup.init(), batch)
  assert metrics['skipped_steps'] == 0
  for number in (1, 2):
    after, metrics = step(state, broken(batch, part))
    assert metrics['skipped_steps'] == metrics['skipped_in_a_row'] == number
    assert int(after.step) == int(state.step) + 1
    before, now = raw(state), raw(after)
    changed = {name for name in now if now[name] != before[name]}
    assert changed == {'.step', '.skipped.total', '.skipped.in_a_row'}
    state = after
  state, metrics = step(state, batch)
  assert metrics['skipped_steps'] == 2
  assert metrics['skipped_in_a_row'] == 0
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_table_of_a_skipped_step_has_no_new_entries(batch):
  setup = Setup(methods.create('flexmatch', {}, threshold=0.0))
  step = jax.jit(setup.step)
  state, _ = step(setup.init(), broken(batch, 'labeled'))
  assert (state.method.table == -1).all()
  state, _ = step(state, batch)
  assert (state.method.table[batch.unlabeled['index']] >= 0).all()


def test_running_statistics_alone_make_a_step_skipped(batch):
  """No loss of this step depends on what it leaves in them."""
  setup = Setup('supervised')

  def forward(*args):
    outputs, stats = setup.forward(*args)
    return outputs, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), stats)

  step = train_step.make_train_step(forward, setup.method, setup.tx)
  after, metrics = jax.jit(step)(setup.init(), batch)
  assert math.isfinite(metrics['labeled_loss'])
  assert math.isfinite(metrics['gradient_norm'])
  assert metrics['skipped_steps'] == 1
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(after.batch_stats))


def test_memory_of_gradients_alone_makes_a_step_skipped(batch):
  """The student of MPL does not see the gradient that its memory keeps."""

  def forgetful(rho):
    inner = perturb.memory(rho)
    spoil = lambda x: jnp.full_like(x, jnp.nan)

    def update(gradient, average):
      offset, average = inner.update(gradient, average)
      return offset, jax.tree.map(spoil, average)

    return perturb.Perturbation(inner.init, update)

  recipe = RECIPES['flatmatch_e']._replace(perturb=forgetful)
  setup = Setup('mpl', recipe, rho=0.05)
  after, metrics = jax.jit(setup.step)(setup.init(), batch)
  assert math.isfinite(metrics['gradient_norm'])
  assert metrics['skipped_steps'] == 1
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(after.perturb))


def step_metrics(in_a_row, **values):
  fine = {'labeled_loss': 1.0, 'gradient_norm': 2.0}
  return fine | values | {'skipped_in_a_row': in_a_row}


def make(method='freematch', steps=400, shares=(0.1,) * 10, state=None, **args):
  config = digits.get_config(f'method={method}')
  config.steps, config.max_skipped = steps, 3
  config.method_args.update(args)
  return watch.Watch(config, np.array(shares), state=state)


def test_too_many_in_a_row_name_step_metric_and_checkpoint():
  watcher = make()
  watcher.step(10, step_metrics(3, gradient_norm=math.nan), lambda: 7)
  with pytest.raises(UserError) as error:
    watcher.step(11, step_metrics(4, gradient_norm=math.inf), lambda: 7)
  for words in (
    'Step 11 is the last of 4',
    'gradient_norm inf',
    'max_skipped=3',
    'checkpoint of step 7',
    'learning_rate',
  ):
    assert words in str(error.value)
  assert 'labeled_loss' not in str(error.value)
  with pytest.raises(UserError, match='nothing was saved'):
    watcher.step(11, step_metrics(4), lambda: None)


def test_skipped_steps_are_warned_of(capfd):
  watcher = make()
  watcher.row(50, {'skipped_steps': 0})
  watcher.row(100, {'skipped_steps': 2})
  assert '2 of 100 steps were skipped' in capfd.readouterr().err


# A sound step of FreeMatch on ten classes.
HEALTHY = {
  'labeled_loss': 0.5,
  'unlabeled_loss': 0.8,
  'largest_class': 0.14,
  'used_fraction': 0.9,
}


def feed(watcher, start, stop, **values):
  """Steps from `start` to `stop`; values may be functions of the step."""
  for step in range(start, stop + 1):
    metrics = HEALTHY | {
      k: v(step) if callable(v) else v for k, v in values.items()
    }
    watcher.step(step, step_metrics(0, **metrics), lambda: None)


# What a run shows from step 81 on, and the words of its warning.
BAD = {
  'one class': ({'largest_class': 0.9}, '90% of the pseudo-labels are of one'),
  'labeled loss worse than guesses': (
    {'labeled_loss': 3.5},
    'labeled_loss is 3.5, above the 2.3 of random guesses',
  ),
  'labeled loss that rises': ({'labeled_loss': 2.4}, 'lowest so far: 0.5'),
  'unlabeled loss that rises': (
    {'unlabeled_loss': 2.5},
    'unlabeled_loss is 2.5, above the 2.3',
  ),
  'loss at the perturbed point': ({'worst_loss': 4.0}, 'worst_loss is 4,'),
  'negative loss': (
    {'unlabeled_loss': -0.9},
    'unlabeled_loss is -0.9, which the fairness term reaches if most classes',
  ),
}


@pytest.mark.parametrize('name', BAD)
def test_collapse_is_warned_of_once_and_early(name, capfd):
  values, words = BAD[name]
  watcher = make(steps=400)
  feed(watcher, 1, 80)
  feed(watcher, 81, 99, **values)
  assert capfd.readouterr().err == ''
  feed(watcher, 100, 400, **values)
  (line,) = capfd.readouterr().err.splitlines()
  (warning,) = watcher.warnings
  assert warning.startswith('step 100: ')
  for text in (
    words,
    warning.removeprefix('step 100: '),
    'At step 100',
    'lower config.learning_rate (now 0.1)',
    'fairness_weight (now 0.05)',
    'method_args.warmup_steps=40',
    'more labels',
    'method=supervised',
  ):
    assert text in line


@pytest.mark.parametrize(
  ('name', 'value', 'steps', 'warned'),
  [
    ('labeled_loss', 3.5, 400, 40),
    ('largest_class', 1.0, 100, 40),
    ('largest_class', 1.0, 400, 100),
    ('largest_class', 1.0, 2**20, 20960),
    ('unlabeled_loss', -0.9, 400, 100),
  ],
)
def test_collapse_from_the_start_is_seen_early(name, value, steps, warned):
  watcher = make(steps=steps)
  feed(watcher, 1, warned - 1, **{name: value})
  assert watcher.warnings == []
  feed(watcher, warned, warned, **{name: value})
  assert len(watcher.warnings) == 1


def draw(size, shares):
  """The largest class of batches drawn from `shares`, by step."""
  rng = np.random.default_rng(0)
  return lambda _: rng.multinomial(size, shares).max() / size


LONG_TAIL = 100 ** -np.linspace(0, 1, 10)
LONG_TAIL /= LONG_TAIL.sum()
GOOD = {
  'healthy': ({}, {}),
  'one class at first': ({}, {'largest_class': lambda step: step < 82}),
  'long tail': (
    {'shares': LONG_TAIL},
    {'largest_class': draw(64, LONG_TAIL)},
  ),
  'two classes, unbalanced': (
    {'shares': (0.95, 0.05)},
    {'largest_class': draw(8, (0.95, 0.05)), 'unlabeled_loss': 0.4},
  ),
  'pool less balanced than its labels': ({}, {'largest_class': 0.8}),
  'threshold that is passed later': (
    {'method': 'fixmatch'},
    {'used_fraction': lambda step: step > 110},
  ),
  'no pseudo-labels yet': (
    {'warmup_steps': 200},
    {'used_fraction': lambda step: step > 200, 'unlabeled_loss': 0.0},
  ),
  'loss that rises as more are used': (
    {},
    {'unlabeled_loss': lambda step: min(step / 200, 2.0)},
  ),
  'heavy fairness': ({'fairness_weight': 5.0}, {'unlabeled_loss': -11.5}),
  'no fairness': ({'fairness_weight': 0.0}, {'unlabeled_loss': -1e-6}),
  'more classes than images': (
    {'shares': np.full(1000, 1e-3)},
    {'unlabeled_loss': -1.25},
  ),
  'heavy weight': ({'weight': 10.0}, {'unlabeled_loss': 12.0}),
}


@pytest.mark.parametrize('name', GOOD)
def test_healthy_runs_are_left_alone(name, capfd):
  settings, values = GOOD[name]
  feed(make(**settings), 1, 400, **values)
  assert capfd.readouterr().err == ''


def test_unused_pseudo_labels_are_warned_of(capfd):
  feed(make('fixmatch'), 1, 400, used_fraction=0.0)
  (line,) = capfd.readouterr().err.splitlines()
  assert 'At step 120 no pseudo-label was used for 100 steps' in line
  assert 'a lower threshold' in line
  assert 'warmup_steps' not in line


def test_only_losses_of_known_scale_are_judged():
  """Those of other methods are squares with large weights."""
  watcher = make('mixmatch')
  for step in range(1, 401):
    watcher.step(step, step_metrics(0, unlabeled_loss=1e4), lambda: None)
  assert watcher.warnings == []


def test_steps_that_are_not_finite_do_not_hide_the_others():
  watcher = make()
  feed(watcher, 1, 40, labeled_loss=lambda s: 4.0 if s % 3 else math.nan)
  assert 'labeled_loss is 4,' in watcher.warnings[0]


def test_warnings_survive_a_new_start(capfd):
  first = make()
  feed(first, 1, 110, largest_class=1.0)
  second = make(state=json.loads(json.dumps(first.state())))
  assert second.warnings == first.warnings != []
  capfd.readouterr()
  feed(second, 111, 120, largest_class=1.0)
  assert capfd.readouterr().err == ''
  feed(second, 121, 140, labeled_loss=4.0)
  assert '(lowest so far: 0.5)' in second.warnings[1]


def test_step_is_looked_at_once():
  watcher = make()
  metrics = step_metrics(0, **HEALTHY)
  watcher.look(1, metrics)
  before = watcher.state()
  watcher.step(1, metrics, lambda: None)
  assert watcher.state() == before
  watcher.step(2, metrics, lambda: None)
  assert watcher.state()['looks'] == 2


def test_learning_rate_may_climb_first():
  watcher = make()
  watcher._config.warmup_steps = 100
  feed(watcher, 1, 100, largest_class=1.0)
  assert watcher.warnings == []
  feed(watcher, 101, 120, largest_class=1.0)
  assert len(watcher.warnings) == 1


def test_loss_is_compared_with_its_lowest_block():
  watcher = make()
  feed(watcher, 1, 60, labeled_loss=lambda s: (0.5, 1.5, 2.4)[(s - 1) // 20])
  assert '2.4, above the 2.3' in watcher.warnings[0]


def test_loss_that_falls_from_large_logits_is_left_alone(capfd):
  """As of fast networks: 2.9, then 1.5, is above log 2 and yet healthy."""
  watcher = make(shares=(0.5, 0.5))
  feed(watcher, 1, 20, labeled_loss=2.9)
  feed(watcher, 21, 40, labeled_loss=1.5)
  assert not watcher.warnings
  feed(watcher, 41, 60, labeled_loss=1.6)
  assert len(watcher.warnings) == 1


def test_shares_are_of_labels_and_of_known_truth():
  labels = np.array([0, 1, 0, 1, 1, 1, -1, -1])
  split = splits.Split(np.arange(4), np.arange(2, 8), np.arange(0))
  np.testing.assert_allclose(watch.class_shares(labels, split, 2), [0.25, 0.75])
  unknown = split._replace(unlabeled=np.array([6, 7]))
  np.testing.assert_allclose(watch.class_shares(labels, unknown, 2), [0.5, 0.5])


def test_diverging_run_stops_with_its_checkpoint(tmp_path, capfd):
  """Decay a million times as large as the weights breaks every step soon."""
  config = digits.get_config('method=supervised')
  config.model, config.steps = 'wrn_10_1', 40
  config.batch_size, config.unlabeled_batch_size = 8, 16
  config.learning_rate = config.weight_decay = 1e3
  config.max_skipped = 5
  config.log_every = config.checkpoint_every = config.eval_every = 4
  with pytest.raises(UserError, match='in a row whose numbers are not finite'):
    loop.train_and_evaluate(config, str(tmp_path))
  files = Workdir(str(tmp_path))
  assert files.has_steps()
  assert not files.has('result.json')
  assert files.metrics()[-1]['skipped_steps'] > 0
  assert 'steps were skipped' in capfd.readouterr().err
