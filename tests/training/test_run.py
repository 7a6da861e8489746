"""Runs: their files, and starts of those that have begun or finished."""

import json
import pathlib
import re
import shutil

from conftest import make_config
import jax
import numpy as np
import pytest
from runs import (
  STEPS,
  assert_same_run,
  finished_run,
  hashes,
  rows_of,
  saved_steps,
)

from flatmatch_jax import data
from flatmatch_jax.data import splits
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import load, loop, setup
from flatmatch_jax.types import UserError


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  return finished_run(tmp_path_factory)[0]


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
  assert 'median' not in log  # Of the whole run it would say nothing.
  shown = re.findall(rf'^.* step (\d+)/{STEPS} .*$', log, re.M)
  assert [int(step) for step in shown] == list(range(2, STEPS + 1, 2))
  for line in re.findall(rf'^.* step \d+/{STEPS} .*$', log, re.M):
    assert re.search(
      r'\bloss -?[\d.]+ .*\d+ images/s, \d+:\d\d:\d\d left', line
    )
    step = int(re.search(r'step (\d+)/', line)[1])
    assert ('error%' in line) == (step % 4 == 0)
  assert 'The labeled images stay in the unlabeled pool' in log


def test_latest_and_best_checkpoints_are_kept(finished):
  errors = {r['step']: r['error'] for r in rows_of(finished) if 'error' in r}
  steps = saved_steps(finished)
  assert steps[-1] == STEPS
  best = load.load_run(Workdir(finished), 'best').state
  assert int(best.step) in steps
  assert errors[int(best.step)] == min(errors.values())


# Runs in this process, of a tiny network.


@pytest.fixture(scope='module')
def folder(tmp_path_factory, tiny_network):
  return tmp_path_factory.mktemp('runs')


def train(folder, name, method='pseudo_label', **changes):
  config = make_config(method, **changes)
  loop.train_and_evaluate(config, str(folder / name))
  return Workdir(str(folder / name))


@pytest.fixture(scope='module')
def done(folder):
  return train(folder, 'done').path


@pytest.fixture
def again(done, tmp_path):
  return pathlib.Path(shutil.copytree(done, tmp_path / 'again'))


def test_finished_run_is_not_trained_again(again, done, capfd):
  train(again.parent, 'again')
  said = capfd.readouterr().err
  result = json.loads((done / 'result.json').read_text())
  assert f'test error {result["error_last"]:.2f}% last' in said
  assert 'step ' not in said
  assert hashes(again) == hashes(done)


def test_kill_before_the_result_loses_nothing(again, done):
  """The last checkpoint is there; the result can be made from the log."""
  (again / 'result.json').unlink()
  train(again.parent, 'again')
  final = load.load_run(Workdir(done)).state
  assert_same_run(again, done, final, steps=6)


def test_another_config_is_refused(again, done):
  with pytest.raises(UserError, match=r'steps \(6 there, 20 now\)'):
    train(again.parent, 'again', steps=20)
  assert hashes(again) == hashes(done)


def test_terminal_shows_a_bar(folder, stopped_after, monkeypatch, capsys):
  stopped_after(5, train, folder, 'bar')
  capsys.readouterr()
  monkeypatch.setattr('sys.stderr.isatty', lambda: True)
  train(folder, 'bar')
  shown = capsys.readouterr().err
  bars = [line for line in re.split(r'[\r\n]+', shown) if '%|' in line]
  assert ' 4/6 ' in bars[0]
  assert ' 6/6 ' in bars[-1]
  assert re.search(r'\d+ images/s', bars[-1])
  assert re.search(r'loss -?\d.*error% \d', bars[-1])
  assert re.search(r'\d\d:\d\d<', bars[-1])  # Time taken < time left.
  assert not re.search(r'step \d+/6', shown)  # No lines beside it.


def test_labels_are_read_from_a_file_or_another_split(folder):
  labels = data.load('digits').train_labels
  chosen = splits.balanced(labels, 40, 7, 10).tolist()
  path = folder / 'mine.json'
  path.write_text(json.dumps(chosen))
  split = train(folder, 'from-file', labels_file=str(path)).read('split.json')
  assert split['labeled'] == chosen
  assert split['source'] == str(path)
  assert split['split_seed'] is None
  config = make_config(labels_file=str(folder / 'from-file' / 'split.json'))
  found = setup.choose_split(config, data.load('digits'))
  assert found.labeled.tolist() == chosen


def test_checkpoint_is_chosen_by_images_held_out(folder, capfd):
  uneven = {'imbalance': 3.0, 'unlabeled_imbalance': 2.0}
  files = train(folder, 'held-out', num_val=50, **uneven)
  split, result = files.read('split.json'), files.read('result.json')
  assert len(split['validation']) == 50
  for parts in ('per_class', 'unlabeled_per_class'):
    assert split[parts] == sorted(split[parts], reverse=True)
    assert split[parts][0] > split[parts][-1]
  rows = [row for row in files.metrics() if 'error' in row]
  # Of equally good ones the last is kept.
  chosen = min(reversed(rows), key=lambda row: row['val_error'])
  assert result['val_error_best'] == chosen['val_error']
  assert result['error_selected'] == chosen['error']
  assert int(load.load_run(files, 'best').state.step) == chosen['step']
  assert '50 for validation' in capfd.readouterr().err
  # 50 images: the error is a multiple of 2%.
  assert all(row['val_error'] % 2 == 0 for row in rows)
  truth = data.load('digits').train_labels[split['validation']]
  assert len(np.unique(truth)) == 10


def test_fixed_labels_survive_a_resume(folder, stopped_after, capfd):
  config = make_config('pseudo_label+flatmatch_fix')
  config.recipe_args.update(pretrain_steps=3, num_fixed=60)
  run = lambda name: loop.train_and_evaluate(config, str(folder / name))
  run('fixed')
  assert 'Fixed the labels of 60 unlabeled images' in capfd.readouterr().err
  for steps in (3, 3):  # Before they are fixed, and after.
    stopped_after(steps, run, 'twice')
  capfd.readouterr()
  run('twice')
  assert 'Fixed the labels' not in capfd.readouterr().err  # They were read.
  whole, twice = Workdir(folder / 'fixed'), Workdir(folder / 'twice')
  final = load.load_run(whole).state
  assert_same_run(twice.path, whole.path, final, steps=6)
  chosen = whole.read('fixed.json')
  assert twice.read('fixed.json') == chosen
  assert not set(chosen['index']) & set(whole.read('split.json')['labeled'])
  labels = data.load('digits').train_labels
  right = np.array(chosen['label']) == labels[chosen['index']]
  assert chosen['accuracy'] == round(100 * right.mean(), 2)
