"""The methods by name. To add one: a file beside this one, and a line here."""

from collections.abc import Callable
import inspect

from flatmatch_jax.methods.abc import abc
from flatmatch_jax.methods.adamatch import adamatch
from flatmatch_jax.methods.base import Method
from flatmatch_jax.methods.comatch import comatch
from flatmatch_jax.methods.crmatch import crmatch
from flatmatch_jax.methods.dash import dash
from flatmatch_jax.methods.daso import daso
from flatmatch_jax.methods.debiaspl import debiaspl
from flatmatch_jax.methods.defixmatch import defixmatch
from flatmatch_jax.methods.fixmatch import fixmatch
from flatmatch_jax.methods.flexmatch import flexmatch
from flatmatch_jax.methods.freematch import freematch
from flatmatch_jax.methods.mean_teacher import mean_teacher
from flatmatch_jax.methods.mixmatch import mixmatch
from flatmatch_jax.methods.mpl import mpl
from flatmatch_jax.methods.pi_model import pi_model
from flatmatch_jax.methods.pseudo_label import pseudo_label
from flatmatch_jax.methods.refixmatch import refixmatch
from flatmatch_jax.methods.remixmatch import remixmatch
from flatmatch_jax.methods.saw import saw
from flatmatch_jax.methods.sequencematch import sequencematch
from flatmatch_jax.methods.simmatch import simmatch
from flatmatch_jax.methods.softmatch import softmatch
from flatmatch_jax.methods.supervised import supervised
from flatmatch_jax.methods.uda import uda
from flatmatch_jax.methods.vat import vat
from flatmatch_jax.system import arguments

METHODS: dict[str, Callable[..., Method]] = {
  'supervised': supervised,
  'pseudo_label': pseudo_label,
  'pi_model': pi_model,
  'vat': vat,
  'mean_teacher': mean_teacher,
  'mixmatch': mixmatch,
  'remixmatch': remixmatch,
  'uda': uda,
  'fixmatch': fixmatch,
  'dash': dash,
  'adamatch': adamatch,
  'mpl': mpl,
  'flexmatch': flexmatch,
  'softmatch': softmatch,
  'freematch': freematch,
  'defixmatch': defixmatch,
  'debiaspl': debiaspl,
  'refixmatch': refixmatch,
  'sequencematch': sequencematch,
  'comatch': comatch,
  'simmatch': simmatch,
  'crmatch': crmatch,
  'abc': abc,
  'saw': saw,
  'daso': daso,
}


def defaults(name: str) -> dict[str, float]:
  """The method's arguments with their defaults, for a config to list."""
  return arguments.defaults(METHODS[name])


def bounds(name: str) -> dict[str, arguments.Number]:
  """Which numbers the method's arguments take."""
  return arguments.bounds(METHODS[name])


def create(name: str, context: dict | None = None, **kwargs) -> Method:
  """The method `name` with its paper's defaults where not told otherwise.

  Arguments without a default come from the `context`: `steps`, the length of
  training; `info`, a DatasetInfo; and for a method with a second network
  `forward`, `tx` and `init_network`, a function from a random key to the
  network's variables.
  """
  needed = inspect.signature(METHODS[name]).parameters.keys() - defaults(name)
  return METHODS[name](
    **{key: (context or {})[key] for key in needed}, **kwargs
  )


def asks(name: str, **kwargs) -> Method:
  """The method without a context: only to see its views, heads and the like."""
  needed = inspect.signature(METHODS[name]).parameters.keys() - defaults(name)
  return create(name, dict.fromkeys(needed), **kwargs)
