"""Numbers that go wrong: steps are skipped, counted, and end a run in time."""

import math

from conftest import Setup
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from flatmatch_jax import methods, perturb, train, train_step, watch
from flatmatch_jax.recipes import RECIPES
from flatmatch_jax.types import UserError
from flatmatch_jax.workdir import Workdir


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


def test_too_many_in_a_row_name_step_metric_and_checkpoint():
  watcher = watch.Watch(steps=100, max_skipped=3)
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


def rows(watcher, start, stop, used, largest):
  for step in range(start, stop, 10):
    row = {'used_fraction': used, 'largest_class': largest}
    watcher.row(step, row | {'skipped_steps': 0})


@pytest.mark.parametrize(
  ('used', 'largest', 'words'),
  [(0.0, 0.3, 'none was used'), (0.9, 1.0, 'all were of one class')],
)
def test_collapse_for_long_is_told_once(used, largest, words, capfd):
  watcher = watch.Watch(steps=2000, max_skipped=0)
  rows(watcher, 10, 100, used, largest)
  rows(watcher, 100, 110, 0.5, 0.3)  # It recovers once.
  rows(watcher, 110, 210, used, largest)
  assert capfd.readouterr().err == ''
  rows(watcher, 210, 2000, used, largest)
  told = capfd.readouterr().err
  assert told.count('collapsed') == 1
  assert f'from step 110 to 210 {words}' in told


def test_collapse_of_a_short_part_of_a_long_run_is_not_told(capfd):
  watcher = watch.Watch(steps=100_000, max_skipped=0)
  rows(watcher, 10, 4000, 0.0, 0.3)
  assert capfd.readouterr().err == ''


def test_methods_without_pseudo_labels_are_left_alone(capfd):
  watcher = watch.Watch(steps=100, max_skipped=0)
  for step in range(100):
    watcher.row(step, {'skipped_steps': 0})
  watcher.row(100, {'skipped_steps': 2})
  assert '2 of 100 steps were skipped' in capfd.readouterr().err


def test_diverging_run_stops_with_its_checkpoint(tmp_path, capfd):
  """Decay a million times as large as the weights breaks every step soon."""
  config = digits.get_config('method=supervised')
  config.model, config.steps = 'wrn_10_1', 40
  config.batch_size, config.unlabeled_batch_size = 8, 16
  config.learning_rate = config.weight_decay = 1e3
  config.max_skipped = 5
  config.log_every = config.checkpoint_every = config.eval_every = 4
  with pytest.raises(UserError, match='in a row whose numbers are not finite'):
    train.train_and_evaluate(config, str(tmp_path))
  files = Workdir(str(tmp_path))
  assert files.has_steps()
  assert not files.has('result.json')
  assert files.metrics()[-1]['skipped_steps'] > 0
  assert 'steps were skipped' in capfd.readouterr().err
