"""What a run's network says about images it has not learned from."""

from typing import NamedTuple

import numpy as np

from flatmatch_jax import data
from flatmatch_jax.data import Dataset, pictures, splits
from flatmatch_jax.report import advice
from flatmatch_jax.report.advice import Advice
from flatmatch_jax.training import classify, load
from flatmatch_jax.types import UserError

EXAMPLES = 12
SAMPLES = 6  # Images whose augmentations are shown.


class Examples(NamedTuple):
  """Images, and the rows of the test set that they are."""

  images: np.ndarray  # uint8 [N, H, W, C]
  rows: np.ndarray  # [N]


class Predictions(NamedTuple):
  """Of the averaged weights of a checkpoint."""

  step: int
  kind: str  # 'test' or 'validation' images.
  labels: np.ndarray  # [N]
  probabilities: np.ndarray  # [N, K]
  examples: dict[str, Examples]
  views: dict[str, np.ndarray]  # Rows of augmented images, by name.
  cropped: bool  # In training, at random; `views` are not.
  # Of logistic regression on thumbnails of the user's own images, in percent.
  pixels_error: float | None = None

  @property
  def report(self) -> dict:
    return classify.report(self.probabilities, self.labels)


def look(
  files, data_dir: str | None
) -> tuple[Predictions | None, Advice | None, str]:
  """What the latest checkpoint says of the images that `evaluate` takes, what
  would help it, and why there are no predictions if there are none."""
  found = given = None
  try:
    run = load.load_run(files)
    dataset, split = load.load_data(run, data_dir), files.read('split.json')
    if run.config.dataset in advice.OWN:
      given = advice.advise(run, dataset, split)
    held_out = load.choose_images(files, run, dataset)
    found = predict(run, dataset, held_out)
    if given:
      error = advice.pixels_error(dataset, split['labeled'], *held_out[:2])
      found = found._replace(pixels_error=error)
  except UserError as error:
    return found, given, str(error)
  return found, given, ''


def predict(run: load.Run, dataset: Dataset, held_out) -> Predictions:
  """Runs the network over images; `held_out` has their labels and kind, too."""
  images, labels, kind = held_out
  state = run.state
  (probabilities,) = run.classify([state.ema_params], state.batch_stats, images)
  return Predictions(
    step=int(state.step),
    kind=kind,
    labels=np.asarray(labels),
    probabilities=probabilities,
    examples={
      name: Examples(images[index][:], index)
      for name, index in choose(probabilities, np.asarray(labels)).items()
    },
    views=augmented(run.config, dataset),
    cropped=not data.pipeline_of(dataset).pads,
  )


def choose(probabilities, labels) -> dict[str, np.ndarray]:
  """Which images to show, by why: rows of the test set."""
  guess, confidence = probabilities.argmax(-1), probabilities.max(-1)
  order = np.argsort(-confidence, kind='stable')
  right = order[guess[order] == labels[order]]
  wrong = order[guess[order] != labels[order]]
  spread = np.linspace(0, len(right) - 1, min(EXAMPLES, len(right)))
  chosen = {
    'Wrong, the most confident first': wrong[:EXAMPLES],
    'Right, the least confident first': right[::-1][:EXAMPLES],
    'Right, over all confidences': right[spread.astype(int)],
  }
  return {name: index for name, index in chosen.items() if len(index)}


def augmented(config, dataset: Dataset) -> dict[str, np.ndarray]:
  """Training images, with weak and strong draws as the run takes them."""
  index = splits.spread(dataset.train_labels, SAMPLES)
  images = np.asarray(dataset.train_images[index][:])
  return pictures.pairs(
    images, config.pad, config.flip, config.strong_operations
  )
