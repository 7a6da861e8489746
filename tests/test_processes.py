"""Real processes on one machine, each with devices of its own, as one run."""

import json
import os

import numpy as np
import processes
import pytest

from flatmatch_jax.workdir import Workdir

STEPS = 8
CONFIG = (
  # Both kinds of state: the method's and the buffer of gradients; and no
  # strong views, which are slow to compile.
  f'--config={processes.ROOT}/configs/digits.py:'
  'method=pseudo_label+flatmatch_e,seed=1',
  f'--config.steps={STEPS}',
  '--config.model=wrn_10_1',  # Replaced by a smaller one.
  '--config.batch_size=8',
  '--config.unlabeled_batch_size=16',
  '--config.eval_batch_size=100',
  '--config.log_every=2',
  '--config.eval_every=4',
  '--config.checkpoint_every=3',
)


def command(workdir, *args):
  main = processes.ROOT / 'tests' / 'tiny_main.py'
  return [str(main), *CONFIG, f'--workdir={workdir}', *args]


@pytest.fixture(scope='module')
def env(tmp_path_factory):
  return processes.environment(tmp_path_factory.mktemp('processes'))


def metrics(workdir):
  return Workdir(str(workdir)).metrics()


def train(count, workdir, env, *args, devices=1):
  ended = processes.run(count, command(workdir, *args), env, devices)
  for process in ended:
    assert process.returncode == 0, process.stderr
  return ended


@pytest.fixture(scope='module')
def alone(env, tmp_path_factory):
  """The workdir of the run of one process with one device."""
  workdir = tmp_path_factory.mktemp('alone') / 'run'
  train(1, workdir, env)
  return workdir


@pytest.fixture(scope='module')
def two(env, tmp_path_factory):
  """The workdir of the run of two processes, and what each said."""
  workdir = tmp_path_factory.mktemp('two') / 'run'
  return workdir, train(2, workdir, env)


def assert_close(workdir, reference):
  """Equal but for rounding: sums over devices have another order."""
  rows, expected = metrics(workdir), metrics(reference)
  assert len(rows) == len(expected)
  for row, other in zip(rows, expected, strict=True):
    assert row.keys() == other.keys()
    for key, value in row.items():
      here, there = np.array((value, other[key]), float)  # None is NaN.
      np.testing.assert_allclose(here, there, 1e-4, 1e-6, err_msg=key)


def test_two_processes_equal_one(two, alone):
  assert_close(two[0], alone)


def test_evaluation_counts_each_example_once(two, alone):
  # 360 test images in four batches of 100, of which a process has 50 rows.
  errors = [row['error'] for row in metrics(two[0]) if 'error' in row]
  assert errors == [r['error'] for r in metrics(alone) if 'error' in r]
  assert all((3.6 * error) % 1 == pytest.approx(0) for error in errors)


def test_one_process_talks_and_writes_files(two, alone):
  workdir, (first, second) = two
  assert 'test error' in first.stderr
  assert all(
    line.startswith('[Gloo]') for line in second.stderr.split('\n')[:-1]
  )
  names = lambda folder: sorted(os.listdir(folder))
  assert names(workdir) == names(alone)
  assert names(workdir / 'checkpoints') == names(alone / 'checkpoints')
  result = json.loads((workdir / 'result.json').read_text())
  assert result['steps'] == STEPS
