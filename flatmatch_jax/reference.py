"""What runs of the same setting gave, to tell early when one goes astray.

references.json has test errors of averaged weights at five steps, for some
configs and several seeds; `benchmarks/references.py` makes it from runs.
"""

import json
import math
import pathlib
import statistics
from typing import NamedTuple

from flatmatch_jax import logging
from flatmatch_jax.settings import fields
from flatmatch_jax.workdir import as_dict

FILE = pathlib.Path(__file__).parent / 'references.json'
POINTS = 5

# Percent; that few seeds agree does not mean that the next one will.
_LEAST_WIDTH = 1.0
# The 97.5% quantile of Student's t for 2, 3, … seeds.
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Band(NamedTuple):
  """Where the error of one more seed is to be expected."""

  errors: list[float]  # One a seed, in percent.
  seeds: list[int]

  @property
  def mean(self) -> float:
    return statistics.mean(self.errors)

  @property
  def width(self) -> float:
    """Half of the 95% prediction interval for one more normal draw, or 1%."""
    number = len(self.errors)
    quantile = _QUANTILES[min(number - 2, len(_QUANTILES) - 1)]
    deviation = statistics.stdev(self.errors)
    return max(quantile * deviation * math.sqrt(1 + 1 / number), _LEAST_WIDTH)


def settings(config: dict) -> dict:
  """What decides the errors of a run, but for its seeds, as JSON has it."""
  looks = ('eval_every', 'eval_batch_size', 'paper_labels')
  decide = {k: v for k, v in fields(config).items() if k not in looks}
  return json.loads(json.dumps(decide))  # Tuples are lists there.


def find(config) -> dict[int, Band]:
  """Bands by step for a config like this one; empty where there are none."""
  wanted = settings(as_dict(config))
  for entry in json.loads(FILE.read_text()):
    if entry['settings'] == wanted:
      return {
        int(step): Band(errors, entry['seeds'])
        for step, errors in entry['errors'].items()
      }
  return {}


def compare(bands: dict[int, Band], step: int, error: float | None) -> None:
  """Tells how a run's test error lies at the steps that have a band."""
  if (band := bands.get(step)) is None or error is None:
    return
  low, high = max(band.mean - band.width, 0.0), band.mean + band.width
  where = (
    f'step {step} has a test error of {error:.2f}%; the seeds '
    f'{", ".join(map(str, band.seeds))} had {min(band.errors):.2f} to '
    f'{max(band.errors):.2f}% in earlier runs'
  )
  expected = f'one more is expected from {low:.2f} to {high:.2f}%'
  if error > high:
    logging.say(
      f'Warning: {where}, and {expected}. Compare metrics.jsonl and '
      'versions.json with a run that went well.'
    )
  elif error < low:
    logging.say(f'Better than expected: {where}, and {expected}.')
  else:
    logging.say(f'As expected: {where}, and {expected}.')
