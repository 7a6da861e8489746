"""The files of a run: whole or not at all, and cut back to a checkpoint."""

import json
import math
import os
import socket

import ml_collections
import pytest

from flatmatch_jax.run import settings
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import distributed
from flatmatch_jax.types import UserError


@pytest.fixture
def files(tmp_path):
  files = Workdir(str(tmp_path / 'run'))
  files.path.mkdir()
  return files


def strict_rows(files):
  """metrics.jsonl as a reader sees it who knows JSON, but not JavaScript."""

  def refuse(constant):
    raise AssertionError(f'{constant} is not JSON')

  text = (files.path / 'metrics.jsonl').read_text()
  return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_cut_metrics_keeps_bytes_up_to_the_step(files):
  for step in range(2, 13, 2):
    files.append_metrics({'step': step, 'loss': step / 7, 'list': [0.1, 1e-9]})
  path = files.path / 'metrics.jsonl'
  lines = path.read_bytes().splitlines(keepends=True)
  files.cut_metrics(12)
  assert path.read_bytes() == b''.join(lines)
  files.cut_metrics(7)  # A checkpoint between two rows.
  assert path.read_bytes() == b''.join(lines[:3])
  files.cut_metrics(0)
  assert path.read_bytes() == b''


def test_all_processes_cut_to_the_same_rows(files, monkeypatch):
  """What they hold for the least error decides when they save together."""
  for step in (2, 4, 6):
    files.append_metrics({'step': step, 'error': 10.0 - step})
  kept = [{'step': 2, 'error': 8.0}, {'step': 4, 'error': 6.0}]
  with monkeypatch.context() as other:
    other.setattr(distributed, 'is_first', lambda: False)
    assert files.cut_metrics(5) == kept
    assert len(files.metrics()) == 3
  assert files.cut_metrics(5) == kept == files.metrics()


@pytest.mark.parametrize('cut', [1, 10, -2, -1])
def test_half_written_last_line_is_dropped_or_completed(files, cut):
  for step in (2, 4, 6):
    files.append_metrics({'step': step, 'loss': 0.5, 'error': 10.0})
  path = files.path / 'metrics.jsonl'
  whole = path.read_bytes()
  last = whole.splitlines(keepends=True)[-1]
  path.write_bytes(whole[: -len(last)] + last[:cut])
  complete = cut == -1  # Only the end of the line is missing.
  steps = [2, 4, 6] if complete else [2, 4]
  assert [row['step'] for row in files.metrics()] == steps
  files.cut_metrics(6)
  files.append_metrics({'step': 8})
  assert [row['step'] for row in strict_rows(files)] == [*steps, 8]


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_becomes_null(files, value):
  row = {'step': 2, 'accuracy': value, 'histogram': [0.5, value], 'loss': 1.5}
  files.append_metrics(row)
  expected = row | {'accuracy': None, 'histogram': [0.5, None]}
  assert strict_rows(files) == [expected]
  files.cut_metrics(2)
  assert strict_rows(files) == [expected]


def test_missing_and_broken_files_are_named(files):
  with pytest.raises(UserError, match=r'has no config\.json'):
    files.read('config.json')
  (files.path / 'config.json').write_text('{"steps": 1')
  with pytest.raises(UserError, match=r'config\.json is not valid JSON'):
    files.config()


def config(**changes):
  fields = {
    'steps': 600,
    'data_dir': '',
    'checkpoint_every': 200,
    'mean': (0.5, 0.25),
    'method_args': {'decay': 0.99, 'weight': 1.0},
  }
  return ml_collections.ConfigDict(fields | changes)


def test_the_same_config_is_accepted(files):
  files.check_config(config())  # A new folder takes any.
  files.write('config.json', settings.as_dict(config()))
  files.check_config(config())


@pytest.mark.parametrize(
  'changes',
  [
    {'data_dir': '/elsewhere'},
    {'checkpoint_every': 7},
    {'data_dir': '/elsewhere', 'checkpoint_every': 7},
  ],
)
def test_where_and_how_often_may_change(files, changes):
  files.write('config.json', settings.as_dict(config()))
  files.check_config(config(**changes))


@pytest.mark.parametrize(
  ('changes', 'named'),
  [
    ({'steps': 700}, ['steps (600 there, 700 now)']),
    ({'mean': (0.5, 0.5)}, ['mean ([0.5, 0.25] there, [0.5, 0.5] now)']),
    (
      {'method_args': {'decay': 0.9, 'weight': 1.0}},
      ['method_args.decay (0.99 there, 0.9 now)'],
    ),
    (
      {'method_args': {'decay': 0.99, 'threshold': 0.95}},
      [
        'method_args.threshold (absent there, 0.95 now)',
        'method_args.weight (1.0 there, absent now)',
      ],
    ),
    (
      {'steps': 5, 'data_dir': '/x', 'method_args': {'weight': 2.0}},
      [
        'method_args.decay (0.99 there, absent now)',
        'method_args.weight (1.0 there, 2.0 now)',
        'steps (600 there, 5 now)',
      ],
    ),
  ],
)
def test_another_config_is_refused_by_its_fields(files, changes, named):
  files.write('config.json', settings.as_dict(config()))
  files.check_config(config(**changes))  # Nothing was computed: it is free.
  (files.checkpoints / '3.orbax-checkpoint-tmp').mkdir(parents=True)
  files.check_config(config(**changes))  # Nor was anything saved whole.
  (files.checkpoints / '3').mkdir()
  with pytest.raises(UserError) as error:
    files.check_config(config(**changes))
  message = str(error.value)
  assert f'another config: {", ".join(named)}. ' in message
  assert str(files.path) in message
  assert '\n' not in message


def test_config_survives_the_file(files):
  files.write('config.json', settings.as_dict(config()))
  read = files.config()
  assert read.method_args.decay == 0.99
  assert list(read.mean) == [0.5, 0.25]


def test_texts_with_brackets_stay_as_they_are(files):
  content = {'source': 'a [b  c] d', 'numbers': [[1, 2.5], []], 'none': [None]}
  files.write('x.json', content)
  assert files.read('x.json') == content
  assert '[ 1, 2.5 ]' in (files.path / 'x.json').read_text()


def test_second_run_is_refused_by_name(files):
  with files.lock():
    with pytest.raises(UserError) as error, Workdir(str(files.path)).lock():
      pass
    message = str(error.value)
    assert f'process {os.getpid()} on {socket.gethostname()}' in message
    assert 'another --workdir' in message
    assert '\n' not in message
  with files.lock():  # Free again.
    pass
  assert os.listdir(files.path) == []


def test_refused_run_leaves_no_folder(tmp_path):
  with pytest.raises(UserError), Workdir(tmp_path / 'runs' / 'first').lock():
    raise UserError('wrong')
  assert os.listdir(tmp_path) == []
  with Workdir(tmp_path / 'runs' / 'first').lock():
    (tmp_path / 'runs' / 'first' / 'config.json').write_text('{}')
  assert os.listdir(tmp_path / 'runs' / 'first') == ['config.json']


def test_lock_file_that_is_being_removed_is_not_a_lock(files):
  with (files.path / '.lock').open('a+') as file:
    (files.path / '.lock').unlink()
    with pytest.raises(UserError, match='just ending'):
      files._take(file)


def test_lock_of_a_killed_process_is_free(files):
  """The system keeps it, not the file, which names a process long gone."""
  (files.path / '.lock').write_text('process 1 on elsewhere\n')
  with files.lock():
    assert str(os.getpid()) in (files.path / '.lock').read_text()


def test_folder_that_cannot_be_written_is_refused(tmp_path):
  """A file in its place: root may write into any folder."""
  (tmp_path / 'runs').write_text('')
  files = Workdir(str(tmp_path / 'runs' / 'first'))
  with pytest.raises(UserError, match=r'Not a directory'), files.lock():
    pass


def test_metrics_that_cannot_be_written_are_a_line(files):
  (files.path / 'metrics.jsonl').mkdir()
  with pytest.raises(UserError, match=r'metrics\.jsonl: Is a directory'):
    files.append_metrics({'step': 1})
