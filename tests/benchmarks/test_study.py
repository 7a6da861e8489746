"""The study of CIFAR-10: its cells, records, tables and the runs it starts."""

import json
import pathlib
import sys
import time
import types
from typing import NamedTuple

import pytest
from scipy import stats

from benchmarks import cifar10_fast as study
from benchmarks import study_report
from configs import cifar10_fast
from flatmatch_jax.run.settings import as_dict
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.types import UserError


def test_study_pairs_seeds_of_equal_splits(tmp_path):
  row = lambda step, error: {'step': step, 'error': error}
  record = lambda name, *errors: (tmp_path / f'{name}.jsonl').write_text(
    '\n'.join(json.dumps(row(k, e)) for k, e in enumerate(errors))
  )
  record('freematch-250-0', 90.0, 50.0, 52.0)
  record('freematch-250-1', 90.0, 61.0, 60.0)
  record('flatmatch-250-0', 90.0, 50.0, 49.0)
  record('flatmatch-250-1', 90.0, 58.0, 58.0)
  runs = study_report.read(tmp_path)
  groups = study_report.group([cell.name for cell in study.cells()])
  text = study_report.table(runs, groups, 250)
  plain, flat = text.splitlines()[2:]
  assert plain.startswith('| freematch | 0, 1 | 56.00 ± 5.66 |')
  assert plain.endswith('| – |')
  low, high = stats.t.interval(0.95, 1, -2.5, 0.5)
  ending = f'| -2.50 ({low:+.2f} to {high:+.2f}) against freematch |'
  assert flat.endswith(ending)
  # A seed is one sample; a run without its partner is none.
  record('freematch-4000-0', 90.0, 40.0)
  record('flatmatch-4000-0', 90.0, 36.0)
  record('flatmatch-4000-1', 90.0, 10.0)
  text = study_report.pooled(study_report.read(tmp_path), groups)
  low, high = stats.t.interval(0.95, 1, -2.75, 0.75)  # Of -3.5 and -2.
  assert text.endswith(f': -2.75 ({low:+.2f} to {high:+.2f}). ')


def test_study_pairs_other_settings_with_their_own_method(tmp_path):
  names = ['freematch-250-0', 'flatmatch-250-0', 'flatmatch-250-0-rho=0.5']
  for name, error in zip(names, (60.0, 50.0, 51.0), strict=True):
    row = {'step': 1, 'error': error}
    (tmp_path / f'{name}.jsonl').write_text(json.dumps(row))
  groups = study_report.group(names)
  text = study_report.table(study_report.read(tmp_path), groups, 250)
  ends = [line.split('|')[-2].strip() for line in text.splitlines()[2:]]
  assert ends[1:] == ['-10.00 against freematch', '+1.00 against flatmatch']
  assert '| flatmatch, rho 0.5 |' in text


def test_study_draws_what_is_done_and_names_what_is_next(tmp_path):
  (tmp_path / 'images').mkdir()
  marks = '<!-- tables -->\nold\n<!-- end -->'
  (tmp_path / 'results.md').write_text(f'before\n{marks}\nafter\n')
  names = [cell.name for cell in study.cells()]
  record = tmp_path / 'records' / f'{names[0]}.jsonl'
  record.parent.mkdir()
  lines = {'core_hours': 0.25}, {'step': 1, 'error': 60.0}
  record.write_text('\n'.join(map(json.dumps, lines)))
  half = record.parent / f'{names[1]}.jsonl'
  half.write_text('{"step": 1, "error": 50.0}\n{"ste')
  (record.parent / 'other-250-0.jsonl').write_text(record.read_text())
  study_report.write(record.parent, tmp_path, names, names[:1])
  text = (tmp_path / 'results.md').read_text()
  assert text.startswith('before\n')
  assert text.endswith('\nafter\n')
  assert f'| {study.cells()[0].method} | 0 | 60.00 |' in text
  (row,) = json.loads((record.parent / 'summary.json').read_text())
  assert row == {
    'protocol': 'cifar10_fast',
    'method': study.cells()[0].method,
    'labels': 250,
    'seeds': [0],
    'error_mean': 60.0,
    'error_std': None,
    'core_hours': 0.25,
  }
  assert 'old' not in text
  assert (
    f'1 of the {len(names)} runs are done. The next are {names[1]},' in text
  )
  assert 'Not of the protocol, and not shown: other-250-0.' in text
  drawn = sorted(path.name for path in (tmp_path / 'images').iterdir())
  assert drawn == ['results_250.png']


def test_study_keeps_evaluations_and_means_between_them():
  rows = [
    {'step': 1, 'labeled_loss': 1.0, 'pseudo_label_accuracy': None},
    {'step': 2, 'labeled_loss': 2.00004, 'error': 50.0, 'error_raw': 60.0},
    {'step': 3, 'labeled_loss': 4.0, 'used_fraction': 0.5},
    {'step': 4, 'labeled_loss': 5.0, 'error': 40.0, 'error_raw': 41.0},
    {'step': 5, 'labeled_loss': 9.0},
  ]
  first, second = study.condense(rows)
  assert first == {
    'step': 2,
    'error': 50.0,
    'error_raw': 60.0,
    'labeled_loss': 1.5,
  }
  assert second['labeled_loss'] == 4.5
  assert second['used_fraction'] == 0.5


def test_records_of_another_protocol_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(study, 'RECORDS', tmp_path)
  cell = study.Cell('flatmatch', 250, 0, study.FLAGSHIP)
  assert not study.is_recorded(cell)
  config = cell.config
  config.data_dir = 'here'
  run = Workdir(str(tmp_path / 'run'))
  run.path.mkdir()
  run.write('config.json', as_dict(config))
  run.write('dataset.json', {'fingerprint': study.IMAGES})
  rows = [
    {'step': step, 'error': 50.0, 'error_raw': 50.0}
    for step in (350, config.steps)
  ]
  (run.path / 'metrics.jsonl').write_text(
    ''.join(json.dumps(row) + '\n' for row in rows)
  )
  with pytest.raises(UserError, match='no result'):
    study.record(cell, run)
  run.write('result.json', {})
  run.path.with_suffix('.cpu').write_text('1800.0')
  study.record(cell, run)
  assert study.is_recorded(cell)
  path = tmp_path / f'{cell.name}.jsonl'
  whole = path.read_text().splitlines(keepends=True)
  assert json.loads(whole[0])['core_hours'] == 0.5
  cut = [*whole[:2], whole[2][:9]]
  for part in ([], whole[:1], whole[:2], cut):  # As a bad merge leaves it.
    path.write_text(''.join(part))
    assert not study.is_recorded(cell)
  wrong = {'config.json': as_dict(config) | {'ema_decay': 0.9}}
  wrong['dataset.json'] = {'fingerprint': 'others'}
  for name, content in wrong.items():
    kept = run.read(name)
    run.write(name, content)
    with pytest.raises(UserError, match='the protocol has'):
      study.record(cell, run)
    run.write(name, kept)
  path.write_text(''.join(whole).replace(study.IMAGES, 'others'))
  with pytest.raises(UserError, match='the protocol has'):
    study.is_recorded(cell)


def test_records_in_the_repository_are_of_the_protocol():
  recorded = {cell.name for cell in study.cells() if study.is_recorded(cell)}
  assert recorded == {path.stem for path in study.RECORDS.glob('*.jsonl')}


def test_cells_of_the_study_have_names_of_their_own():
  cells = study.cells()
  assert len({cell.name for cell in cells}) == len(cells)


def test_a_cells_command_trains_what_its_record_must_be_of():
  cell = study.Cell('supervised', 4000, 1, (('learning_rate', 0.01),))
  assert cell.name == 'supervised-4000-1-learning_rate=0.01'
  command = cell.command(pathlib.Path('runs'), 'data')
  changes = {
    '--config.learning_rate=0.01',
    f'--config.steps={study.SUPERVISED_STEPS[4000]}',
  }
  assert changes < set(command)
  config = cifar10_fast.get_config(command[2].partition(':')[2])
  config.learning_rate = 0.01
  config.steps = study.SUPERVISED_STEPS[4000]
  assert study.settings(as_dict(config)) == study.todays_settings(cell)
  config.learning_rate = 0.03
  assert study.settings(as_dict(config)) != study.todays_settings(cell)


class Ends(NamedTuple):
  """A cell whose run ends by itself, or does not."""

  name: str
  python: str

  def command(self, runs, data_dir):
    del runs, data_dir
    return [sys.executable, '-c', self.python]


@pytest.fixture
def quick(monkeypatch):
  """The study looks at its runs every 20 ms, not every second."""
  clock = types.SimpleNamespace(**vars(time))
  clock.sleep = lambda _: time.sleep(0.02)
  monkeypatch.setattr(study, 'time', clock)


@pytest.mark.usefixtures('quick')
def test_runs_that_end_well_are_recorded_and_the_others_named(
  tmp_path, monkeypatch, capsys
):
  recorded = []
  monkeypatch.setattr(
    study, 'record', lambda cell, run: recorded.append((cell.name, run.path))
  )
  busy = 'import time\nwhile time.process_time() < 0.3: pass'
  todo = [Ends('a', busy), Ends('b', 'raise SystemExit("why")'), Ends('c', '')]
  failed = study.run_all(todo, tmp_path, '', jobs=1, budget=600)
  assert failed == [f'{tmp_path}/b.log']
  assert recorded == [('a', tmp_path / 'a'), ('c', tmp_path / 'c')]
  assert float((tmp_path / 'a.cpu').read_text()) > 0
  assert 'b failed (code 1): why\n' in capsys.readouterr().out


@pytest.mark.usefixtures('quick')
def test_what_fails_again_and_again_is_not_tried_for_all(tmp_path, capsys):
  todo = [Ends(name, 'raise SystemExit(2)') for name in 'abcd']
  failed = study.run_all(todo, tmp_path, '', jobs=1, budget=600)
  assert failed == [f'{tmp_path}/{name}.log' for name in 'abc']
  assert '3 failed in a row, so 1 were not tried.' in capsys.readouterr().out


@pytest.mark.usefixtures('quick')
def test_at_the_end_of_the_budget_runs_are_stopped_and_not_recorded(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(study, 'record', None)  # Not to be called.
  todo = [Ends('a', 'import time; time.sleep(600)'), Ends('b', 'never')]
  assert study.run_all(todo, tmp_path, '', jobs=1, budget=0.5) == []
  assert not (tmp_path / 'b.log').exists()
  assert 'a is stopped' in capsys.readouterr().out
