"""Strong views that the host makes are those that devices would make."""

import jax
import numpy as np

from flatmatch_jax.data import augment, on_host, randaugment


def raw_numbers(count, operations=3):
  shape = count, on_host.numbers(operations)
  return np.random.Philox(7).random_raw(shape)


def test_host_and_device_give_equal_views():
  """From equal draws; a device's own come from its key."""
  count = 32
  images = np.random.RandomState(0).randint(0, 256, (count, 4, 5, 3))
  images = images.astype(np.uint8).repeat(6, 1).repeat(6, 2)
  draws = [on_host.draw(raw) for raw in raw_numbers(count)]
  host = np.stack(list(map(on_host.strong, images, draws)))
  operation, magnitude, centre, side = map(np.array, zip(*draws, strict=True))
  device = jax.jit(randaugment.apply)(images, operation.T, magnitude.T)
  device = jax.jit(augment.cutout)(device, centre, side)
  np.testing.assert_array_equal(host, device)
  assert (host != images).any((1, 2, 3)).mean() > 0.9


def test_draws_are_uniform_over_what_devices_draw():
  raw = raw_numbers(14_000, 2)
  operation, magnitude, centre, side = map(
    np.array, zip(*map(on_host.draw, raw), strict=True)
  )
  counts = np.bincount(operation.ravel(), minlength=14)
  assert np.abs(counts - 2000).max() < 225  # Five standard deviations.
  for index, (low, high, _) in enumerate(randaugment.RANGES.values()):
    these = magnitude[operation == index]
    assert low <= these.min() <= these.max() <= high
    deviation = np.sqrt(((high - low + 1) ** 2 - 1) / 12 / len(these))
    assert abs(these.mean() - (low + high) / 2) <= 4 * deviation
  assert (centre.min(), centre.max()) == (0, 1023)
  assert (side.min(), side.max()) == (0, 512)
  assert abs(side.mean() - 256) < 5
  assert abs(np.corrcoef(centre.T)[0, 1]) < 0.05


def test_extreme_numbers_stay_in_their_ranges():
  last = 2**64 - 1
  assert on_host.draw([0] * 5) == ([0], [0], (0, 0), 0)
  draws = on_host.draw([last] * 5)
  assert draws.operation == [len(randaugment.OPERATIONS) - 1]
  assert draws.magnitude == [list(randaugment.RANGES.values())[-1][1]]
  assert (draws.centre, draws.side) == ((1023, 1023), 512)
