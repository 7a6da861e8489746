"""A model in use: arrays and files in, probabilities out, or one clear line."""

import shutil

import numpy as np
from PIL import Image
import pytest
import runs

import flatmatch_jax
from flatmatch_jax import data
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import classifier as classifier_lib
from flatmatch_jax.training import load
from flatmatch_jax.types import UserError


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return runs.finished_run(tmp_path_factory)[0]


@pytest.fixture(scope='module')
def classifier(workdir):
  return flatmatch_jax.load(workdir)


@pytest.fixture(scope='module')
def images():
  return data.load('digits').test_images[:20]


def test_a_classifier_is_the_run_without_its_optimizer(
  workdir, classifier, images
):
  run = load.load_run(Workdir(workdir))
  state = run.state
  (probs,) = run.classify([state.ema_params], state.batch_stats, images)
  np.testing.assert_array_equal(classifier.probabilities(images), probs)
  assert classifier.about['step'] == state.step
  assert classifier.class_names == tuple('0123456789')
  assert classifier.image_size == (8, 8)


def test_a_classifier_reads_no_more_than_it_needs(workdir, monkeypatch):
  restore, asked = Checkpoints.restore, []

  def spy(self, like, which):
    asked.append((set(like), which))
    return restore(self, like, which)

  monkeypatch.setattr(Checkpoints, 'restore', spy)
  flatmatch_jax.load(workdir, checkpoint='best')
  assert asked == [({'step', 'ema_params', 'batch_stats'}, 'best')]


def test_importing_is_cheap_and_loading_needs_no_tensorflow(workdir):
  code = f"""
import sys, flatmatch_jax
assert 'jax' not in sys.modules
assert {{'load', 'fit'}} < set(dir(flatmatch_jax))
flatmatch_jax.load({str(workdir)!r})
assert 'tensorflow' not in sys.modules and 'matplotlib' not in sys.modules
"""
  done = runs.python('-c', code, cwd=runs.ROOT)
  assert done.returncode == 0, done.stderr


def test_files_are_what_they_hold(classifier, images, tmp_path, monkeypatch):
  """Grey arrays, and files in several batches, one file and none."""
  paths = [tmp_path / f'{n:02}.png' for n in range(len(images))]
  for path, image in zip(paths, images, strict=True):
    Image.fromarray(image[..., 0]).save(path)
  expected = classifier.probabilities(images)
  monkeypatch.setattr(classifier_lib, 'BATCH', 10)  # Few: compiled for 16.
  for found, rows in (
    (classifier.probabilities(images[..., 0]), slice(None)),
    (classifier.probabilities(list(images)), slice(None)),
    (classifier.probabilities(paths), slice(None)),
    (classifier.probabilities(str(paths[3])), slice(3, 4)),
    (classifier.probabilities([]), slice(0)),
    (classifier.probabilities(images[:0]), slice(0)),
  ):
    np.testing.assert_allclose(found, expected[rows], atol=1e-6)


def test_of_a_file_the_test_sees_the_centre(tmp_path):
  """After training on ImageNet: 8 of the 10 pixels that cover the image."""
  pixels = np.random.default_rng(0).integers(0, 256, (10, 20, 3), np.uint8)
  Image.fromarray(pixels).save(tmp_path / 'a.png')
  seen = []
  classifier = classifier_lib.Classifier(
    ('a', 'b'), (8, 8, 3), 0.8, lambda x: seen.append(x) or np.eye(2)[:1], {}
  )
  classifier.probabilities(tmp_path / 'a.png')
  np.testing.assert_array_equal(seen[0][0], pixels[1:9, 6:14])


@pytest.mark.parametrize(
  ('change', 'named'),
  [
    (lambda x: x / 255, ['float64', 'uint8 [N, 8, 8, 1]']),
    (lambda x: x[:, :7], ['[20, 7, 8, 1]', '[N, 8, 8, 1]']),
    (lambda x: x[0], ['[8, 8, 1]', 'or [N, 8, 8]']),
    (lambda x: np.repeat(x, 3, -1), ['[20, 8, 8, 3]']),
    (lambda x: [image / 255 for image in x], ['float64', '[20, 8, 8, 1]']),
    (lambda x: ['no/such.png'], ['no/such.png', 'No such file']),
  ],
)
def test_wrong_images_are_refused(classifier, images, change, named):
  with pytest.raises(UserError) as error:
    classifier.probabilities(change(images))
  for words in named:
    assert words in str(error.value)


@pytest.mark.parametrize('name', ['nothing', 'file.txt', '.'])
def test_what_is_not_a_run_is_refused(tmp_path, name):
  (tmp_path / 'file.txt').write_text('')
  with pytest.raises(UserError, match='is not the folder of a run'):
    flatmatch_jax.load(tmp_path / name)


@pytest.mark.parametrize('model', ['wrn_10_2', 'wrn_16_1'])
def test_weights_of_another_network_are_refused(workdir, tmp_path, model):
  """Of other shapes, or too few; nothing is compiled or guessed."""
  copy = tmp_path / 'run'
  shutil.copytree(workdir, copy)
  text = (copy / 'config.json').read_text()
  (copy / 'config.json').write_text(text.replace('wrn_10_1', model))
  with pytest.raises(UserError, match='of another network, method or number'):
    flatmatch_jax.load(copy)


def test_an_unknown_name_is_no_attribute():
  with pytest.raises(AttributeError, match="no attribute 'lod'"):
    flatmatch_jax.lod  # noqa: B018
