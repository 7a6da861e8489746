"""Semi-supervised image classification in JAX, with FlatMatch at its heart."""

import importlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from flatmatch_jax.training.classifier import load as load
  from flatmatch_jax.training.fit import fit as fit

IMPORT_BEGAN = time.perf_counter()  # The log says how long starting took.

# What users call, imported when it is first used: that takes seconds.
_PUBLIC = {
  'fit': 'flatmatch_jax.training.fit',
  'load': 'flatmatch_jax.training.classifier',
}


def __getattr__(name: str):
  if name not in _PUBLIC:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__():
  return sorted([*globals(), *_PUBLIC])
