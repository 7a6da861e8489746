"""What chips can do, and the least time that a step takes on them."""

import math
from typing import NamedTuple


class Chip(NamedTuple):
  """What Google publishes of a chip (cloud.google.com/tpu/docs)."""

  flops: float  # A second, in bfloat16.
  bandwidth: float  # Bytes a second from and to memory.
  memory: float  # Bytes.
  links: float  # Bytes a second to other chips, over all links.


CHIPS = {
  'v4': Chip(275e12, 1228e9, 32e9, 300e9),
  'v5e': Chip(197e12, 819e9, 16e9, 200e9),
  'v5p': Chip(459e12, 2765e9, 95e9, 600e9),
  'v6e': Chip(918e12, 1600e9, 32e9, 400e9),
}


def roofline(chip: Chip, flops, accessed, reduced, chips) -> dict:
  """Milliseconds by each resource, and the longest of them.

  Of `reduced` bytes an all-reduce sends each twice, but for a chip's own share.
  """
  sent = 2 * reduced * (chips - 1) / chips
  times = {
    'compute': 1e3 * flops / chip.flops,
    'memory': 1e3 * accessed / chip.bandwidth,
    'collectives': 1e3 * sent / chip.links,
  }
  binds = max(times, key=lambda name: times[name])
  return {
    'ms': {name: round(value, 4) for name, value in times.items()},
    'roofline_ms': round(times[binds], 4),
    'binds': binds,
  }


def reduced_bytes(sent: dict[str, tuple[int, int]]) -> float:
  """Bytes of all-reduces that would take as long as what is `sent`.

  By kind of collective, how many there are and their bytes. An all-reduce
  sends each byte twice, all others once.
  """
  return sum(
    size if kind == 'all-reduce' else size / 2
    for kind, (_, size) in sent.items()
  )


def batch_factor(sizes, chips: int) -> int:
  """By how much batches of these sizes must grow to divide by the chips."""
  return math.lcm(*(chips // math.gcd(size, chips) for size in sizes))
