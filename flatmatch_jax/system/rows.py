"""The rows of several arrays as those of one, each where it is."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def interleave(arrays) -> jax.Array:
  """Joins arrays [n, …] along the first axis: of each some rows, in turns.

  Of an array that is spread over devices each has an equal share. One array
  after the other would therefore send rows from device to device; in turns,
  those of a device are neighbours already. The order is that of the lengths
  alone: as many turns as they allow, whatever the number of devices.
  """
  turns = _turns(map(len, arrays))
  cut = [x.reshape(turns, len(x) // turns, *x.shape[1:]) for x in arrays]
  joined = jnp.concatenate(cut, axis=1)
  return joined.reshape(-1, *joined.shape[2:])


def separate(joined, lengths) -> list[jax.Array]:
  """The inverse of `interleave`."""
  turns = _turns(lengths)
  ends = np.cumsum(lengths)[:-1] // turns
  cut = joined.reshape(turns, len(joined) // turns, *joined.shape[1:])
  parts = jnp.split(cut, ends, axis=1)
  return [x.reshape(-1, *x.shape[2:]) for x in parts]


def _turns(lengths) -> int:
  return math.gcd(*lengths)
