"""One call from arrays to a classifier: a run, or one clear line."""

import json
import os
import signal
import tempfile

import numpy as np
import pytest

import flatmatch_jax
from flatmatch_jax.run import progress
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.types import UserError

pytestmark = pytest.mark.usefixtures('tiny_network')

# No strong views: RandAugment takes long to compile.
OPTIONS = {'method': 'pseudo_label', 'steps': 6, 'seed': 3}


def make_arrays(shape=(12, 9), seed=0):
  """Labeled, unlabeled and test images of three classes."""
  rng = np.random.default_rng(seed)
  image = lambda n: rng.integers(0, 256, (n, *shape), np.uint8)
  return {
    'labeled_images': image(7),
    'labels': np.arange(7) % 3,
    'unlabeled_images': image(20),
    'test_images': image(5),
    'test_labels': [0, 1, 2, 2, 1],
  }


@pytest.fixture(scope='module')
def finished(tmp_path_factory, tiny_network):
  """A run that was not interrupted, and its classifier."""
  workdir = tmp_path_factory.mktemp('fit') / 'run'
  return workdir, flatmatch_jax.fit(**make_arrays(), **OPTIONS, workdir=workdir)


@pytest.fixture
def interrupted_after(monkeypatch):
  """Ctrl-C in the given step of the next run."""

  def patch(steps):
    step = progress.Progress.step

    def stop(self):
      nonlocal steps
      step(self)
      steps -= 1
      if steps == 0:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(progress.Progress, 'step', stop)

  return patch


def test_fit_is_a_run_that_all_commands_read(finished):
  workdir, classifier = finished
  images = make_arrays()['test_images']
  found = classifier.probabilities(images)
  assert found.shape == (5, 3)
  np.testing.assert_array_equal(
    found, flatmatch_jax.load(workdir).probabilities(images)
  )
  config = json.loads((workdir / 'config.json').read_text())
  assert (config['dataset'], config['seed'], config['steps']) == ('npz', 3, 6)
  assert not config['compilation_cache']  # JAX stays as its caller set it.
  with np.load(config['data_dir']) as file:
    np.testing.assert_array_equal(file['test_images'], images)
  result = json.loads((workdir / 'result.json').read_text())
  wrong = found.argmax(-1) != make_arrays()['test_labels']
  assert result['error_last'] == pytest.approx(100 * wrong.mean())


def test_an_interrupted_fit_resumes_to_the_bit(
  finished, interrupted_after, tmp_path, monkeypatch
):
  """In a temporary workdir, which is kept and named."""
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  interrupted_after(3)
  with pytest.raises(KeyboardInterrupt) as stop:
    flatmatch_jax.fit(**make_arrays(), **OPTIONS)
  (workdir,) = tmp_path.iterdir()
  assert f'workdir={str(workdir)!r} to resume' in str(stop.value)
  classifier = flatmatch_jax.fit(**make_arrays(), **OPTIONS, workdir=workdir)
  images = make_arrays()['unlabeled_images']
  np.testing.assert_array_equal(
    classifier.probabilities(images), finished[1].probabilities(images)
  )


def test_what_is_finished_is_loaded(finished, monkeypatch):
  monkeypatch.setattr(progress.Progress, 'step', None)  # Nothing is trained.
  again = flatmatch_jax.fit(**make_arrays(), **OPTIONS, workdir=finished[0])
  assert again.about['step'] == 6


@pytest.mark.parametrize(
  ('arrays', 'options', 'named'),
  [
    (make_arrays(seed=1), {}, ['run on other arrays', 'another workdir']),
    (make_arrays(), {'flip': False}, ['another config: flip (True there']),
  ],
)
def test_a_workdir_holds_one_run(finished, arrays, options, named):
  workdir, _ = finished
  before = (workdir / 'data.npz').read_bytes()
  with pytest.raises(UserError) as error:
    flatmatch_jax.fit(**arrays, **OPTIONS, workdir=workdir, **options)
  for words in named:
    assert words in str(error.value)
  assert (workdir / 'data.npz').read_bytes() == before


def test_arrays_of_a_run_that_just_began_stay(tmp_path):
  (tmp_path / 'data.npz').write_bytes(b'of the other')
  with Workdir(tmp_path).lock(), pytest.raises(UserError, match='is in use'):
    flatmatch_jax.fit(**make_arrays(), **OPTIONS, workdir=tmp_path)
  assert (tmp_path / 'data.npz').read_bytes() == b'of the other'


def test_a_temporary_workdir_is_removed(tmp_path, monkeypatch):
  """Colour, without a test; names of classes are those given."""
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  arrays = make_arrays((8, 8, 3))
  for name in ('test_images', 'test_labels'):
    arrays.pop(name)
  options = OPTIONS | {'steps': 1, 'class_names': ['a', 'b', 'c']}
  classifier = flatmatch_jax.fit(**arrays, **options)
  assert not list(tmp_path.iterdir())
  assert classifier.class_names == ('a', 'b', 'c')
  images = np.zeros((2, 8, 8, 3), np.uint8)
  assert classifier.probabilities(images).shape == (2, 3)


def change(**changes):
  return lambda arrays: arrays | changes


IMAGES = make_arrays()['labeled_images']


@pytest.mark.parametrize(
  ('wrong', 'named'),
  [
    (
      change(labeled_images=IMAGES / 255),
      ['labeled_images are float64 from 0 to 1, not uint8', '255 * images'],
    ),
    (change(labeled_images=IMAGES[0]), ['labeled_images', '(12, 9)']),
    (change(labeled_images=None), ['labeled_images of shape ()']),
    (change(labels=[0, 1, 2]), ['3 labels', '(7, 12, 9)', 'one for each']),
    (change(labels=list('abcabca')), ['labels are <U1', 'return_inverse']),
    (change(labels=[0, 1, 3, 0, 1, 3, 0]), ['class 2', 'no labeled']),
    (change(labels=[1, 2, 3, 1, 2, 3, 1]), ['from 1 to 3; count labels from']),
    (change(labels=[-1, 0, 1, 2, 0, 1, 2]), ['labels run from -1', 'from 0']),
    (change(unlabeled_images=IMAGES[:, :8]), ['unlabeled_images', '(8, 9, 1)']),
    (change(test_labels=None), ['test_images and test_labels', 'both']),
    (change(class_names=['a', 'a', 'b']), ['2 different names of 3']),
    (change(method='flatmach'), ["'flatmach'", "mean 'flatmatch'"]),
    (change(steps='many'), ['steps', 'many']),
    (change(steps=0), ['config.steps=0']),
    (change(flipped=True), ["'flipped'", "mean 'flip'"]),
    (change(learning_rate='high'), ['learning_rate', 'high']),
    (change(recipe_args={'rho_': 1}), ['recipe_args', "'rho_'"]),
    (change(recipe_args=3), ['recipe_args=3', 'docs/settings.md']),
    (change(method='freematch,labels=3'), ["'freematch,labels=3'"]),
    (change(workdir='gs://b/run'), ['gs://b/run', 'a folder on a disk']),
  ],
)
def test_wrong_input_is_one_line(wrong, named, tmp_path):
  workdir = tmp_path / 'run'
  with pytest.raises(UserError) as error:
    flatmatch_jax.fit(**wrong(make_arrays() | {'workdir': workdir}))
  for words in named:
    assert words in str(error.value)
  assert '\n' not in str(error.value)
  assert not workdir.exists()
