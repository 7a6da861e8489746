"""The methods by name. To add one: a file beside this one, and a line here."""

import inspect

from flatmatch_jax.methods.base import Method
from flatmatch_jax.methods.fixmatch import fixmatch
from flatmatch_jax.methods.freematch import freematch
from flatmatch_jax.methods.supervised import supervised

METHODS = {
  'supervised': supervised,
  'fixmatch': fixmatch,
  'freematch': freematch,
}


def arguments(name: str) -> dict[str, float]:
  """The method's arguments with their defaults, for a config to list."""
  return {
    key: value.default
    for key, value in inspect.signature(METHODS[name]).parameters.items()
    if value.default is not inspect.Parameter.empty
  }


def create(name: str, context: dict | None = None, **kwargs) -> Method:
  """The method `name` with its paper's defaults where not told otherwise.

  Arguments without a default come from the `context`: `steps`, the length of
  training; and for a method with a second network `forward`, `tx` and
  `init_network`, a function from a random key to the network's variables.
  """
  needed = set(inspect.signature(METHODS[name]).parameters) - set(
    arguments(name)
  )
  return METHODS[name](
    **{key: (context or {})[key] for key in needed}, **kwargs
  )
