"""Which images of the user's own would help a run's network most."""

from typing import NamedTuple

import numpy as np
from PIL import Image

from flatmatch_jax.data import Dataset, choice, images
from flatmatch_jax.training.load import Run

OWN = ('folder', 'npz')  # Datasets that can get more labels.
SHOWN = 12
_MOST = 4096  # Images that are compared; their distances take 4 bytes a pair.
_UNSURE = 10 * SHOWN  # Images to choose from.
_ASKED = 20  # Unlabeled images about a label.
_MOST_FITTED = 1000  # Labeled images that logistic regression learns from.


class Shown(NamedTuple):
  """An image, and what the network says of it."""

  pixels: np.ndarray  # uint8 [H, W, C]
  path: str  # Relative to the folder of the data; or in which array it is.
  guess: int
  confidence: float
  label: int  # -1 if it has none.


class Advice(NamedTuple):
  """By the averaged weights of a run; lists begin with what counts most."""

  to_label: list[Shown]  # Unlabeled images.
  suspects: list[Shown]  # Labeled images, with the guess against the label.
  num_labeled: int  # Images whose labels were looked at.
  labeled_path: str  # Of one of them: it shows how the data give labels.


def advise(run: Run, dataset: Dataset, split: dict) -> Advice:
  """`split` is the content of split.json."""
  labeled = _draw(split['labeled'], _MOST)
  unlabeled = _draw(np.flatnonzero(dataset.train_labels < 0), _MOST)

  def classify(rows):
    state = run.state
    pixels = dataset.train_images[rows]
    return run.classify([state.ema_params], state.batch_stats, pixels)[0]

  def show(rows, probabilities):
    return [
      Shown(
        dataset.train_images[row],
        _path(dataset, row),
        int(probs.argmax()),
        float(probs.max()),
        int(dataset.train_labels[row]),
      )
      for row, probs in zip(rows, probabilities, strict=True)
    ]

  known, labels = dataset.train_images[labeled], dataset.train_labels[labeled]
  known, second = thumbnails(known), classify(labeled)
  first: list[Shown] = []
  if len(unlabeled):
    probs = classify(unlabeled)
    new = thumbnails(dataset.train_images[unlabeled])
    # Of all images the best to label may be one that the network is sure of,
    # in the middle of others that it is not.
    unsure = np.argsort(-choice.doubt(probs), kind='stable')[:_UNSURE]
    best = unsure[choice.order(new[unsure], known, probs[unsure])[:SHOWN]]
    first = show(unlabeled[best], probs[best])
    second = opinions(second, labels, neighbours(known, new, probs))
  wrong = suspects(second, labels)[:SHOWN]
  doubtful = show(labeled[wrong], second[wrong])
  return Advice(first, doubtful, len(labeled), _path(dataset, labeled[0]))


def _path(dataset, row) -> str:
  if dataset.train_paths:
    return dataset.train_paths[row]
  labeled = int((dataset.train_labels >= 0).sum())  # They come first.
  if row < labeled:
    return f'labeled_images[{row}]'
  return f'unlabeled_images[{row - labeled}]'


def _draw(rows, most: int) -> np.ndarray:
  rng = np.random.default_rng(0)
  return np.sort(rng.permutation(np.asarray(rows, np.int64))[:most])


def neighbours(known, new, probabilities) -> np.ndarray:
  """For each of the thumbnails `known` the mean probabilities [N, K] of those
  `new` ones that look most like it."""
  features = choice.embed(np.concatenate([known, new]))
  alike = features[: len(known)] @ features[len(known) :].T
  return probabilities[np.argsort(-alike)[:, :_ASKED]].mean(1)


def opinions(own, labels, others) -> np.ndarray:
  """The network's `own` probabilities [N, K], or, where it agrees, `others`.

  It has learned the labels by heart, wrong ones too. Of images that it was not
  told about it still has an opinion.
  """
  return np.where((own.argmax(-1) == labels)[:, None], others, own)


def suspects(probabilities, labels) -> np.ndarray:
  """Rows whose label is not the guess, the largest difference first."""
  rows = np.arange(len(labels))
  gap = probabilities.max(-1) - probabilities[rows, labels]
  wrong = np.flatnonzero(gap > 0)
  return wrong[np.argsort(-gap[wrong], kind='stable')]


def thumbnails(pixels: np.ndarray) -> np.ndarray:
  """Images uint8 [N, H, W, C] as they are compared, small and in colour."""
  shape = (choice.SIDE, choice.SIDE, 3)
  found = np.empty((len(pixels), *shape), np.uint8)
  for row, image in enumerate(pixels):
    found[row] = images.fit(Image.fromarray(image.squeeze()), shape)
  return found


def pixels_error(dataset: Dataset, split: dict, images, truth) -> float:
  """Of logistic regression on thumbnails, in percent: what is easily had.

  Of all images, as the network's error, or chance would tell them apart.
  """
  from sklearn.linear_model import LogisticRegression

  flat = lambda pixels: thumbnails(pixels).reshape(len(pixels), -1) / 255
  labeled = _draw(split['labeled'], _MOST_FITTED)
  model = LogisticRegression(max_iter=2000)
  model.fit(flat(dataset.train_images[labeled]), dataset.train_labels[labeled])
  guesses = [
    model.predict(flat(images[start : start + _MOST]))
    for start in range(0, len(truth), _MOST)
  ]
  return 100 * float((np.concatenate(guesses) != np.asarray(truth)).mean())
