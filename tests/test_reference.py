"""Expected errors: bands over seeds, and what a run says of them."""

import json
import math

import pytest
from scipy import stats

from benchmarks import cifar10_small, references, study_report
from configs import cifar10_small as small_config
from configs import digits
from flatmatch_jax import data, reference, train
from flatmatch_jax.workdir import Workdir, as_dict


@pytest.fixture
def known(monkeypatch, tmp_path):
  """A file of one entry: digits' default config with three seeds."""
  settings = reference.settings(as_dict(digits.get_config()))
  entry = {
    'settings': settings,
    'images': 'these',
    'seeds': [0, 1, 2],
    'errors': {'80': [10.0, 12.0, 14.0]},
  }
  file = tmp_path / 'references.json'
  file.write_text(json.dumps([entry]))
  monkeypatch.setattr(reference, 'FILE', file)


@pytest.mark.parametrize('seeds', [3, 4, 10])
def test_band_is_the_prediction_interval(seeds):
  errors = [50.0 + k * k for k in range(seeds)]
  mean, deviation = sum(errors) / seeds, stats.tstd(errors)
  scale = deviation * math.sqrt(1 + 1 / seeds)
  freedom = reference.POINTS * (seeds - 1)
  low, high = stats.t.interval(0.95, freedom, mean, scale)
  band = reference.Band(errors, list(range(seeds)), deviation / mean)
  assert band.mean - band.width == pytest.approx(low, rel=1e-3)
  assert band.mean + band.width == pytest.approx(high, rel=1e-3)


def test_band_of_equal_seeds_has_a_width():
  assert reference.Band([2.5, 2.5, 2.5], [0, 1, 2], 0.0).width == 1.0


def test_points_share_their_relative_deviation():
  """Three seeds that agree by chance do not make a point strict."""
  errors = {1: [60.0, 60.0, 60.0], 2: [36.0, 40.0, 44.0]}
  bands = reference.make_bands(errors, [0, 1, 2])
  shared = math.sqrt((0 + 0.1**2) / 2)
  assert [band.spread for band in bands.values()] == pytest.approx([shared] * 2)
  assert bands[1].width == pytest.approx(1.5 * bands[2].width)


@pytest.mark.usefixtures('known')
def test_other_seeds_and_intervals_have_the_same_band():
  config = digits.get_config('seed=7,split_seed=8')
  config.log_every, config.data_dir = 3, 'elsewhere'
  assert reference.find(config, 'these')[80].mean == 12.0


@pytest.mark.usefixtures('known')
def test_another_setting_has_no_band():
  config = digits.get_config()
  config.recipe_args.rho = 0.1
  assert reference.find(config, 'these') == {}
  assert reference.find(digits.get_config('labels=100'), 'these') == {}
  assert reference.find(digits.get_config(), 'others') == {}


@pytest.mark.parametrize(
  ('error', 'start'),
  [(13.9, 'As expected'), (30.0, 'Warning'), (1.0, 'Better than expected')],
)
def test_run_is_told_where_it_stands(error, start, capsys):
  bands = reference.make_bands({80: [10.0, 12.0, 14.0]}, [0, 1, 2])
  reference.compare(bands, 60, error)
  reference.compare(bands, 80, None)
  assert capsys.readouterr().err == ''
  reference.compare(bands, 80, error)
  said = capsys.readouterr().err
  assert said.partition('] ')[2].startswith(start)
  assert f'{error:.2f}%' in said
  assert '10.00 to 14.00%' in said


def finished(folder, seed, shift=0.0, every=10, images='these'):
  """A run of 120 steps, as its files tell."""
  run = Workdir(str(folder / f'{seed}-{every}-{images}'))
  run.path.mkdir()
  steps = range(every, 121, every)
  rows = [{'step': s, 'error': shift + s / 10} for s in steps]
  run.write('config.json', as_dict(digits.get_config(f'seed={seed}')))
  run.write('result.json', {'seed': seed})
  run.write('dataset.json', {'fingerprint': images})
  lines = [{'step': 5, 'labeled_loss': 1.0}, *rows]
  text = ''.join(json.dumps(row) + '\n' for row in lines)
  (run.path / 'metrics.jsonl').write_text(text)
  return str(run.path)


def test_runs_are_entered_seed_by_seed(tmp_path, capsys):
  file = tmp_path / 'references.json'
  runs = [finished(tmp_path, seed, shift=seed) for seed in (1, 0, 2, 3)]
  references.update(runs[:2], file)
  assert json.loads(file.read_text()) == []
  assert '2 of 3 seeds' in capsys.readouterr().out
  references.update(runs[:3], file)
  (entry,) = json.loads(file.read_text())
  assert entry['seeds'] == [0, 1, 2]
  assert entry['images'] == 'these'
  assert list(entry['errors']) == ['20', '50', '70', '100', '120']
  assert entry['errors']['120'] == [12.0, 13.0, 14.0]
  references.update(runs[3:], file)
  (entry,) = json.loads(file.read_text())
  assert entry['seeds'] == [0, 1, 2, 3]
  assert entry['errors']['120'] == [12.0, 13.0, 14.0, 15.0]
  others = [finished(tmp_path, s, images='others') for s in range(3)]
  references.update(others, file)
  assert len(json.loads(file.read_text())) == 2


def test_runs_without_common_steps_are_refused(tmp_path):
  file = tmp_path / 'references.json'
  runs = [finished(tmp_path, s, every=e) for s, e in ((0, 10), (1, 60))]
  with pytest.raises(SystemExit, match='2 common steps'):
    references.update(runs, file)
  assert not file.exists()


@pytest.mark.usefixtures('tiny_network')
def test_training_says_where_it_stands(tmp_path, monkeypatch, capsys):
  config = digits.get_config('method=supervised')
  config.update(steps=2, log_every=2, eval_every=2, checkpoint_every=2)
  settings = reference.settings(as_dict(config))
  entry = {
    'settings': settings,
    'images': data.fingerprint(data.load('digits')),
    'seeds': [1, 2, 3],
    'errors': {'2': [1.0, 1.0, 1.0]},
  }
  file = tmp_path / 'references.json'
  file.write_text(json.dumps([entry]))
  monkeypatch.setattr(reference, 'FILE', file)
  train.train_and_evaluate(config, str(tmp_path / 'run'))
  assert 'Warning: step 2 has a test error of' in capsys.readouterr().err


@pytest.mark.parametrize(
  'config', [digits.get_config(), small_config.get_config()]
)
def test_defaults_have_a_band(config):
  """A field that is new in a config must be added to the file, too."""
  entries = json.loads(reference.FILE.read_text())
  (images,) = {
    entry['images']
    for entry in entries
    if entry['settings']['dataset'] == config.dataset
  }
  if config.dataset == 'digits':
    assert images == data.fingerprint(data.load('digits'))
  bands = reference.find(config, images)
  assert max(band.mean + band.width for band in bands.values()) < 85  # Chance.
  assert len(bands) == reference.POINTS
  assert max(bands) == config.steps


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
  groups = study_report.group([cell.name for cell in cifar10_small.cells()])
  text = study_report.table(runs, groups, 250)
  plain, flat = text.splitlines()[2:]
  assert plain.startswith('| freematch | 0, 1 | 56.00 ± 5.66 |')
  assert plain.endswith('| – |')
  low, high = stats.t.interval(0.95, 1, -2.5, 0.5)
  ending = f'| -2.50 ({low:+.2f} to {high:+.2f}) against freematch |'
  assert flat.endswith(ending)
  # A seed is one sample; a run without its partner is none.
  record('freematch-1000-0', 90.0, 40.0)
  record('flatmatch-1000-0', 90.0, 36.0)
  record('flatmatch-1000-1', 90.0, 10.0)
  text = study_report.pooled(study_report.read(tmp_path), groups)
  low, high = stats.t.interval(0.95, 1, -2.75, 0.75)  # Of -3.5 and -2.
  assert text.endswith(f': -2.75 ({low:+.2f} to {high:+.2f}). ')


def test_study_pairs_layouts_with_their_own_method(tmp_path):
  for name, error in (
    ('freematch-250-0', 60.0),
    ('flatmatch-250-0', 50.0),
    ('flatmatch-250-0-joint', 47.0),
    ('flatmatch-250-0-rho0.2', 51.0),
  ):
    row = {'step': 1, 'error': error}
    (tmp_path / f'{name}.jsonl').write_text(json.dumps(row))
  groups = study_report.group([cell.name for cell in cifar10_small.cells()])
  text = study_report.table(study_report.read(tmp_path), groups, 250)
  ends = [line.split('|')[-2].strip() for line in text.splitlines()[2:]]
  assert ends[1] == '-10.00 against freematch'
  assert ends[2:] == ['-3.00 against flatmatch', '+1.00 against flatmatch']


def test_study_draws_what_is_done_and_names_what_is_next(tmp_path):
  (tmp_path / 'images').mkdir()
  marks = '<!-- tables -->\nold\n<!-- end -->'
  (tmp_path / 'results.md').write_text(f'before\n{marks}\nafter\n')
  record = tmp_path / 'records' / 'freematch-250-0.jsonl'
  record.parent.mkdir()
  record.write_text(json.dumps({'step': 1, 'error': 60.0}))
  names = [cell.name for cell in cifar10_small.cells()]
  study_report.write(record.parent, tmp_path, names)
  text = (tmp_path / 'results.md').read_text()
  assert text.startswith('before\n')
  assert text.endswith('\nafter\n')
  assert '| freematch | 0 | 60.00 |' in text
  assert 'old' not in text
  assert (
    f'1 of the {len(names)} runs are done. The next are {names[1]},' in text
  )
  drawn = sorted(path.name for path in (tmp_path / 'images').iterdir())
  assert drawn == ['results_250.png', 'results_250_last.png']


def test_study_keeps_evaluations_and_means_between_them():
  rows = [
    {'step': 1, 'labeled_loss': 1.0, 'pseudo_label_accuracy': None},
    {'step': 2, 'labeled_loss': 2.00004, 'error': 50.0, 'error_raw': 60.0},
    {'step': 3, 'labeled_loss': 4.0, 'used_fraction': 0.5},
    {'step': 4, 'labeled_loss': 5.0, 'error': 40.0, 'error_raw': 41.0},
    {'step': 5, 'labeled_loss': 9.0},
  ]
  first, second = cifar10_small.condense(rows)
  assert first == {
    'step': 2,
    'error': 50.0,
    'error_raw': 60.0,
    'labeled_loss': 1.5,
  }
  assert second['labeled_loss'] == 4.5
  assert second['used_fraction'] == 0.5


def test_records_of_another_protocol_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(cifar10_small, 'RECORDS', tmp_path)
  cell = cifar10_small.Cell('flatmatch', 250, 1, 'joint', 704)
  assert not cifar10_small.is_recorded(cell)
  config = small_config.get_config(cell.variant)
  config.batch_norm, config.steps, config.data_dir = 'joint', 704, 'here'
  run = Workdir(str(tmp_path / 'run'))
  run.path.mkdir()
  run.write('config.json', as_dict(config))
  run.write('versions.json', {'jax': '0.10.2'})
  row = {'step': 704, 'error': 50.0, 'error_raw': 50.0}
  (run.path / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  cifar10_small.record(cell, run)
  assert cifar10_small.is_recorded(cell)
  config.ema_decay = 0.9
  run.write('config.json', as_dict(config))
  cifar10_small.record(cell, run)
  with pytest.raises(SystemExit, match='other settings'):
    cifar10_small.is_recorded(cell)


def test_records_in_the_repository_are_of_the_protocol():
  recorded = [c for c in cifar10_small.cells() if cifar10_small.is_recorded(c)]
  assert recorded


def test_cells_of_the_study_have_names_of_their_own():
  cells = cifar10_small.cells()
  assert len({cell.name for cell in cells}) == len(cells)
