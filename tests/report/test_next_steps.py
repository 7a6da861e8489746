"""What the report advises, and how it says that a run went wrong."""

import html
import re
import shlex
from types import SimpleNamespace

import ml_collections
import numpy as np
import pytest
from test_report import Page, fake_predictions, write_run

from flatmatch_jax.data import Dataset
from flatmatch_jax.report import (
  advice,
  comparison,
  diagnosis,
  next_steps,
  runs,
  single,
)
from flatmatch_jax.report.advice import Advice, Shown
from flatmatch_jax.run import reference

NAMES = ('cat', 'dog & <b>', 'ship')
GROUP = 12  # Images of a class among the labeled ones.


def stripes(kind, rng):
  """An image [16, 16, 3] whose edges have one of three directions."""
  down, right = np.mgrid[:16, :16]
  wave = ((down, right, down + right)[kind] // 2) % 2
  noise = rng.integers(0, 40, (16, 16, 3))
  return (180 * wave[..., None] + noise).astype(np.uint8)


@pytest.fixture(scope='module')
def dataset():
  """Labeled images, of which numbers 3 and 20 have a wrong label; 60 more."""
  rng = np.random.default_rng(0)
  kinds = np.repeat([0, 1, 2], GROUP)
  more = np.repeat([0, 1, 2], 20)
  labels = kinds.copy()
  labels[[3, 20]] = [2, 0]
  pixels = np.stack([stripes(kind, rng) for kind in (*kinds, *more)])
  return Dataset(
    name='folder',
    train_images=pixels,
    train_labels=np.concatenate([labels, np.full(60, -1)]).astype(np.int32),
    test_images=pixels[:0],
    test_labels=labels[:0],
    class_names=NAMES,
    train_paths=tuple(f'labeled/x/{i}.png' for i in range(36))
    + tuple(f'unlabeled/{i}.png' for i in range(60)),
  )


SPLIT = {'labeled': list(range(3 * GROUP))}


def trained(dataset):
  """A network that knows all labels by heart, and the kinds of the others.

  Of the last unlabeled image it is unsure.
  """
  given = dataset.train_labels
  known = np.where(
    given >= 0, given, np.repeat([0, 1, 2, 0, 1, 2], [12, 12, 12, 20, 20, 20])
  )
  probs = np.eye(3)[known] * 0.97 + 0.01
  probs[-1] = [0.3, 0.3, 0.4]
  places = {
    image.tobytes(): row for row, image in enumerate(dataset.train_images)
  }

  def classify(weights, batch_stats, images):
    assert (weights, batch_stats) == (['averaged'], 'statistics')
    return [probs[[places[image.tobytes()] for image in images]]]

  state = SimpleNamespace(ema_params='averaged', batch_stats='statistics')
  return SimpleNamespace(
    state=state,
    classify=classify,
    config=ml_collections.ConfigDict({'dataset': 'folder'}),
  )


def test_advice_finds_wrong_labels_and_images_of_doubt(dataset):
  found = advice.advise(trained(dataset), dataset, SPLIT)
  assert found.to_label[0].path == 'unlabeled/59.png'
  assert found.to_label[0].confidence == pytest.approx(0.4)
  assert len({shown.path for shown in found.to_label}) == advice.SHOWN
  assert all(shown.label == -1 for shown in found.to_label)
  # The network agrees with these labels, and the images like them do not.
  assert {s.path: (s.label, s.guess) for s in found.suspects} == {
    'labeled/x/3.png': (2, 0),
    'labeled/x/20.png': (0, 1),
  }
  assert found.num_labeled == 3 * GROUP
  assert found.labeled_path == 'labeled/x/0.png'


def test_images_that_look_alike_are_asked_if_they_know(dataset):
  """Labels of which most differ from those of similar images prove nothing."""
  known = advice.advise(trained(dataset), dataset, SPLIT)
  assert known.asked
  labels = dataset.train_labels.copy()
  labels[:36] = (labels[:36] + 1) % 3
  other = dataset._replace(train_labels=labels)
  found = advice.advise(trained(other), other, SPLIT)
  assert not found.asked
  assert found.suspects == []


@pytest.mark.parametrize(
  ('guesses', 'labels', 'classes', 'expected'),
  [
    ([0] * 10, [0] * 8 + [1] * 2, 2, False),  # Always the largest class.
    ([0, 1] * 10, [0, 0, 1, 1] * 5, 2, False),  # By chance.
    ([0, 0, 1, 1, 1], [0, 0, 1, 1, 0], 2, True),
    ([0, 1, 9, 9], [0, 1, 2, 3], 10, True),  # Half of many classes is much.
    ([0, 9, 9, 9], [0, 1, 2, 3], 10, False),
  ],
)
def test_guesses_are_trusted_above_chance(guesses, labels, classes, expected):
  found = advice.trusted(np.array(guesses), np.array(labels), classes)
  assert found == expected


def test_where_the_network_disagrees_it_is_asked_itself():
  own = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
  others = np.array([[0.3, 0.7], [1.0, 0.0], [0.8, 0.2]])
  second = advice.opinions(own, np.array([0, 0, 0]), others)
  np.testing.assert_array_equal(second, [others[0], own[1], others[2]])
  np.testing.assert_array_equal(
    advice.suspects(second, np.zeros(3, int)), [1, 0]
  )


def test_arrays_name_their_rows(dataset):
  arrays = dataset._replace(train_paths=())
  found = advice.advise(trained(dataset), arrays, SPLIT)
  assert found.to_label[0].path == 'unlabeled_images[59]'
  assert found.suspects[0].path in ('labeled_images[3]', 'labeled_images[20]')


def test_pixels_are_a_baseline(dataset, monkeypatch):
  """Logistic regression tells the stripes, and their labels are two wrong."""
  rows = np.arange(0, 36, 2)
  labels = dataset.train_labels[rows].copy()
  labels[:3] = (labels[:3] + 1) % 3
  monkeypatch.setattr(advice, '_AT_A_TIME', 4)  # At a time.
  error = advice.pixels_error(
    dataset, SPLIT['labeled'], dataset.train_images[rows], labels
  )
  assert error == pytest.approx(100 * 3 / 18)


# The page.


def shown(path, guess=1, label=-1, confidence=0.54):
  pixels = np.zeros((8, 8, 3), np.uint8)
  return Shown(pixels, path, guess, confidence, label)


ADVICE = Advice(
  [shown('unlabeled/a $b.png'), shown('unlabeled/c.png')],
  [shown('labeled/cat/d e.png', label=0), shown("labeled/cat/'f.png", label=0)],
  36,
  True,
  'labeled/cat/d e.png',
)


@pytest.fixture
def make_run(tmp_path):
  def make(name='mine', **changes):
    changes = {
      'dataset': 'folder', 'labels': 'all', 'data_dir': '/my photos',
      'names': list(NAMES), 'error': None, 'warnings': [],
    } | changes  # fmt: skip
    error, warnings = changes.pop('error'), changes.pop('warnings')
    files = write_run(tmp_path / name, **changes)
    result = files.read('result.json') | {'warnings': warnings}
    if error is not None:
      result |= {'error_last': error}
    files.write('result.json', result)
    return runs.read(files.path)

  return make


def test_page_ends_with_what_to_do_next(make_run):
  run = make_run()
  text = single.render(run, fake_predictions(3), '', ADVICE)
  page = Page(text)
  assert '<h2>What next?</h2>' in text
  assert 'Label these 2 images first' in page.text
  assert 'Of 36 labels, these look the most doubtful' in page.text
  assert 'dog & <b>?' in page.text
  (block,) = re.findall(r'<pre>(mv .*?)</pre>', text, re.S)
  lines = html.unescape(block).splitlines()
  root = '/my photos/labeled'
  assert [shlex.split(line) for line in lines] == [
    ['mv', '-n', *(f'{root}/{folder}/{name}' for folder in ('cat', NAMES[1]))]
    for name in ('d e.png', "'f.png")
  ]
  assert (
    f"flatmatch_jax.label '/my photos' --workdir {run.files.path}" in page.text
  )


@pytest.mark.parametrize(
  ('place', 'path', 'words'),
  [
    ('mine.csv', 'labeled/a.png', 'paths and labels into {}/mine.csv.'),
    ('', 'x/a.png', 'paths and labels into {}/labels.csv.'),
    ('folder', 'train/cat/a.png', 'to its class, {}/folder/train/CLASS/.'),
    ('folder', 'cat/a.png', 'to its class, {}/folder/CLASS/.'),
  ],
)
def test_labels_are_to_be_given_as_the_layout_has_them(
  make_run, tmp_path, place, path, words
):
  for name in ('mine.csv', 'labels.csv'):
    (tmp_path / name).touch()
  run = make_run(data_dir=str(tmp_path / place))
  page = next_steps.labels_to_give(
    run, ADVICE._replace(labeled_path=path), NAMES
  )
  assert words.format(tmp_path) in page
  assert 'flatmatch_jax.label' not in page
  page = next_steps.labels_to_check(run, ADVICE, NAMES)
  assert ('mv -n' in page) == (place == 'folder')


def test_no_wrong_label_moves_onto_another_file(make_run, tmp_path):
  """One is there already, and one is moved there by the line before."""
  target = tmp_path / 'labeled' / NAMES[1]
  target.mkdir(parents=True)
  (target / 'd e.png').touch()
  suspects = [
    shown(f'labeled/{name}/d e.png', label=0) for name in ('cat', 'cat/more')
  ]
  page = next_steps.labels_to_check(
    make_run(data_dir=str(tmp_path)), ADVICE._replace(suspects=suspects), NAMES
  )
  (block,) = re.findall(r'<pre>(mv .*?)</pre>', page, re.S)
  lines = html.unescape(block).splitlines()
  assert [shlex.split(line)[-1] for line in lines] == [
    f'{target}/d e-{number}.png' for number in (2, 3)
  ]


def test_a_fair_error_needs_the_images_that_are_missing(make_run):
  run = make_run()
  assert 'a fair choice needs validation images' in single.summary(run, None)
  result = {f'val_{key}': value for key, value in run.result.items()}
  run = run._replace(result=run.result | result)
  assert 'needs validation images' in single.summary(run, None)
  del run.result['error_best']
  assert 'a fair estimate needs test images.' in single.summary(run, None)


def test_unsure_guesses_get_no_command(make_run):
  suspects = [
    shown('labeled/cat/a.png', label=0, confidence=0.33),
    shown('labeled/cat/b.png', label=0, confidence=0.55),
  ]
  page = next_steps.labels_to_check(
    make_run(), ADVICE._replace(suspects=suspects), NAMES
  )
  assert 'may be missing here' not in page
  assert 'b.png' in page.split('mv -n', 1)[1]
  assert 'a.png' not in page.split('mv -n', 1)[1]


def test_without_similar_images_labels_may_be_missed(make_run):
  given = ADVICE._replace(asked=False, suspects=ADVICE.suspects[:1])
  page = next_steps.labels_to_check(make_run(), given, NAMES)
  assert 'this looks the most doubtful' in page
  assert 'may be missing here' in page


def test_confused_classes_are_those_of_most_mistakes(make_run):
  found = fake_predictions(3)
  confusion = np.array(found.report['confusion'])
  pairs = {
    (i, j): confusion[i, j] + confusion[j, i]
    for i, j in ((0, 1), (0, 2), (1, 2))
  }
  i, j = max(pairs, key=pairs.get)
  page = next_steps.confused(found, list(NAMES))
  first = page[page.index('<tbody>') :]
  wanted = [f'{NAMES[i]} and {NAMES[j]}', *confusion[[i, j], [j, i]]]
  assert Page(first[: first.index('</tr>')]).text == ''.join(map(str, wanted))


def test_without_held_out_images_the_error_is_to_be_measured(make_run):
  page = Page(single.render(make_run(), None, 'no test images', ADVICE)).text
  assert 'Measure the error' in page
  assert '--config.num_val=10 ' in page
  assert 'Tell these classes apart' not in page


def test_more_steps_keep_what_follows_them(make_run):
  run = make_run(steps=200)
  page = Page(next_steps.again(run)).text
  first, second = [line for line in page.splitlines() if 'main.py' in line]
  assert '--config.steps=200 ' in first
  assert '--config.steps=400 ' in second
  assert '--config.steps=200' not in second
  assert str(run.files.path) + '-next-steps' in second


def test_other_datasets_get_no_advice(make_run):
  assert 'What next' not in single.render(make_run(), fake_predictions(3))


# How a run went.


@pytest.mark.parametrize(
  ('changes', 'pixels', 'kind', 'words'),
  [
    ({'error': 20.0}, 40.0, 'status', 'finished'),
    ({'error': 50.0}, 40.0, 'status failed', 'above the 40.00% of logistic'),
    # Two of three classes are wrong.
    ({'error': 66.7}, None, 'status failed', 'no better than guessing'),
    (
      {'error': 20.0, 'warnings': ['step 9: no pseudo-label was used']},
      40.0,
      'status unfinished',
      'Step 9: no pseudo-label was used.',
    ),
    ({'done': False}, 1.0, 'status unfinished', 'unfinished, at step 70'),
  ],
)
def test_only_a_run_that_went_well_is_green(
  make_run, changes, pixels, kind, words
):
  if changes.get('done', True):
    run = make_run(**changes)
  else:
    run = make_run()._replace(finished=False)
    words = 'unfinished, at step'
  found = fake_predictions(3)._replace(pixels_error=pixels)
  page = Page(single.render(run, found))
  (status,) = [
    attributes['class']
    for tag, attributes in page.elements
    if tag == 'span' and attributes.get('class', '').startswith('status')
  ]
  assert status == kind
  assert words in page.text
  assert ('method=supervised' in page.text) == bool(
    diagnosis.diagnose(run, pixels)
  )


def test_error_above_that_of_earlier_runs_is_a_failure(make_run, monkeypatch):
  run = make_run(error=30.0)
  band = reference.Band([10.0, 11.0, 12.0], [0, 1, 2], 0.05)
  monkeypatch.setattr(reference, 'find', lambda *_: {run.step: band})
  (finding,) = diagnosis.diagnose(run)
  assert finding.failed
  assert 'earlier runs' in finding.text
  monkeypatch.setattr(reference, 'find', lambda *_: {run.step - 1: band})
  assert diagnosis.diagnose(run) == []


def test_worse_than_supervised_is_told_where_both_are(tmp_path):
  found = []
  settings = (
    ('supervised', 40, 5),
    ('freematch', 40, 9),
    ('fixmatch', 40, 2),
    ('uda', 100, 9),
  )
  for number, (method, labels, offset) in enumerate(settings):
    path = tmp_path / str(number)
    write_run(path, method=method, labels=labels, offset=offset)
    found.append(runs.read(path))
  groups = comparison.group(found)
  page = Page(comparison.below_supervised(groups)).text
  assert 'freematch on digits, 40 labels: 11.67% against 7.67%.' in page
  assert 'fixmatch' not in page
  assert 'uda' not in page
  assert 'freematch on digits' in comparison.render(
    groups, {'a.csv': '', 'a.tex': ''}
  )
