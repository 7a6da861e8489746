"""Which images of the user's own would help a run's network most."""

from typing import NamedTuple

import numpy as np

from flatmatch_jax.data import Dataset, choice
from flatmatch_jax.training.load import Run

OWN = ('folder', 'npz')  # Datasets that can get more labels.
SHOWN = 12
_ASKED = 20  # Unlabeled images about a label.
# How often they must agree with the labels of a class, on average over classes:
# this part of the way from chance to always. If they agree less, images that
# look alike often belong to different classes.
_TRUSTED = 1 / 3
_AT_A_TIME = 4096  # Images per batch of the regression.
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
  asked: bool  # Whether unlabeled images were asked about memorized labels.
  labeled_path: str  # Of one of them: it shows how the data give labels.


def advise(run: Run, dataset: Dataset, split: dict) -> Advice:
  """`split` is the content of split.json."""
  labeled = _draw(dataset, split['labeled'])
  known = _draw(dataset, np.flatnonzero(dataset.train_labels >= 0))
  unlabeled = _draw(dataset, np.flatnonzero(dataset.train_labels < 0))
  pictures = lambda rows: choice.thumbnails(dataset.train_images[rows])

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

  labels = dataset.train_labels[labeled]
  second = classify(labeled)
  first: list[Shown] = []
  asked = False
  if len(unlabeled):
    # As the page of `flatmatch_jax.label` chooses.
    probs, new = classify(unlabeled), pictures(unlabeled)
    best = choice.order(new, pictures(known), probs)[:SHOWN]
    first = show(unlabeled[best], probs[best])
    alike = neighbours(pictures(labeled), new, probs)
    asked = trusted(alike.argmax(-1), labels, alike.shape[-1])
    second = opinions(second, labels, alike) if asked else second
  wrong = suspects(second, labels)[:SHOWN]
  doubtful = show(labeled[wrong], second[wrong])
  path = _path(dataset, split['labeled'][0])
  return Advice(first, doubtful, len(labeled), asked, path)


def _path(dataset, row) -> str:
  if dataset.train_paths:
    return dataset.train_paths[row]
  labeled = int((dataset.train_labels >= 0).sum())  # They come first.
  if row < labeled:
    return f'labeled_images[{row}]'
  return f'unlabeled_images[{row - labeled}]'


def _draw(dataset, rows) -> np.ndarray:
  rows = np.asarray(rows, np.int64)
  drawn = choice.shuffled([_path(dataset, row) for row in rows])
  return rows[drawn[: choice.MOST]]


def neighbours(known, new, probabilities) -> np.ndarray:
  """For each of the thumbnails `known` the mean probabilities [N, K] of those
  `new` ones that look most like it."""
  features = choice.embed(np.concatenate([known, new]))
  alike = features[: len(known)] @ features[len(known) :].T
  return probabilities[np.argsort(-alike)[:, :_ASKED]].mean(1)


def trusted(guesses, labels, num_classes: int) -> bool:
  """Whether guesses agree with labels clearly more often than by chance.

  Each class counts the same: guessing the largest one always is chance, too.
  """
  agree = [(guesses[labels == k] == k).mean() for k in np.unique(labels)]
  chance = 1 / num_classes
  return bool(np.mean(agree) >= chance + _TRUSTED * (1 - chance))


def opinions(own, labels, others) -> np.ndarray:
  """The network's `own` probabilities [N, K], or, where it agrees, `others`.

  It has memorized the labels, wrong ones too. What it says of other images does
  not come from their labels.
  """
  return np.where((own.argmax(-1) == labels)[:, None], others, own)


def suspects(probabilities, labels) -> np.ndarray:
  """Rows whose label is not the guess, the largest difference first."""
  rows = np.arange(len(labels))
  gap = probabilities.max(-1) - probabilities[rows, labels]
  wrong = np.flatnonzero(gap > 0)
  return wrong[np.argsort(-gap[wrong], kind='stable')]


def pixels_error(dataset: Dataset, labeled, images, truth) -> float:
  """Of logistic regression on thumbnails, in percent: what is easily had.

  It learns from the images `labeled`. The error is that of all `images`, as the
  network's, or chance would tell them apart.
  """
  from sklearn.linear_model import LogisticRegression
  from threadpoolctl import threadpool_limits

  flat = lambda pixels: choice.thumbnails(pixels).reshape(len(pixels), -1) / 255
  labeled = _draw(dataset, labeled)[:_MOST_FITTED]
  model = LogisticRegression(max_iter=2000)
  with threadpool_limits(1):  # More threads wait for each other on busy cores.
    model.fit(
      flat(dataset.train_images[labeled]), dataset.train_labels[labeled]
    )
    guesses = [
      model.predict(flat(images[start : start + _AT_A_TIME]))
      for start in range(0, len(truth), _AT_A_TIME)
    ]
  return 100 * float((np.concatenate(guesses) != np.asarray(truth)).mean())
