"""A finished run, used: its error again, and its classes for image files."""

import csv
import io
import json
import os
import pathlib
import sys

import numpy as np
from PIL import Image
import pytest
import runs

import flatmatch_jax
from flatmatch_jax import data, evaluate, predict
from flatmatch_jax.report import __main__ as report
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import classifier as classifier_lib
from flatmatch_jax.training import load


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return runs.finished_run(tmp_path_factory)[0]


@pytest.fixture(scope='module')
def run(workdir):
  return load.load_run(Workdir(workdir))


@pytest.fixture(scope='module')
def classifier(workdir):
  return flatmatch_jax.load(workdir)


@pytest.fixture(scope='module')
def images():
  return data.load('digits').test_images[:20]


@pytest.fixture(scope='module')
def classes(run, images):
  """What the averaged weights say about the arrays."""
  state = run.state
  (probs,) = run.classify([state.ema_params], state.batch_stats, images)
  return probs.argmax(-1)


@pytest.fixture
def ready(run, classifier, monkeypatch):
  """Reading a run takes seconds: take the one that is there."""
  monkeypatch.setattr(load, 'load_run', lambda files, which='latest': run)
  monkeypatch.setattr(
    classifier_lib, 'load', lambda path, which='latest': classifier
  )


def rows_of(text):
  return list(csv.DictReader(io.StringIO(text)))


def save_all(images, folder):
  folder.mkdir(exist_ok=True)
  for number, image in enumerate(images):
    Image.fromarray(image[..., 0]).save(folder / f'{number:02}.png')


def assert_line(code, stderr, *named):
  assert code == 2
  assert stderr.splitlines()[-1].startswith('error: ')
  assert 'Traceback' not in stderr
  for words in named:
    assert str(words) in stderr


# Evaluate.


@pytest.mark.parametrize('which', ['latest', 'best'])
def test_evaluate_agrees_with_the_log(call, workdir, which):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  rows = [row for row in map(json.loads, lines) if 'error' in row]
  chosen = rows[-1]
  if which == 'best':
    # Of equally good ones the last is kept.
    chosen = min(reversed(rows), key=lambda row: row['error'])
  code, stdout, _ = call(evaluate, '--workdir', workdir, '--checkpoint', which)
  assert code == 0
  found = json.loads((workdir / 'evaluation.json').read_text())
  for key in ('step', 'error', 'error_raw'):
    assert found[key] == chosen[key], key
  # By another number of devices.
  calibration = pytest.approx(chosen['calibration_error'], rel=1e-5)
  assert found['calibration_error'] == calibration
  first, *classes = stdout.splitlines()
  assert first.startswith(
    f'step {chosen["step"]}: error {chosen["error"]:.2f}% '
  )
  assert first.endswith(' on 360 test images')
  # The worst first, and together what was wrong.
  errors = [float(line.split('%')[0]) for line in classes]
  assert errors == sorted(errors, reverse=True)
  assert len(errors) == 10
  confusion = np.array(found['confusion'])
  wrong = confusion.sum() - np.trace(confusion)
  assert wrong == round(chosen['error'] * 3.6)


def test_unknown_checkpoint_is_refused(call, workdir):
  code, _, stderr = call(
    evaluate, '--workdir', workdir, '--checkpoint', 'first'
  )
  assert_line(code, stderr, "'first'", 'latest', 'best')


# Report.


def test_report_shows_what_the_network_says(call, workdir, tmp_path):
  """Its predictions have the error that the run logged."""
  out = tmp_path / 'page.html'
  code, stdout, stderr = call(report, '--workdir', workdir, '--out', out)
  assert (code, stderr) == (0, '')
  assert str(out) in stdout
  page, result = out.read_text(), Workdir(workdir).read('result.json')
  assert (
    '360 test images, by the averaged weights at step 16: error '
    f'{result["error_last"]:.2f}%'
  ) in page
  # Six rows of six views, and examples.
  assert page.count('of training image') == 36
  assert page.count(', predicted ') > 24


# Predict.


def test_process_gives_files_the_classes_of_arrays(
  workdir, images, classes, tmp_path
):
  """The real program on files and folders, one of them no image."""
  save_all(images[:10], tmp_path / 'folder')
  deep = tmp_path / 'folder' / 'deep' / 'deeper'
  deep.mkdir(parents=True)
  Image.fromarray(images[10, ..., 0]).save(deep / 'UPPER.PNG')
  (deep / 'notes.txt').write_text('not for the network')
  single = tmp_path / 'without-extension'
  Image.fromarray(images[11, ..., 0]).save(single, format='PNG')
  broken = tmp_path / 'broken.png'
  broken.write_text('not an image')
  out = tmp_path / 'preds.csv'
  args = f'--workdir={workdir}', f'--out={out}', tmp_path / 'folder', broken
  done = runs.python(
    '-m', 'flatmatch_jax.predict', *args, single,
    cwd=runs.ROOT, env=runs.environment(workdir.parent),
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert 'Traceback' not in done.stderr
  assert done.stderr.count('skipped') == 1
  assert str(broken) in done.stderr
  notes = deep / 'notes.txt'
  assert f'Skipped 1 other file: {notes} (not an image by' in done.stderr
  rows = rows_of(out.read_text())
  files = [tmp_path / 'folder' / f'{n:02}.png' for n in range(10)]
  files += [deep / 'UPPER.PNG', single]
  assert [row['file'] for row in rows] == list(map(str, files))
  assert [int(row['class']) for row in rows] == classes[:12].tolist()
  assert [row['label'] for row in rows] == [str(c) for c in classes[:12]]
  assert all(0.1 <= float(row['confidence']) <= 1 for row in rows)
  assert '12 predictions' in done.stdout
  assert not list(tmp_path.glob('*.tmp'))


def test_an_unfinished_run_is_named(
  call, classifier, workdir, images, tmp_path, monkeypatch
):
  about = classifier.about | {'step': 3}
  monkeypatch.setattr(
    classifier_lib, 'load', lambda *_: classifier._replace(about=about)
  )
  save_all(images[:1], tmp_path)
  args = (predict, tmp_path, '--workdir', workdir)
  note = 'its step 3 of 16. Predict again when it has.'
  assert note in call(*args)[2]
  assert note not in call(*args, '--checkpoint', 'best')[2]


def test_more_images_than_a_batch(
  call, ready, workdir, images, classes, tmp_path, monkeypatch
):
  monkeypatch.setattr(predict, 'BATCH', 8)
  save_all(images, tmp_path)
  (tmp_path / '03x.png').write_text('not an image')
  code, stdout, stderr = call(predict, '--workdir', workdir, tmp_path)
  assert code == 0
  assert '03x.png' in stderr
  assert [int(row['class']) for row in rows_of(stdout)] == classes.tolist()


def test_class_names_are_those_of_the_run(tmp_path):
  """As they were in the folder that the run was trained on."""
  for name, value in (('a', 0), ('b', 255), ('c', 0)):
    Image.new('RGB', (40, 30), (value,) * 3).save(tmp_path / f'{name}.png')
  (tmp_path / 'bad.png').write_bytes(b'')
  classifier = classifier_lib.Classifier(
    class_names=('ink', 'Blatt Papier'),
    image_shape=(8, 8, 3),
    test_share=1.0,
    run=lambda images: np.stack(
      [1 - images[:, 0, 0, 0] / 255, images[:, 0, 0, 0] / 255], -1
    ),
    about={},
  )
  files = predict.look_at([str(tmp_path)]).images
  table = predict.Table(classifier.class_names, 1, False)
  rows, complaints = [], []
  predict.predict(
    classifier,
    files,
    lambda *found: rows.append(table.row(*found)),
    lambda *why: complaints.append(why),
  )
  named = [(pathlib.Path(row[0]).name, row[1], row[2]) for row in rows]
  assert named == [
    ('a.png', 'ink', '0'),
    ('b.png', 'Blatt Papier', '1'),
    ('c.png', 'ink', '0'),
  ]
  ((path, reason),) = complaints
  assert path == tmp_path / 'bad.png'
  assert reason.startswith('not one of')


def test_more_than_the_best_class(
  call, ready, classifier, workdir, images, tmp_path
):
  """The same numbers in a table and as JSON, in the order of the arrays."""
  save_all(images[:5], tmp_path / 'in')
  probs = classifier.probabilities(images[:5])
  order = np.argsort(-probs)[:, :3]
  found = {}
  for name in ('a.csv', 'a.jsonl'):
    code, stdout, _ = call(
      predict, '--workdir', workdir, tmp_path / 'in', '--out', tmp_path / name,
      '--top', 3, '--probabilities',
    )  # fmt: skip
    assert code == 0
    assert '5 predictions' in stdout
    found[name] = (tmp_path / name).read_text()
  table, items = rows_of(found['a.csv']), found['a.jsonl'].splitlines()
  for row, line, best, expected in zip(table, items, order, probs, strict=True):
    item = json.loads(line)
    columns = ('class', 'class_2', 'class_3')
    assert [int(row[name]) for name in columns] == best.tolist()
    assert [place['class'] for place in item['top']] == best.tolist()
    assert row['label_3'] == item['top'][2]['label'] == str(best[2])
    values = [float(row[f'p_{digit}']) for digit in range(10)]
    np.testing.assert_allclose(values, expected, atol=6e-5)
    values = [item['probabilities'][str(digit)] for digit in range(10)]
    np.testing.assert_allclose(values, expected, atol=1e-6)
    assert item['confidence'] == max(values)


@pytest.mark.parametrize('top', [0, 11])
def test_as_many_classes_as_there_are(call, ready, workdir, tmp_path, top):
  save_all(np.zeros((1, 8, 8, 1), np.uint8), tmp_path)
  code, _, stderr = call(predict, '--workdir', workdir, tmp_path, '--top', top)
  assert_line(code, stderr, f'--top {top}', 'from 1 to 10')


def test_a_bar_is_for_a_terminal(
  call, ready, workdir, images, tmp_path, monkeypatch
):
  save_all(images[:5], tmp_path / 'in')
  (tmp_path / 'in' / '2x.png').write_text('not an image')
  args = (predict, '--workdir', workdir, tmp_path / 'in')
  for terminal, out, shown in ((0, 1, 0), (1, 1, 1), (1, 0, 0)):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda t=terminal: bool(t))
    monkeypatch.setattr(sys.stdout, 'isatty', lambda t=terminal: bool(t))
    _, _, stderr = call(*args, *(['--out', tmp_path / 'a.csv'] if out else []))
    assert ('6/6' in stderr) == shown
    assert stderr.count('skipped') == 1


@pytest.mark.parametrize('before', [(), ('preds.csv',)])
def test_none_readable_is_an_error(call, ready, workdir, tmp_path, before):
  (tmp_path / 'a.png').write_text('not an image')
  out = tmp_path / 'preds.csv'
  if before:
    out.write_text('of last week')
  code, _, stderr = call(predict, '--workdir', workdir, tmp_path, '--out', out)
  assert_line(code, stderr, 'a.png', 'None of the files')
  assert sorted(os.listdir(tmp_path)) == ['a.png', *before]
  assert not before or out.read_text() == 'of last week'


def test_folder_without_images_is_an_error(call, workdir, tmp_path):
  code, _, stderr = call(predict, '--workdir', workdir, tmp_path)
  assert_line(code, stderr, tmp_path, '.png', '.jpg')
  assert stderr.count('\n') == 1
