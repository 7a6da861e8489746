"""Which images the page shows first."""

from types import SimpleNamespace

import ml_collections
import numpy as np
from PIL import Image
import pytest

from flatmatch_jax.data import choice
from flatmatch_jax.data import folder as folder_lib
from flatmatch_jax.label import rank
from flatmatch_jax.label.store import Store
from flatmatch_jax.report import advice
from flatmatch_jax.training.classifier import Classifier

SIDE = 16
LABELED, UNLABELED = 4, 30


def probabilities(pixels):
  """Of a made-up model, which is sure of some images and unsure of others."""
  logit = pixels.mean((1, 2, 3)) - 127
  first = 1 / (1 + np.exp(-logit))
  return np.stack([first, 1 - first], -1)


MODEL = Classifier(
  ('cat', 'dog'), (SIDE, SIDE, 3), 1.0, run=probabilities, about={}
)


@pytest.fixture
def photos(tmp_path):
  """Sizes differ, so that they are cut."""
  rng = np.random.default_rng(0)
  for name in ('labeled/cat', 'labeled/dog', 'unlabeled/deep'):
    (tmp_path / name).mkdir(parents=True)
  for part, number in (
    ('labeled/cat', LABELED),
    ('labeled/dog', LABELED),
    ('unlabeled', UNLABELED),
    ('unlabeled/deep', UNLABELED),
  ):
    for i in range(number):
      pixels = rng.integers(0, 256, (20, 20 + i, 3), np.uint8)
      Image.fromarray(pixels).save(tmp_path / part / f'{i}.png')
  return tmp_path


def check_order(photos):
  dataset = folder_lib.load(photos, SIDE)
  run = SimpleNamespace(
    state=SimpleNamespace(ema_params=None, batch_stats=None),
    classify=lambda weights, stats, pixels: [probabilities(pixels)],
    config=ml_collections.ConfigDict({'dataset': 'folder'}),
  )
  split = {'labeled': [0, 1, LABELED]}  # Others are held out.
  asked = advice.advise(run, dataset, split).to_label
  store = Store(photos, MODEL.class_names)
  ranking = rank.Ranking(store, MODEL)
  ranking.run()
  first = store.next(advice.SHOWN)
  store.close()
  assert [shown.path for shown in asked] == [
    str(store.path(n).relative_to(photos)) for n in first
  ]
  assert [(shown.guess, shown.confidence) for shown in asked] == [
    ranking.guesses[n] for n in first
  ]


def test_page_begins_with_what_the_report_asks_for(photos):
  (photos / 'unlabeled' / 'text.jpg').write_text('not an image')
  check_order(photos)


def test_both_compare_the_same_images_of_many(photos, monkeypatch):
  monkeypatch.setattr(choice, 'MOST', 40)
  monkeypatch.setattr(choice, 'UNSURE', 20)
  monkeypatch.setattr(rank, 'SIZES', (10, 40))
  check_order(photos)
