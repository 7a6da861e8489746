"""Pages about runs: what they say, and that they ask for nothing else."""

import base64
import csv
import functools
import html.parser
import io
import json
import re
import shlex
import sys

from absl import flags
from ml_collections import config_flags
import numpy as np
from PIL import Image
import pytest
from runs import ROOT

from flatmatch_jax.analysis.measures import ANALYSES
from flatmatch_jax.report import (
  __main__,
  analyses,
  charts,
  comparison,
  export,
  predictions,
  reproduce,
  runs,
  single,
)
from flatmatch_jax.run import reference
from flatmatch_jax.run.settings import as_dict
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import classify, load

NAMES = [
  'zero',
  '<script>alert(1)</script>',
  '"><img src=x onerror=a()>',
  '&amp;',
]
EVALUATIONS = 30


def write_run(
  path, method='flatmatch', seed=0, offset=0.0, done=True, dataset='digits',
  names=NAMES, labels=40, **changes,
):  # fmt: skip
  """A folder as a run leaves it, without a checkpoint."""
  config = as_dict(
    load.load_config(
      f'{dataset}.py', f'method={method},labels={labels},seed={seed}'
    )
  )
  config |= changes
  files = Workdir(path)
  files.write('config.json', config)
  number = 40 if labels == 'all' else labels
  files.write(
    'split.json',
    {'labeled': list(range(number)), 'validation': [], 'per_class': [4] * 10},
  )
  files.write(
    'dataset.json',
    {
      'class_names': names,
      'image_shape': [8, 8, 1],
      'num_train': 1437,
      'test_share': 1.0,
      'num_unlabeled': 1437,
      'num_test': 360,
      'fingerprint': changes.get('data_dir', ''),
    },
  )
  files.write('versions.json', {'python': '3.11', 'jax': '<b>0.10</b>'})
  steps = EVALUATIONS if done else 7
  for i in range(1, steps + 1):
    files.append_metrics(
      {
        'step': 10 * i,
        'error': 80 / i + offset,
        'error_raw': 85 / i + offset,
        'labeled_loss': 2 / i,
        'unlabeled_loss': float('nan') if i == 3 else 3 / i,
        'worst_loss': 4 / i,
        'used_fraction': min(1.0, i / 20),
        'pseudo_label_accuracy': 100 - 60 / i,
        'threshold': 0.9,
        'gradient_norm': 1 + 1 / i,
        'something_new': 90 / i,
        'skipped_steps': 0,
        'class_histogram': [1 / len(names)] * len(names),
      }
    )
  if done:
    errors = [80 / i + offset for i in range(1, steps + 1)]
    files.write(
      'result.json',
      {
        'error_last': errors[-1],
        'error_median20': float(np.median(errors[-20:])),
        'error_best': min(errors),
        'seconds': 61.5,
        'images_per_second': 1234.5,
      },
    )
  return files


def fake_predictions(classes=4, size=8, count=200):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(count, classes)).astype(np.float32)
  labels = rng.integers(0, classes, count)
  logits[np.arange(count), labels] += 2
  probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  images = rng.integers(0, 256, (count, size, size, 1), np.uint8)
  return predictions.Predictions(
    step=300,
    kind='test',
    labels=labels,
    probabilities=probs,
    examples={
      name: predictions.Examples(images[rows], rows)
      for name, rows in predictions.choose(probs, labels).items()
    },
    views=dict.fromkeys(('image', 'weak 1', 'strong 1'), images[:6]),
    cropped=False,
  )


class Page(html.parser.HTMLParser):
  """The elements of a page with their attributes, and its text."""

  def __init__(self, text):
    super().__init__()
    self.elements, self.text = [], ''
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))

  def handle_data(self, data):
    self.text += data


@pytest.fixture
def run(tmp_path):
  write_run(tmp_path / 'run')
  return runs.read(tmp_path / 'run')


@pytest.fixture
def call(call):
  return functools.partial(call, __main__)


# One run.


def test_no_text_of_a_run_becomes_markup(run, tmp_path):
  write_run(tmp_path / 'b', method='freematch', data_dir='<script>b()</script>')
  other = runs.read(tmp_path / 'b')
  pages = [
    single.render(run, fake_predictions()),
    single.render(run, None, 'because of <script>c()</script>'),
    comparison.render(
      comparison.group([run, other]), {'a.csv': '', 'a.tex': ''}
    ),
  ]
  for page in map(Page, pages):
    names = [tag for tag, _ in page.elements]
    assert names.count('script') == 1
    for tag, attributes in page.elements:
      assert not [name for name in attributes if name.startswith('on')]
      for name in ('src', 'href'):
        if name in attributes:  # Nothing is asked for.
          assert attributes[name].startswith(('data:', '#')), (tag, attributes)
      if tag in ('img', 'svg') and 'x' not in attributes:
        assert attributes.get('alt') or attributes.get('aria-label')
  first = Page(pages[0]).text
  for name in NAMES:
    assert first.count(name) > 5  # Confusion, errors, examples.
  assert '<b>0.10</b>' in first
  assert 'because of <script>' in Page(pages[1]).text


def test_script_is_the_one_that_the_policy_allows(run):
  page = single.render(run, None, 'x')
  policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
  assert 'default-src &#x27;none&#x27;' in policy
  assert 'script-src &#x27;sha256-' in policy
  assert "'unsafe-inline'" not in policy.partition('script-src')[2]


def test_page_tells_the_numbers_of_the_run(run):
  found = fake_predictions()
  page = Page(single.render(run, found))
  report = classify.report(found.probabilities, found.labels)
  for text in (
    'flatmatch on digits, 40 labels',
    'finished',
    f'{run.result["error_last"]:.2f}%',
    '0:01:02',  # Seconds.
    '1,234',  # Images a second.
    f'error {report["error"]:.2f}%',
    f'Calibration error {report["calibration_error"]:.2f}%',
    'Something new',  # A metric that no panel names has one of its own.
    'method_args.decay',
  ):
    assert text in page.text, text
  assert 'Skipped steps' not in page.text  # There were none.
  assert 'median of the last' not in page.text  # Of all seven evaluations.
  run.result['evaluations'] = 20
  text = Page(single.summary(run, found)).text
  median = f'{run.result["error_median20"]:.2f}%'
  assert f'test error, median of the last 20{median}' in text.replace('\n', '')
  drawn = {
    line['name']: line
    for _, attributes in page.elements
    for line in json.loads(attributes.get('data-lines', '[]'))
  }
  assert drawn['test, averaged weights']['y'][:3] == [80, 40, 26.67]
  assert drawn['used, of all']['y'][1] == 10  # Percent.
  assert drawn['unlabeled, at θ']['y'][2] is None  # Was not a number.


def test_errors_of_earlier_runs_are_drawn_beside(run, tmp_path, monkeypatch):
  entry = {
    'settings': reference.settings(run.config),
    'images': run.dataset['fingerprint'],
    'seeds': [1, 2, 3],
    'errors': {'150': [10.0, 20.0, 30.0], '300': [5.0, 10.0, 15.0]},
  }
  file = tmp_path / 'references.json'
  file.write_text(json.dumps([entry]))
  monkeypatch.setattr(reference, 'FILE', file)
  lines = single._expected(run)
  assert [line[:3] for line in lines] == [
    ('expected by earlier runs', [150, 300], [20.0, 10.0])
  ]
  assert lines[0].low == [0.0, 0.0]
  assert lines[0].high[1] > 15
  assert 'expected by earlier runs' in single.curves(run)
  file.write_text('[]')
  assert 'expected by earlier runs' not in single.curves(run)


def test_unfinished_run_has_a_page_with_its_last_step(call, tmp_path):
  files = write_run(tmp_path / 'run', done=False)
  code, stdout, stderr = call('--workdir', files.path)
  assert code == 0
  assert str(files.path / 'report.html') in stdout
  assert 'No predictions' in stderr  # It has no checkpoint.
  text = Page((files.path / 'report.html').read_text()).text
  assert 'unfinished, at step 70 of 400' in text
  assert f'{80 / 7:.2f}%' in text
  assert 'nothing is saved yet' in text


def test_run_that_has_only_begun_has_a_page(call, tmp_path):
  files = write_run(tmp_path / 'run', done=False)
  for name in ('metrics.jsonl', 'split.json', 'dataset.json', 'versions.json'):
    (files.path / name).unlink()
  assert call('--workdir', files.path)[0] == 0
  text = Page((files.path / 'report.html').read_text()).text
  assert 'unfinished, at step 0 of 400' in text


def test_folder_of_runs_stands_for_the_runs_in_it(call, tmp_path):
  for seed in (0, 1):
    write_run(tmp_path / 'sweep' / f'seed={seed}', seed=seed)
  (tmp_path / 'sweep' / 'notes').mkdir()
  assert call('--workdir', tmp_path / 'sweep')[0] == 0
  assert (tmp_path / 'sweep' / 'report.html').exists()
  assert (tmp_path / 'sweep' / 'report.csv').exists()  # Of several.
  write_run(tmp_path / 'alone', seed=2)
  assert runs.members(str(tmp_path)) == [
    str(tmp_path / name) for name in ('alone', 'sweep/seed=0', 'sweep/seed=1')
  ]


def test_figures_of_analyses_are_on_the_page(run):
  folder = run.files.path / 'analysis'
  folder.mkdir()
  Image.new('RGB', (5, 5)).save(folder / 'landscape_2d.png')
  (folder / 'landscape_2d.svg').write_text('<svg>' + ' ' * 9999)
  (folder / 'sharpness.svg').write_text(
    '<svg xmlns="http://www.w3.org/2000/svg"/>'
  )
  np.savez(folder / 'sharpness.npz', x=1)
  Image.new('RGB', (5, 5)).save(folder / 'compared_hessian.png')
  page = Page(single.render(run, None, 'x'))
  shown = {a['alt']: a['src'] for tag, a in page.elements if tag == 'img'}
  assert shown.keys() == {'Landscape 2d', 'Sharpness'}
  # Of two formats the smaller.
  assert shown['Landscape 2d'].startswith('data:image/png')
  assert shown['Sharpness'].startswith('data:image/svg+xml')
  assert analyses.CAPTIONS['sharpness'] in page.text
  assert analyses.CAPTIONS.keys() == ANALYSES.keys()
  # Of several runs those that are of several.
  files = {'a.csv': '', 'a.tex': ''}
  page = Page(comparison.render(comparison.group([run]), files))
  assert [a['alt'] for tag, a in page.elements if tag == 'img'] == ['Hessian']


def test_many_classes_are_told_by_their_confusions(tmp_path):
  names = [f'class {i}' for i in range(60)]
  write_run(tmp_path, names=names)
  page = Page(single.render(runs.read(tmp_path), fake_predictions(60)))
  assert 'Most often confused' in page.text
  assert not [a for _, a in page.elements if a.get('class') == 'matrix']


# What is shown of predictions.


def test_examples_are_right_and_wrong_as_they_say():
  found = fake_predictions()
  guess, sure = found.probabilities.argmax(-1), found.probabilities.max(-1)
  wrong, unsure, spread = (e.rows for e in found.examples.values())
  right = guess == found.labels
  assert not right[wrong].any()
  assert right[unsure].all()
  assert right[spread].all()
  others = np.setdiff1d(np.flatnonzero(~right), wrong)
  assert sure[wrong].min() >= sure[others].max()
  assert sure[unsure].max() <= np.sort(sure[right])[len(unsure) - 1]
  assert (np.diff(sure[wrong]) <= 0).all()


def test_perfect_network_has_no_wrong_examples():
  chosen = predictions.choose(np.eye(3), np.arange(3))
  assert all('Wrong' not in name for name in chosen)


def test_reliability_gives_the_calibration_error():
  found = fake_predictions(count=1000)
  bins = classify.reliability(found.probabilities, found.labels)
  sure = found.probabilities.max(-1)
  right = found.probabilities.argmax(-1) == found.labels
  total = 0.0
  for i in range(15):
    inside = (sure >= i / 15) & ((sure < (i + 1) / 15) | (i == 14))
    assert bins['share'][i] == inside.mean()
    if inside.any():
      assert bins['accuracy'][i] == pytest.approx(right[inside].mean())
      gap = sure[inside].astype(np.float64).mean() - right[inside].mean()
      total += inside.mean() * abs(gap)
  report = classify.report(found.probabilities, found.labels)
  assert report['calibration_error'] == pytest.approx(100 * total)


# The command of a run.


@pytest.mark.parametrize(
  ('dataset', 'argument', 'overrides'),
  [
    ('digits', 'method=flatmatch_e,labels=100,seed=3', ['steps=7', 'pad=1']),
    ('digits', 'method=fixmatch+flatmatch_fix', ['method_args.threshold=0.5']),
    ('cifar10', 'method=freematch,labels=250,split_seed=2', ['mean=(0.5,)']),
    ('cifar100', 'method=supervised,labels=all', ['data_dir=/my data/$x']),
    ('tfds', 'name=mnist,labels=100,image_size=28', ['flip=false']),
    ('imagenet', 'model=vit_base_16', ['pretrained=a.npz', 'dtype=bfloat16']),
  ],
)
def test_command_gives_the_config_again(
  monkeypatch, dataset, argument, overrides
):
  def read(words):
    monkeypatch.setattr(sys, 'argv', words)
    values = flags.FlagValues()
    config_flags.DEFINE_config_file('config', None, '', flag_values=values)
    flags.DEFINE_string('workdir', None, '', flag_values=values)
    values(words)
    return as_dict(values.config)

  words = [
    'main.py',
    f'--config={ROOT}/configs/{dataset}.py:{argument}',
  ]
  config = read(words + [f'--config.{text}' for text in overrides])
  command = reproduce.command(config, 'a b')
  again = shlex.split(command)
  assert again[:3] == ['python', 'main.py', '--config']
  assert again[-2:] == ['--workdir', 'a b']
  # Nothing is repeated that the file says.
  assert sum(word.startswith('--config.') for word in again) == len(overrides)
  again[3] = f'{ROOT}/{again[3]}'
  assert read(again[1:]) == config


# Several runs.


def groups_of(tmp_path, *settings):
  found = []
  for number, changes in enumerate(settings):
    write_run(tmp_path / str(number), **changes)
    found.append(runs.read(tmp_path / str(number)))
  return comparison.group(found)


def test_groups_have_means_and_deviations_over_seeds(tmp_path):
  offsets = (0.0, 1.0, 4.0)
  (group,) = groups_of(
    tmp_path,
    *({'seed': seed, 'offset': offset} for seed, offset in enumerate(offsets)),
    {'seed': 3, 'done': False},
  )
  errors = 80 / np.arange(1, EVALUATIONS + 1)
  for key, value in (
    ('error_last', errors[-1]),
    ('error_median20', np.median(errors[-20:])),
    ('error_best', errors.min()),
  ):
    mean, deviation = comparison.mean_and_deviation(group.values(key))
    assert mean == pytest.approx(value + np.mean(offsets))
    assert deviation == pytest.approx(np.std(offsets, ddof=1))
  assert group.seeds == '0, 1, 2'
  assert comparison.spread([2.0]) == '2.00'  # One has no deviation.
  assert comparison.spread([1.0, 3.0]) == '2.00 ± 1.41'
  text = Page(comparison.render([group], {'a': '', 'b': ''})).text
  assert '3 (+ 1 unfinished)' in text
  assert 'unfinished, at step 70 of 400' in text


def test_runs_of_other_settings_are_not_averaged(tmp_path):
  found = groups_of(
    tmp_path,
    {'seed': 0},
    {'seed': 1, 'log_every': 7},
    {'seed': 2, 'steps': 100},
    {'seed': 0, 'recipe_args': {'rho': 0.1}, 'split_seed': 5},
    {'method': 'freematch'},
    {'labels': 100},
  )
  assert [(g.method, g.labels, len(g.runs)) for g in found] == [
    ('flatmatch', 40, 2),
    ('flatmatch', 40, 1),
    ('flatmatch', 40, 1),
    ('freematch', 40, 1),
    ('flatmatch', 100, 1),
  ]
  assert 'steps=100' in found[1].settings
  assert 'recipe_args.rho=0.1' in found[2].settings
  assert found[3].settings == ''


def test_errors_of_validation_images_have_columns(tmp_path):
  files = write_run(tmp_path / 'a')
  errors = {'error_last': 3.0, 'val_error_last': 1.0, 'error_selected': 2.0}
  files.write('result.json', errors | {'seconds': 1, 'images_per_second': 2})
  groups = comparison.group([runs.read(files.path)])
  assert comparison.columns(groups).keys() == errors.keys()


def test_own_images_are_grouped_by_what_they_are(tmp_path):
  found = groups_of(
    tmp_path,
    {'dataset': 'folder', 'data_dir': '/data/cats'},
    {'dataset': 'folder', 'data_dir': '/data/dogs/', 'seed': 1},
  )
  assert [group.data for group in found] == ['folder cats', 'folder dogs']


@pytest.mark.parametrize(
  ('settings', 'error'),
  [
    ({'dataset': 'cifar10'}, '5.58±2.36'),
    ({'dataset': 'cifar10', 'method': 'freematch+flatmatch'}, '5.58±2.36'),
    ({'dataset': 'cifar10', 'method': 'fixmatch', 'labels': 250}, '4.86±0.05'),
    (
      {'dataset': 'cifar10', 'method': 'supervised', 'labels': 'all'},
      '4.62±0.05',
    ),
    ({'dataset': 'imagenet', 'labels': 100_000}, '38.70'),
    ({'dataset': 'cifar10', 'labels': 100}, ''),
    ({}, ''),
  ],
)
def test_paper_value_is_that_of_the_same_cell(tmp_path, settings, error):
  (group,) = groups_of(tmp_path, settings)
  assert comparison.paper_error(group) == error


def test_paper_values_are_marked_as_full_runs(tmp_path):
  page = lambda found: Page(comparison.render(found, {'a': '', 'b': ''})).text
  digits = groups_of(tmp_path / 'a', {})
  cifar = groups_of(tmp_path / 'b', {'dataset': 'cifar10'})
  assert 'paper, full runs' not in page(digits)
  text = page(digits + cifar)
  assert 'paper, full runs, %' in text
  assert 'shorter runs are not to be measured by it' in text


def test_tables_for_spreadsheets_and_papers(tmp_path):
  found = groups_of(
    tmp_path,
    {'seed': 0},
    {'seed': 1, 'offset': 2.0},
    {'method': 'flatmatch_e', 'done': False},
    {'dataset': 'cifar10'},
  )
  rows = list(csv.DictReader(io.StringIO(export.as_csv(found))))
  assert [(row['dataset'], row['method']) for row in rows] == [
    ('cifar10', 'flatmatch'),
    ('digits', 'flatmatch'),
    ('digits', 'flatmatch_e'),
  ]
  assert rows.pop(0)['paper_full_runs'] == '5.58±2.36'
  assert float(rows[0]['error_last_mean']) == pytest.approx(80 / 30 + 1)
  assert float(rows[0]['error_last_std']) == pytest.approx(2**0.5)
  assert (rows[0]['runs'], rows[0]['seeds']) == ('2', '0, 1')
  assert (rows[1]['runs'], rows[1]['unfinished']) == ('0', '1')
  assert rows[1]['error_last_mean'] == ''
  latex = export.as_latex(found)
  body = [line for line in latex.splitlines() if line.endswith(r'\\')]
  assert {line.count('&') for line in body} == {7}
  assert r'flatmatch\_e' in latex
  assert r'$3.67 \pm 1.41$' in latex
  assert r'$5.58\pm 2.36$' in latex
  assert r'\begin{tabular}{lrlrrrrr}' in latex


def test_comparison_is_written_where_the_runs_are(call, tmp_path):
  for name in ('a', 'b'):
    write_run(tmp_path / 'runs' / name, seed=ord(name))
  folder = tmp_path / 'runs'
  code, stdout, _ = call('--workdir', folder / 'a', folder / 'b', folder / 'a/')
  assert code == 0
  assert str(folder / 'report.html') in stdout
  page = Page((folder / 'report.html').read_text())
  assert '2 runs on digits' in page.text  # One was named twice.
  links = {
    attributes['download']: attributes['href']
    for tag, attributes in page.elements
    if 'download' in attributes
  }
  for name in ('report.csv', 'report.tex'):
    content = base64.b64decode(links[name].partition('base64,')[2])
    assert content == (folder / name).read_bytes()
  assert not list(folder.glob('*.tmp'))


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda path: None, ('is not the folder of a run', 'config.json')),
    (lambda path: path.write_text(''), ('is a file', 'runs/*/')),
    (
      lambda path: Workdir(path).write('config.json', {'a': 1}),
      ('is not the config of a run',),
    ),
  ],
)
def test_what_is_no_run_is_refused_in_one_line(call, tmp_path, make, words):
  write_run(tmp_path / 'run')
  make(tmp_path / 'other')
  code, _, stderr = call('--workdir', tmp_path / 'run', tmp_path / 'other')
  assert code == 2
  (line,) = stderr.splitlines()
  assert line.startswith('error: ')
  for word in ('other', *words):
    assert word in line
  assert not list(tmp_path.glob('report.*'))


def test_wrong_outputs_are_refused(call, tmp_path):
  files = write_run(tmp_path / 'run')
  for out, word in (
    (tmp_path / 'page.csv', '.html'),
    (tmp_path / 'absent' / 'a.html', 'there is no'),
  ):
    code, _, stderr = call('--workdir', files.path, '--out', out)
    assert code == 2
    assert word in stderr.splitlines()[-1]


# Charts.


def test_ticks_are_round_and_inside():
  for low, high in ((0, 1), (0, 0.003), (-0.2, 1.7), (0, 1048576), (3, 97)):
    values = charts.ticks(low, high)
    assert 2 <= len(values) <= 6
    assert low - 1e-9 <= values[0]
    assert values[-1] <= high + 1e-9
    steps = np.diff(values)
    np.testing.assert_allclose(steps, steps[0])


def test_numbers_are_short():
  given = 0, 2.5, -3, 99.999, 12345, 0.0123456, 1234567, 1e-7, None
  texts = '0 2.5 -3 100 12,345 0.01235 1.23e+06 1e-07 –'
  assert ' '.join(map(charts.number, given)) == texts


def test_long_lines_are_thinned_to_means():
  size = 10 * charts.POINTS + 1
  y = list(np.random.default_rng(0).random(size))
  line = charts.thin(charts.Line('a', list(range(1, size + 1)), y))
  assert len(line.x) <= charts.POINTS
  assert line.x[-1] == size
  assert line.y[0] == pytest.approx(np.mean(y[: line.x[0]]))


def test_gap_breaks_a_line():
  line = charts.Line('a', [1, 2, 3, 4, 5, 6], [1, 2, None, 3, None, 1])
  page = Page(charts.curves('A', [line], 'm'))
  shapes = [tag for tag, _ in page.elements if tag in ('polyline', 'circle')]
  assert shapes == ['polyline', 'circle', 'circle']


def test_high_start_leaves_room_for_the_rest():
  x = list(range(1, 101))
  line = charts.Line('a', x, [100.0] * 5 + [2.0] * 95)
  chart = charts.curves('A', [line], 'm')
  assert 'outside' in chart
  flat = re.findall(r'([\d.]+),([\d.-]+)', chart.split('points="')[1])
  assert float(flat[50][1]) < charts.BOTTOM - 100  # Not at the foot.
  even = charts.curves('A', [charts.Line('a', x, [2.0] * 100)], 'm')
  assert 'outside' not in even


def test_line_keeps_its_colour_where_others_are_absent():
  lines = [charts.Line('none', [], []), charts.Line('b', [1, 2], [1, 2])]
  assert 'class="c1"' in charts.curves('A', lines, 'm')
