"""What runs of the same setting gave, to tell early when one goes astray.

references.json has test errors of averaged weights at five steps, for some
configs and several seeds; `benchmarks/references.py` makes it from runs.
"""

import json
import math
import pathlib
import statistics
from typing import NamedTuple

from flatmatch_jax.run.settings import fields
from flatmatch_jax.system import messages

FILE = pathlib.Path(__file__).parent / 'references.json'
POINTS = 5

# Percent; that few seeds agree does not mean that the next one will.
_LEAST_WIDTH = 1.0
LEAST_SEEDS = 3
# The 99.5% quantile of Student's t for 3, 4, … seeds at five points: if seeds
# scatter normally, at most one sound run in twenty leaves any of the bands.
_QUANTILES = (3.169, 2.947, 2.845, 2.787, 2.75, 2.724, 2.704, 2.69)


class Band(NamedTuple):
  """Where the error of one more seed is to be expected."""

  errors: list[float]  # One a seed, in percent.
  seeds: list[int]
  spread: float  # The deviation over seeds as a share of the mean.

  @property
  def mean(self) -> float:
    return statistics.mean(self.errors)

  @property
  def width(self) -> float:
    """Half of the 99% prediction interval for one more normal draw, or 1%."""
    number = len(self.errors)
    quantile = _QUANTILES[min(number - LEAST_SEEDS, len(_QUANTILES) - 1)]
    deviation = self.spread * self.mean
    return max(quantile * deviation * math.sqrt(1 + 1 / number), _LEAST_WIDTH)

  @property
  def low(self) -> float:
    return max(self.mean - self.width, 0.0)

  @property
  def high(self) -> float:
    return self.mean + self.width


def make_bands(errors: dict[int, list[float]], seeds) -> dict[int, Band]:
  """Bands by step, from the errors of each seed at these steps.

  The deviation of three numbers is mostly chance, so one is taken of all
  points: they share its ratio to the mean. Points of a run depend on each
  other, which makes this a rule of thumb, not a test.
  """
  shares = [
    statistics.stdev(x) / statistics.mean(x) if any(x) else 0.0
    for x in errors.values()
  ]
  spread = math.sqrt(statistics.fmean(share**2 for share in shares))
  return {step: Band(x, seeds, spread) for step, x in errors.items()}


def settings(config: dict) -> dict:
  """What decides the errors of a run, but for its seeds, as JSON has it."""
  looks = ('eval_every', 'eval_batch_size', 'paper_labels')
  decide = {k: v for k, v in fields(config).items() if k not in looks}
  return json.loads(json.dumps(decide))  # Tuples are lists there.


def find(config: dict, images: str) -> dict[int, Band]:
  """Bands by step for a config like this one; empty where there are none.

  `images` is the fingerprint of the data: names of datasets may be anybody's.
  """
  wanted = settings(config)
  try:
    for entry in json.loads(FILE.read_text()):
      if entry['settings'] == wanted and entry['images'] == images:
        errors = {int(step): row for step, row in entry['errors'].items()}
        return make_bands(errors, entry['seeds'])
  except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
    messages.say(
      f'Warning: {FILE} is damaged ({error!r}), so that nothing is said of '
      'what earlier runs had; put it back as it was.'
    )
  return {}


def compare(
  bands: dict[int, Band], step: int, error: float | None, name: str = ''
) -> None:
  """Reports how a run's test error lies at the steps that have a band.

  `name` is that of the run if there are several.
  """
  if (band := bands.get(step)) is None or error is None:
    return
  run = f'{name}: ' if name else ''
  where = (
    f'{run}step {step} has a test error of {error:.2f}%; the seeds '
    f'{", ".join(map(str, band.seeds))} had {min(band.errors):.2f} to '
    f'{max(band.errors):.2f}% in earlier runs'
  )
  expected = f'one more is expected from {band.low:.2f} to {band.high:.2f}%'
  verdict, remedy = 'As expected', ''
  if error > band.high:
    verdict = 'Warning'
    remedy = (
      ' Compare metrics.jsonl and versions.json with a run that went well.'
    )
  elif error < band.low:
    verdict = 'Better than expected'
  messages.say(f'{verdict}: {where}, and {expected}.{remedy}')
