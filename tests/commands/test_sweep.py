"""Sweeps: their members are the runs that they stand for."""

import os
import shutil
import signal
import sys
import types

from absl import flags
from conftest import make_config
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from flatmatch_jax import data as data_lib
from flatmatch_jax import methods, sweep
from flatmatch_jax.data import resident
from flatmatch_jax.run import progress, reference, watch
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import cli
from flatmatch_jax.training import load, loop, setup, stacked, traced
from flatmatch_jax.types import UserError

STEPS = 6
# Two a device where there are four, three places filled up.
SETTINGS = {
  'recipe_args.rho': [0.01, 0.5],
  'method_args.threshold': [0.2],
  'seeds': [0, 1, 2],
}
# Float rounding of six steps: a member is batched otherwise than a run, and
# 1 - decay is taken in float32. Parameters are of order 0.1 to 1.
TOLERANCE = {'rtol': 1e-4, 'atol': 1e-5}


pytestmark = pytest.mark.usefixtures('tiny_network')


def state_of(files):
  state = load.load_run(files).state
  return state.replace(rng=jax.random.key_data(state.rng))


def raw(state):
  return {
    jax.tree_util.keystr(path): np.asarray(leaf)
    for path, leaf in jax.tree.leaves_with_path(state)
  }


@pytest.fixture(scope='module')
def swept(tmp_path_factory, tiny_network):
  folder = tmp_path_factory.mktemp('sweep')
  return sweep.sweep(make_config(), str(folder), SETTINGS, at_once=8)


# The members.


@pytest.mark.parametrize('which', [0, -1])
def test_member_equals_its_single_run(swept, which, tmp_path):
  member = swept[which]
  config = make_config()
  config.seed = config.split_seed = member.settings['seed']
  config.recipe_args.rho = member.settings['recipe_args.rho']
  config.method_args.threshold = 0.2
  loop.train_and_evaluate(config, str(tmp_path))
  single = Workdir(str(tmp_path))
  for name in ('config.json', 'split.json', 'dataset.json', 'versions.json'):
    assert member.files.read(name) == single.read(name), name
  theirs = raw(state_of(single))
  for name, ours in raw(state_of(member.files)).items():
    np.testing.assert_allclose(ours, theirs[name], **TOLERANCE, err_msg=name)
  rows = zip(member.files.metrics(), single.metrics(), strict=True)
  for ours, theirs in rows:
    assert ours.keys() == theirs.keys()
    assert ours['step'] == theirs['step']
    for key in ours:
      if 'loss' in key or 'sharpness' in key or key == 'learning_rate':
        assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
  ours, theirs = (f.read('result.json') for f in (member.files, single))
  assert ours.keys() == theirs.keys()
  assert ours['error_last'] == pytest.approx(theirs['error_last'], abs=0.6)


def test_members_differ(swept):
  """Else the comparison above would say nothing."""
  kernels = [state_of(m.files).params['classifier']['kernel'] for m in swept]
  for i, a in enumerate(kernels):
    for b in kernels[:i]:
      assert np.abs(a - b).max() > 100 * TOLERANCE['atol']


def test_each_member_has_the_files_of_a_run(swept):
  assert len(swept) == 6
  names = sorted(m.files.path.name for m in swept)
  assert names[0] == 'rho=0.01-threshold=0.2-seeds=0'
  for member in swept:
    files = {path.name for path in member.files.path.iterdir()}
    assert {'result.json', 'curves.png', 'checkpoints'} <= files
    steps = [row['step'] for row in member.files.metrics()]
    assert steps == [2, 3, 4, 5, 6]
    assert member.files.config().recipe_args.rho in (0.01, 0.5)


def test_table_has_a_line_for_each_setting(swept):
  lines = sweep.describe(swept).splitlines()
  errors = [m.files.read('result.json')['error_last'] for m in swept[:3]]
  assert len(lines) == 2
  assert lines[0].startswith(
    'recipe_args.rho=0.01 method_args.threshold=0.2: error_last '
    f'{np.mean(errors):.2f} ± {np.std(errors, ddof=1):.2f} ('
  )


def test_member_that_stops_is_named_and_leaves_the_others_alone(
  tmp_path, monkeypatch, capsys
):
  """By the command; started again it stops where it did before."""
  monkeypatch.setattr(sweep.config_lib, 'check', lambda config: None)
  config = make_config('supervised', eval_every=4, probe_every=0)
  config.max_skipped = 1
  rates = ['0.05', '1e30', '0.1']
  step, counted = progress.Progress.step, []
  monkeypatch.setattr(
    progress.Progress,
    'step',
    lambda self: (step(self), counted.append(self.runs)),
  )
  given = types.SimpleNamespace(
    config=config,
    workdir=str(tmp_path),
    set=[f'learning_rate={",".join(rates)}'],
    seeds=[],
    at_once=3,
  )
  monkeypatch.setattr(flags, 'FLAGS', given)
  for attempt in range(2):
    with pytest.raises(UserError, match=r'1 of 3 .*: learning_rate=1e\+30\.'):
      sweep.main([])
    out, said = capsys.readouterr()
    assert 'learning_rate=1e+30: Step ' in said
    assert 'is the last of 2 in a row' in said
    assert 'config.max_skipped=1' in said
    assert (tmp_path / 'table.txt').read_text() == out
    assert f'flatmatch_jax.report --workdir {tmp_path}' in said
    lines = out.splitlines()
    assert [': error_last ' in line for line in lines] == [True, False, True]
    assert lines[1].endswith('not measured; stopped: learning_rate=1e+30')
    assert ('0 of them finished' in said) == (attempt == 0)
    if attempt == 0:  # Its images count until it stops.
      assert len(counted) == STEPS
      assert counted == sorted(counted, reverse=True)
      assert set(counted) == {2, 3}
  names = [f'learning_rate={float(rate)}' for rate in rates]
  done = [(tmp_path / name / 'result.json').exists() for name in names]
  assert done == [True, False, True]
  assert Workdir(str(tmp_path / names[1])).metrics()[-1]['step'] < STEPS


def test_members_are_traced_and_compared_with_earlier_runs(
  tmp_path, monkeypatch, capsys
):
  band = reference.Band([50.0, 51.0, 52.0], [7, 8, 9], 0.1)
  monkeypatch.setattr(reference, 'find', lambda *args: {4: band})
  config = make_config('supervised', steps=4, eval_every=4, probe_every=0)
  config.profile_steps = 1
  sweep.sweep(config, str(tmp_path), {'seed': [0, 1]}, at_once=2)
  said = capsys.readouterr().err
  for seed in (0, 1):
    assert f'seed={seed}: step 4 has a test error of' in said
  assert said.count('Steps 3 to 3 are traced') == 1
  assert list(tmp_path.glob('seed=0/tensorboard/plugins/profile/*/*.json.gz'))


def test_speed_is_of_the_members_that_go_on(tmp_path, monkeypatch):
  now = [0.0]
  clock = types.SimpleNamespace(perf_counter=lambda: now[0])
  monkeypatch.setattr(progress, 'time', clock)
  monkeypatch.setattr(progress, '_tensorboard_writers', lambda _: [None] * 2)
  shown = progress.Progress([Workdir(str(tmp_path))] * 2, 0, 9, images=10)
  now[0] = 5.0
  shown.start()
  for shown.runs in (2, 1):
    shown.step()
    now[0] += 1.0
  assert shown.images_per_second() == (20 + 10) / 2


def test_request_to_stop_is_kept_when_the_last_member_stops(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(sweep.config_lib, 'check', lambda config: None)
  still_live = loop.still_live

  def interrupted(*args):
    if not (live := still_live(*args)):
      os.kill(os.getpid(), signal.SIGTERM)
    return live

  monkeypatch.setattr(loop, 'still_live', interrupted)
  config = make_config('supervised', eval_every=4, probe_every=0)
  config.max_skipped = 0
  rates = {'learning_rate': [1e30, 2e30]}
  with pytest.raises(SystemExit) as end:
    sweep.sweep(config, str(tmp_path), rates, at_once=2)
  assert end.value.code == 128 + signal.SIGTERM
  saved = max(int(path.name) for path in tmp_path.glob('*/checkpoints/*'))
  assert f'step {saved} is saved' in capsys.readouterr().err


def test_request_to_stop_in_the_last_step_is_kept(
  tmp_path, monkeypatch, capsys
):
  """The members of that stack are done; those of the next have not begun."""
  step = progress.Progress.step
  taken = []

  def interrupted(self):
    step(self)
    taken.append(self)
    if len(taken) == STEPS:
      os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(progress.Progress, 'step', interrupted)
  config = make_config('supervised', eval_every=STEPS, probe_every=0)
  seeds = {'seed': list(range(2 * jax.device_count()))}
  with pytest.raises(SystemExit) as end:
    sweep.sweep(config, str(tmp_path), seeds)
  assert end.value.code == 128 + signal.SIGTERM
  done = list(tmp_path.glob('*/result.json'))
  assert len(taken) == STEPS
  assert len(done) == jax.device_count()
  assert f'step {STEPS} is saved' in capsys.readouterr().err


def test_run_that_stops_does_not_end_the_sweep(tmp_path, monkeypatch, capsys):
  """Of those that are not stacked."""
  began = []

  def run(config, workdir):
    began.append(workdir)
    raise watch.NotFiniteError('Step 7 is the last.')

  monkeypatch.setattr(loop, 'train_and_evaluate', run)
  config = make_config('pseudo_label+flatmatch_fix')
  config.recipe_args.update(pretrain_steps=2, num_fixed=60)
  members = sweep.sweep(config, str(tmp_path), {'seed': [0, 1]})
  assert began == [str(m.files.path) for m in members]
  assert 'seed=1: Step 7 is the last.' in capsys.readouterr().err


# Going on.


def test_resumed_sweep_equals_the_whole(swept, tmp_path, stopped_after):
  """Also where the process died when only some had saved their last step."""
  args = make_config(), str(tmp_path), SETTINGS, 8
  stopped_after(5, sweep.sweep, *args)
  late = tmp_path / swept[1].files.path.name / 'checkpoints'
  steps = sorted(int(path.name) for path in late.iterdir())
  assert steps[-1] == 4
  shutil.rmtree(late / '4')
  members = sweep.sweep(*args)
  for ours, theirs in zip(members, swept, strict=True):
    assert ours.files.metrics() == theirs.files.metrics()
    other = raw(state_of(theirs.files))
    for name, leaf in raw(state_of(ours.files)).items():
      assert leaf.tobytes() == other[name].tobytes(), name


def test_finished_members_are_not_trained_again(swept, monkeypatch):
  monkeypatch.setattr(stacked, 'train_all', None)
  folder = str(swept[0].files.path.parent)
  again = sweep.sweep(make_config(), folder, SETTINGS)
  assert [m.files.path for m in again] == [m.files.path for m in swept]


# What is stacked with what.


@pytest.mark.parametrize(
  ('count', 'at_once', 'devices', 'size'),
  [
    (6, 6, 1, 6),
    (6, 4, 1, 3),  # Twice three, not four and two.
    (6, 100, 1, 6),
    (6, 1, 1, 1),
    (6, 6, 4, 8),
    (6, 1, 4, 4),  # A device that idles helps nobody.
    (6, None, 1, 1),  # The tests run on CPU.
    (9, None, 4, 4),
  ],
)
def test_size_of_stacks(count, at_once, devices, size):
  assert stacked.size_of_stack(count, at_once, devices) == size


@pytest.fixture
def trained(monkeypatch):
  """What would be trained: stacks with their traced settings, and runs."""
  calls = []

  def stack(members, chosen, dataset, names, at_once):
    del dataset, at_once
    assert len(members) == len(chosen)
    calls.append(([m.files.path.name for m in members], names))

  monkeypatch.setattr(stacked, 'train_all', stack)
  monkeypatch.setattr(
    loop, 'train_and_evaluate', lambda config, workdir: calls.append(workdir)
  )
  return calls


def test_settings_of_the_program_run_one_after_another(trained, tmp_path):
  sweep.sweep(
    make_config('supervised'),
    str(tmp_path),
    {'batch_size': [8, 16], 'learning_rate': ['0.1', '0.2'], 'seeds': [3]},
  )
  assert trained == [
    (
      [f'batch_size={b}-learning_rate={r}-seeds=3' for r in (0.1, 0.2)],
      ['learning_rate'],
    )
    for b in (8, 16)
  ]


def test_setting_that_python_looks_at_is_not_traced(trained, tmp_path):
  """The number of groups is a shape."""
  settings = {'recipe_args.groups': [1, 2], 'recipe_args.rho': [0.1, 0.2]}
  config = make_config('sam')
  config.batch_size = 16  # Two groups, each over eight devices.
  sweep.sweep(config, str(tmp_path), settings)
  assert trained == [
    ([f'groups={g}-rho={r}' for r in (0.1, 0.2)], ['recipe_args.rho'])
    for g in (1, 2)
  ]


def test_members_that_fix_labels_are_not_stacked_with_those_that_do_not(
  trained, tmp_path
):
  """With 40 labels none are fixed up to 40; no step reads the number."""
  config = make_config('pseudo_label+flatmatch_fix')
  config.recipe_args.pretrain_steps = 2
  sweep.sweep(config, str(tmp_path), {'recipe_args.num_fixed': [20, 60, 40]})
  assert trained == [
    str(tmp_path / 'num_fixed=60'),
    (['num_fixed=20', 'num_fixed=40'], ['recipe_args.num_fixed']),
  ]


# FreeMatch refuses bounds that cross, so it looks at them; memories have sizes.
LOOKED_AT = ('min_threshold', 'max_threshold', 'memory', 'queue')


@pytest.mark.parametrize('name', methods.METHODS)
def test_numbers_of_every_method_are_traced(name, monkeypatch):
  monkeypatch.setattr(
    'flatmatch_jax.data.augment.strong',
    lambda key, images, *args: images,
  )
  config = make_config(name)
  config.batch_size = config.unlabeled_batch_size = 8
  dataset = data_lib.from_config(config)
  split = setup.choose_split(config, dataset)
  names = ['learning_rate', 'weight_decay', 'ema_decay', 'bn_momentum']
  names += [
    f'method_args.{key}'
    for key, value in config.method_args.items()
    if not isinstance(value, str) and key not in LOOKED_AT
  ]
  assert traced.traceable(config, names, dataset, split) == names


def test_strong_views_of_members_are_those_of_single_runs():
  """RandAugment sorts images by operation; members must not mix."""
  rng = np.random.default_rng(0)
  data = resident.Data(
    jnp.asarray(rng.integers(0, 256, (20, 8, 8, 1)), jnp.uint8),
    jnp.arange(20) % 4,
    jnp.arange(4),
    jnp.arange(20),
  )
  sample = jax.jit(
    resident.make_sampler(4, 8, ('strong',), 1, True, (0,), (1,))
  )
  keys = jax.random.split(jax.random.key(0), 3)
  together = jax.jit(jax.vmap(sample, (None, 0)))(data, keys)
  for i, key in enumerate(keys):
    alone = sample(data, key)
    pairs = zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True)
    for ours, theirs in pairs:
      np.testing.assert_array_equal(ours[i], theirs)


# Wrong input.

WRONG = {
  'field': (
    ['--set=recipe_args.roh=1'],
    ["'recipe_args.roh'", 'recipe_args.rho'],
  ),
  'no list': (['--set=recipe_args.rho'], ['recipe_args.rho', 'FIELD=VALUE']),
  'field twice': (['--set=pad=1', '--set=pad=2'], ['pad=2', 'once']),
  'value twice': (
    ['--set=recipe_args.rho=0.1,0.10'],
    ['0.1,0.10', 'each once'],
  ),
  'not a number': (['--set=recipe_args.rho=big'], ['rho=big', 'float']),
  'more than a number': (['--set=mean=0.1'], ['mean=0.1', 'more than one']),
  'seeds twice': (['--seeds=0,1', '--set=seed=0,1'], ['seeds', 'seed']),
  'seed beyond': (['--seeds=0,-1'], ['-1', 'at least 0']),
  'method': (['--set=method=fixmatch'], ["'fixmatch'", 'FILE.py:method=']),
  'none at once': (['--seeds=1', '--at_once=0'], ['--at_once=0', 'at least 1']),
  'unknown flag': (['--atonce=2'], ['atonce']),
  'no workdir': (['--workdir=', '--seeds=1'], ['--workdir DIR']),
  'nothing to sweep': ([], ['--seeds', '--set']),
}


@pytest.mark.parametrize('args', WRONG)
def test_wrong_sweep_is_one_line(args, monkeypatch, tmp_path, capsys):
  given, named = WRONG[args]
  values = flags.FlagValues()
  sweep.define_flags(values)
  config = f'--config={digits.__file__}'
  monkeypatch.setattr(flags, 'FLAGS', values)
  monkeypatch.setattr(
    sys, 'argv', ['sweep', config, f'--workdir={tmp_path / "out"}', *given]
  )
  with pytest.raises(SystemExit) as ended, cli.errors_as_lines():
    sweep.main(cli.parse_flags(sys.argv))
  assert ended.value.code == 2
  out, error = capsys.readouterr()
  assert not out
  assert error.startswith('error: ')
  assert error.count('\n') == 1
  for text in named:
    assert text in error
  assert not (tmp_path / 'out').exists()


def test_other_values_of_a_member_are_refused(swept):
  folder = str(swept[0].files.path.parent)
  with pytest.raises(UserError, match='weight_decay'):
    sweep.sweep(make_config(weight_decay=0.1), folder, SETTINGS)
