"""Runs of the real program: their files, and that they resume exactly."""

from concurrent import futures
import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from typing import NamedTuple

import jax
import numpy as np
import pytest
from runs import (
  ROOT,
  STEPS,
  assert_same_run,
  command,
  environment,
  finished_run,
  hashes,
  interrupt,
  rows_of,
  run,
  saved_steps,
)

from flatmatch_jax import data
from flatmatch_jax.data import splits
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import load, setup


def run_on_terminal(folder, args):
  """The same on a terminal; returns the exit code and what it showed."""
  master, slave = pty.openpty()
  size = struct.pack('HHHH', 40, 200, 0, 0)
  fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
  process = subprocess.Popen(
    [sys.executable, *args],
    cwd=folder,
    env=environment(folder),
    stdin=slave,
    stdout=slave,
    stderr=slave,
  )
  os.close(slave)
  shown = b''
  with contextlib.suppress(OSError):  # Linux ends a terminal with an error.
    while chunk := os.read(master, 4096):
      shown += chunk
  os.close(master)
  return process.wait(timeout=600), shown.decode()


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
  return tmp_path_factory.getbasetemp()


@pytest.fixture(scope='session')
def finished(tmp_path_factory):
  return finished_run(tmp_path_factory)[0]


@pytest.fixture(scope='module')
def final_state(finished):
  return load.load_run(Workdir(finished)).state


# A finished run.


def test_result_has_its_fields(finished):
  result = json.loads((finished / 'result.json').read_text())
  errors = [row['error'] for row in rows_of(finished) if 'error' in row]
  expected = {
    'dataset': 'digits',
    'method': 'flatmatch_e',
    'labels': 40,
    'seed': 1,
    'split_seed': 0,
    'steps': STEPS,
    'skipped_steps': 0,
    'warnings': [],
    'error_last': errors[-1],
    'error_median20': float(np.median(errors)),
    'error_best': min(errors),
    'evaluations': len(errors),
  }
  assert result.keys() == expected.keys() | {'seconds', 'images_per_second'}
  assert {key: result[key] for key in expected} == expected
  assert result['seconds'] > 0
  assert result['images_per_second'] > 0


def test_errors_are_percent_of_the_test_images(finished):
  """16 steps teach next to nothing: a fraction would be below one."""
  for row in rows_of(finished):
    for key in {'error', 'error_raw'} & row.keys():
      assert 1 < row[key] <= 100
      wrong = row[key] * 360 / 100
      assert wrong == pytest.approx(round(wrong), abs=1e-9)


def test_metrics_hold_the_diagnostics(finished):
  rows = rows_of(finished)
  assert [row['step'] for row in rows] == list(range(2, STEPS + 1, 2))
  diagnostics = {
    'labeled_loss',
    'unlabeled_loss',
    'worst_loss',
    'gradient_norm',
    'used_fraction',
    'pseudo_label_accuracy',
    'threshold',
    'class_histogram',
    'learning_rate',
  }
  for row in rows:
    assert diagnostics <= row.keys()
    evaluated = row['step'] % 4 == 0
    assert ({'error', 'error_raw'} <= row.keys()) == evaluated
    assert len(row['class_histogram']) == 10
    assert sum(row['class_histogram']) == pytest.approx(1)
    assert 0 <= row['used_fraction'] <= 1
    cosine = 0.03 * np.cos(7 * np.pi / 16 * (row['step'] - 1) / STEPS)
    assert row['learning_rate'] == pytest.approx(cosine, rel=1e-5)


def test_log_has_errors_where_they_were_measured(tmp_path_factory):
  _, log = finished_run(tmp_path_factory)
  lines = re.findall(rf'step (\d+)/{STEPS} (.*)', log)
  assert [int(step) for step, _ in lines] == list(range(2, STEPS + 1, 2))
  assert all(('error%' in text) == (int(step) % 4 == 0) for step, text in lines)
  assert f'median of the last {STEPS // 4} evaluations' in log


def test_description_files(finished):
  config = json.loads((finished / 'config.json').read_text())
  assert config['method'] == 'flatmatch_e'
  assert config['steps'] == STEPS
  assert config['recipe_args']['rho'] == 0.05
  found = json.loads((finished / 'versions.json').read_text())
  assert found['jax'] == jax.__version__
  assert found['numpy'] == np.__version__


def test_split_is_the_drawn_one(finished):
  split = json.loads((finished / 'split.json').read_text())
  labels = data.load('digits').train_labels
  assert split['labeled'] == splits.balanced(labels, 40, 0, 10).tolist()
  assert split['split_seed'] == 0
  assert split['per_class'] == [4] * 10


def test_tensorboard_shows_the_metrics(finished):
  from tensorboard.backend.event_processing import event_accumulator
  from tensorboard.util import tensor_util

  events = event_accumulator.EventAccumulator(
    str(finished / 'tensorboard'), size_guidance={'tensors': 0}
  )
  events.Reload()
  shown = {
    tag: {
      event.step: float(tensor_util.make_ndarray(event.tensor_proto))
      for event in events.Tensors(tag)
    }
    for tag in events.Tags()['tensors']
  }
  logged = {}
  for row in rows_of(finished):
    for key, value in row.items():
      if isinstance(value, float):
        logged.setdefault(key, {})[row['step']] = float(np.float32(value))
  assert {'labeled_loss', 'worst_loss', 'error', 'error_raw'} <= logged.keys()
  assert shown.pop('images_per_second').keys() == logged['labeled_loss'].keys()
  assert shown == logged


def test_log_has_a_line_per_interval(tmp_path_factory):
  _, log = finished_run(tmp_path_factory)
  assert '\r' not in log
  shown = re.findall(rf'^.* step (\d+)/{STEPS} .*$', log, re.M)
  assert [int(step) for step in shown] == list(range(2, STEPS + 1, 2))
  for line in re.findall(rf'^.* step \d+/{STEPS} .*$', log, re.M):
    assert re.search(
      r'\bloss -?[\d.]+ .*\d+ images/s, \d+:\d\d:\d\d left', line
    )
  assert 'The labeled images stay in the unlabeled pool' in log


def test_latest_and_best_checkpoints_are_kept(finished):
  errors = {r['step']: r['error'] for r in rows_of(finished) if 'error' in r}
  steps = saved_steps(finished)
  assert steps[-1] == STEPS
  best = load.load_run(Workdir(finished), 'best').state
  assert int(best.step) in steps
  assert errors[int(best.step)] == min(errors.values())


# One run through all that can happen to it, and second starts of finished ones.


class Stop(NamedTuple):
  """How a process ended, and a copy of the workdir as it left it."""

  code: int
  stderr: str
  then: pathlib.Path


def live_through(folder, workdir):
  """Kills a run, goes on, terminates it, goes on, presses Ctrl-C, goes on.

  The start after SIGTERM has other values of the fields that may change, and
  the last start is on a terminal. Returns the stops by signal, and the output
  of the last start.
  """
  free = ('--config.checkpoint_every=50', '--config.data_dir=/elsewhere')
  starts = (
    (signal.SIGKILL, 9, ()),  # Before that step is saved.
    (signal.SIGTERM, 4, ()),
    (signal.SIGINT, 3, free),
  )
  stops = {}
  for number, steps, args in starts:
    found = interrupt(folder, command(workdir, *args), steps, number)
    then = folder / f'after-{number.name}'
    shutil.copytree(workdir, then)
    stops[number] = Stop(*found, then)
  code, shown = run_on_terminal(folder, command(workdir))
  assert code == 0, shown
  return stops, shown


FIXED = (
  '--config.recipe_args.pretrain_steps=6',
  '--config.recipe_args.num_fixed=60',
)


def fix_labels(folder):
  """A run that fixes labels, and one that dies before and after it does."""
  config = f'--config={ROOT}/configs/digits.py:method=flatmatch_fix'
  whole = folder / 'fixed'
  done = run(folder, command(whole, *FIXED, config=config))
  assert done.returncode == 0, done.stderr
  args = command(folder / 'fixed-twice', *FIXED, config=config)
  for steps, number in ((5, signal.SIGTERM), (8, signal.SIGKILL)):
    interrupt(folder, args, steps, number)
  again = run(folder, args)
  assert again.returncode == 0, again.stderr
  return done.stderr, again.stderr


@pytest.fixture(scope='session')
def jobs(folder, finished):
  """All further processes, two at a time: mostly they start up, on one core.

  They come after `finished`, which fills the cache of compiled programs. Of the
  session: a worker that steals a test may come back to this module.
  """
  shutil.copytree(finished, folder / 'again')
  shutil.copytree(finished, folder / 'no-result')
  (folder / 'no-result' / 'result.json').unlink()
  labels = data.load('digits').train_labels
  chosen = splits.balanced(labels, 20, 7, 10).tolist()
  (folder / 'mine.json').write_text(json.dumps(chosen))
  from_file = command(
    folder / 'from-file',
    '--config.steps=2',
    f'--config.labels_file={folder / "mine.json"}',
    config=f'--config={ROOT}/configs/digits.py:method=supervised,labels=20',
  )
  held_out = command(
    folder / 'held-out',
    '--config.num_val=50',
    '--config.imbalance=3',
    '--config.unlabeled_imbalance=2',
    config=f'--config={ROOT}/configs/digits.py:method=fixmatch',
  )
  with futures.ThreadPoolExecutor(2) as pool:
    yield {
      'lived': pool.submit(live_through, folder, folder / 'lived'),
      'again': pool.submit(run, folder, command(folder / 'again')),
      'no-result': pool.submit(run, folder, command(folder / 'no-result')),
      'from-file': pool.submit(run, folder, from_file),
      'held-out': pool.submit(run, folder, held_out),
      'fixed': pool.submit(fix_labels, folder),
    }


def test_kill_leaves_the_last_checkpoint(jobs):
  stop = jobs['lived'].result()[0][signal.SIGKILL]
  assert stop.code == -signal.SIGKILL
  assert not (stop.then / 'result.json').exists()
  # The one of step 6 may be lost, being written; that of 4 may not.
  last = saved_steps(stop.then)[-1]
  assert last in (4, 6)
  # There is a row that the next start has to forget.
  assert rows_of(stop.then)[-1]['step'] > last


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_says_so(jobs, number):
  stop = jobs['lived'].result()[0][number]
  assert stop.code == 128 + number
  assert 'Traceback' not in stop.stderr
  step = int(re.search(r'step (\d+) is saved', stop.stderr)[1])
  assert saved_steps(stop.then)[-1] == step
  assert 'same command' in stop.stderr
  at_once = 'Stopping when this step is saved; again ends at once.'
  assert stop.stderr.index(at_once) < stop.stderr.index('is saved. The')
  assert not (stop.then / 'result.json').exists()


def test_every_start_goes_on_from_the_last_checkpoint(jobs):
  stops, shown = jobs['lived'].result()
  said = [stops[signal.SIGTERM].stderr, stops[signal.SIGINT].stderr, shown]
  for stop, next_said in zip(stops.values(), said, strict=True):
    start = saved_steps(stop.then)[-1]
    assert f'Going on from step {start} of {STEPS}' in next_said


def test_resume_is_exact(jobs, folder, finished, final_state):
  """After kill -9, SIGTERM and Ctrl-C the same bits as without them."""
  jobs['lived'].result()
  assert_same_run(folder / 'lived', finished, final_state)


def test_seconds_add_up_over_starts(jobs, folder):
  """The time before the signal counts, or resumed runs would look fast."""
  stops, _ = jobs['lived'].result()
  seconds = [seconds_of(stop.then) for stop in stops.values()]
  result = json.loads((folder / 'lived' / 'result.json').read_text())
  seconds.append(result['seconds'])
  assert seconds == sorted(seconds)


def seconds_of(workdir):
  step = saved_steps(workdir)[-1]
  notes = workdir / 'checkpoints' / str(step) / 'notes' / 'metadata'
  return json.loads(notes.read_text())['seconds']


def test_terminal_shows_a_bar(jobs):
  stops, shown = jobs['lived'].result()
  bars = [line for line in re.split(r'[\r\n]+', shown) if '%|' in line]
  start = saved_steps(stops[signal.SIGINT].then)[-1]
  assert f' {start}/{STEPS} ' in bars[0]
  assert f' {STEPS}/{STEPS} ' in bars[-1]
  assert re.search(r'\d+ images/s', bars[-1])
  assert re.search(r'loss -?\d', bars[-1])
  assert re.search(r'error% \d', bars[-1])
  assert re.search(r'\d\d:\d\d<', bars[-1])  # Time taken < time left.
  assert not re.search(rf'step \d+/{STEPS}', shown)  # No lines beside it.


def test_run_without_tensorflow_says_so(jobs):
  stops, _ = jobs['lived'].result()
  assert 'No TensorBoard events: no tensorflow' in stops[signal.SIGINT].stderr


def test_finished_run_is_not_trained_again(jobs, folder, finished):
  done = jobs['again'].result()
  assert done.returncode == 0, done.stderr
  result = json.loads((finished / 'result.json').read_text())
  assert f'test error {result["error_last"]:.2f}% last' in done.stderr
  assert not re.search(rf'step \d+/{STEPS}', done.stderr)
  assert hashes(folder / 'again') == hashes(finished)


def test_kill_before_the_result_loses_nothing(
  jobs, folder, finished, final_state
):
  """The last checkpoint is there; the result can be made from the log."""
  done = jobs['no-result'].result()
  assert done.returncode == 0, done.stderr
  assert_same_run(folder / 'no-result', finished, final_state)


def test_another_config_is_refused(folder, finished):
  before = hashes(finished)
  args = command(finished, '--config.steps=20', '--config.recipe_args.rho=0.1')
  done = run(folder, args)
  assert done.returncode == 2
  assert done.stderr.startswith('error: ')
  assert done.stderr.count('\n') == 1
  assert f'steps ({STEPS} there, 20 now)' in done.stderr
  assert 'recipe_args.rho (0.05 there, 0.1 now)' in done.stderr
  assert str(finished) in done.stderr
  assert hashes(finished) == before


def test_labels_are_read_from_a_file(jobs, folder):
  done = jobs['from-file'].result()
  assert done.returncode == 0, done.stderr
  chosen = json.loads((folder / 'mine.json').read_text())
  split = json.loads((folder / 'from-file' / 'split.json').read_text())
  assert split['labeled'] == chosen
  assert split['source'] == str(folder / 'mine.json')
  assert split['split_seed'] is None
  result = json.loads((folder / 'from-file' / 'result.json').read_text())
  assert result['labels'] == 20


def test_checkpoint_is_chosen_by_images_held_out(jobs, folder):
  done = jobs['held-out'].result()
  assert done.returncode == 0, done.stderr
  workdir = folder / 'held-out'
  split = json.loads((workdir / 'split.json').read_text())
  assert len(split['validation']) == 50
  for parts in ('per_class', 'unlabeled_per_class'):
    assert split[parts] == sorted(split[parts], reverse=True)
    assert split[parts][0] > split[parts][-1]
  rows = [row for row in rows_of(workdir) if 'error' in row]
  # Of equally good ones the last is kept.
  chosen = min(reversed(rows), key=lambda row: row['val_error'])
  result = json.loads((workdir / 'result.json').read_text())
  assert result['val_error_best'] == chosen['val_error']
  assert result['error_selected'] == chosen['error']
  best = load.load_run(Workdir(workdir), 'best').state
  assert int(best.step) == chosen['step']
  assert '50 for validation' in done.stderr
  labels = data.load('digits').train_labels
  truth = labels[split['validation']]
  # 50 images: the error is a multiple of 2%.
  assert all(row['val_error'] % 2 == 0 for row in rows)
  assert len(np.unique(truth)) == 10


def test_fixed_labels_survive_a_resume(jobs, folder):
  once, again = jobs['fixed'].result()
  assert 'Fixed the labels of 60 unlabeled images' in once
  whole, twice = folder / 'fixed', folder / 'fixed-twice'
  final = load.load_run(Workdir(whole)).state
  assert_same_run(twice, whole, final)
  fixed = (whole / 'fixed.json').read_text()
  assert (twice / 'fixed.json').read_text() == fixed
  chosen = json.loads(fixed)
  labels = data.load('digits').train_labels
  labeled = json.loads((whole / 'split.json').read_text())['labeled']
  assert not set(chosen['index']) & set(labeled)
  right = np.array(chosen['label']) == labels[chosen['index']]
  assert chosen['accuracy'] == round(100 * right.mean(), 2)
  assert 'Fixed the labels' not in again  # They were read.


def test_split_of_another_run_is_a_labels_file(jobs, folder):
  jobs['from-file'].result()
  config = Workdir(folder / 'finished').config()
  config.labels = 20
  config.labels_file = str(folder / 'from-file' / 'split.json')
  split = setup.choose_split(config, data.load('digits'))
  assert split.labeled.tolist() == json.loads(
    (folder / 'mine.json').read_text()
  )
