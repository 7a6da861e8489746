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
  parameters = inspect.signature(METHODS[name]).parameters
  return {key: value.default for key, value in parameters.items()}


def create(name: str, **kwargs) -> Method:
  """The method `name` with its paper's defaults where not told otherwise."""
  return METHODS[name](**kwargs)
