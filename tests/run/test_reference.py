"""Expected errors: bands over seeds, and what a run says of them."""

import json
import math
import os

from matplotlib import image
import numpy as np
import pytest
from scipy import stats

from benchmarks import cifar10_fast as study
from benchmarks import references
from configs import digits
from flatmatch_jax import data
from flatmatch_jax.run import plots, reference
from flatmatch_jax.run.settings import as_dict
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import loop
from flatmatch_jax.types import UserError

ENTRIES = json.loads(reference.FILE.read_text())


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
  low, high = stats.t.interval(0.99, freedom, mean, scale)
  band = reference.Band(errors, list(range(seeds)), deviation / mean)
  assert band.width == pytest.approx((high - low) / 2, rel=1e-3)
  assert band.high == pytest.approx(high, rel=1e-3)
  assert band.low == max(band.mean - band.width, 0.0)


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
  assert reference.find(as_dict(config), 'these')[80].mean == 12.0


@pytest.mark.usefixtures('known')
def test_another_setting_has_no_band():
  config = digits.get_config()
  config.recipe_args.rho = 0.1
  assert reference.find(as_dict(config), 'these') == {}
  assert reference.find(as_dict(digits.get_config('labels=100')), 'these') == {}
  assert reference.find(as_dict(digits.get_config()), 'others') == {}


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


@pytest.mark.usefixtures('known')
@pytest.mark.parametrize('damage', ['', '[{"settings"', '{}x', '[1]'])
def test_a_damaged_file_is_told_and_ends_nothing(damage, capsys):
  reference.FILE.write_text(damage)
  assert reference.find(as_dict(digits.get_config()), 'these') == {}
  assert f'{reference.FILE} is damaged' in capsys.readouterr().err


def test_what_always_ends_without_an_error_has_a_band():
  bands = reference.make_bands({1: [5.0, 6.0, 7.0], 2: [0.0, 0.0, 0.0]}, [0])
  assert (bands[2].low, bands[2].high) == (0.0, 1.0)


@pytest.mark.usefixtures('known')
def test_what_is_expected_is_in_the_picture(tmp_path):
  bands = reference.find(as_dict(digits.get_config()), 'these')
  rows, picture = [{'step': 80, 'error': 11.0}], tmp_path / 'curves.png'
  grey = []
  for given in (None, {40: bands[80], 80: bands[80]}):
    plots.curves(rows, 'title', picture, given)
    colours = image.imread(picture)[..., :3]
    grey.append(np.all(np.abs(colours - 0.85) < 0.01, axis=-1).sum())
  assert grey[1] > grey[0] + 1000


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
  half = finished(tmp_path, 3, images='others')
  os.remove(os.path.join(half, 'result.json'))
  references.update([*others, half], file)
  assert len(json.loads(file.read_text())) == 2
  assert f'{half}: not finished, so left out.' in capsys.readouterr().out


def test_runs_without_common_steps_are_refused(tmp_path):
  file = tmp_path / 'references.json'
  runs = [finished(tmp_path, s, every=e) for s, e in ((0, 10), (1, 60))]
  with pytest.raises(UserError, match='2 common steps'):
    references.update(runs, file)
  assert not file.exists()


def test_of_a_seed_one_run_is_entered(tmp_path):
  file = tmp_path / 'references.json'
  runs = [finished(tmp_path, 0, every=every) for every in (5, 10)]
  with pytest.raises(UserError, match='both the seed 0'):
    references.update(runs, file)


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
  drawn = []
  monkeypatch.setattr(plots, 'curves', lambda *args: drawn.extend(args))
  loop.train_and_evaluate(config, str(tmp_path / 'run'))
  assert drawn[-1][2].errors == [1.0, 1.0, 1.0]
  assert 'Warning: step 2 has a test error of' in capsys.readouterr().err


@pytest.mark.parametrize(
  'entry',
  ENTRIES,
  ids=lambda e: '-'.join(map(str, list(e['settings'].values())[:3])),
)
def test_entries_are_of_todays_configs(entry):
  """What is new in a config or a method must be added to the file, too."""
  names = ('dataset', 'method', 'labels')
  dataset, method, labels = (entry['settings'][name] for name in names)
  if dataset == 'digits':
    config = digits.get_config(f'method={method},labels={labels}')
  else:
    config = study.Cell(method, labels, 0).config
  bands = reference.find(as_dict(config), entry['images'])
  assert max(band.mean + band.width for band in bands.values()) < 85  # Chance.
  assert len(bands) == reference.POINTS
  assert max(bands) == config.steps
  if dataset == 'digits':
    assert entry['images'] == data.fingerprint(data.load('digits'))
    return
  assert entry['images'] == study.IMAGES
  for number, seed in enumerate(entry['seeds']):
    record = study.RECORDS / f'{study.Cell(method, labels, seed).name}.jsonl'
    rows = [json.loads(line) for line in record.read_text().splitlines()[1:]]
    errors = {row['step']: row['error'] for row in rows}
    assert all(
      errors[step] == band.errors[number] for step, band in bands.items()
    )


def test_default_configs_have_an_entry():
  names = {(e['settings']['dataset'], e['settings']['method']) for e in ENTRIES}
  assert ('digits', 'flatmatch') in names
