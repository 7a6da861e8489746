"""The named recipes: which losses are taken where in the step's equation.

  g = ∇(clean·L)(θ) + ∇(worst·L)(θ + ε),   ε = perturb(∇(source·L)(θ))

with L = (labeled, unlabeled). Equation numbers are those of the paper.
"""

from collections.abc import Callable
import inspect
from typing import NamedTuple

from flatmatch_jax.perturb import Perturbation, ascent, memory
from flatmatch_jax.types import Losses, UserError


class Recipe(NamedTuple):
  """Weights of the losses in each term, and the factory of ε (None: plain)."""

  clean: Losses = Losses(1.0, 1.0)
  worst: Losses = Losses(0.0, 0.0)
  source: Losses = Losses(0.0, 0.0)
  perturb: Callable[..., Perturbation] | None = None


_LABELED = Losses(1.0, 0.0)
_UNLABELED = Losses(0.0, 1.0)

RECIPES = {
  'plain': Recipe(),  # Eq. 3
  'flatmatch': Recipe(  # Eq. 5
    clean=_LABELED,
    worst=_UNLABELED,
    source=_LABELED,
    perturb=ascent,
  ),
  'flatmatch_e': Recipe(  # Algorithm 1, efficient training
    clean=_LABELED,
    worst=_UNLABELED,
    source=_LABELED,
    perturb=memory,
  ),
}

# FlatMatch in the paper's tables takes thresholds and losses from FreeMatch.
DEFAULT_METHOD = 'freematch'


def parse(name: str, methods) -> tuple[str, str]:
  """Splits 'fixmatch+flatmatch' into ('fixmatch', 'flatmatch').

  A method alone is trained plainly; a recipe alone is over FreeMatch.
  """
  recipes = [recipe for recipe in RECIPES if recipe != 'plain']
  method, plus, recipe = name.partition('+')
  if not plus and method in recipes:
    method, recipe = DEFAULT_METHOD, method
  elif not plus:
    recipe = 'plain'
  if method in methods and (recipe in recipes or not plus):
    return method, recipe
  raise UserError(
    f'Unknown method {name!r}. Known methods: {", ".join(methods)}; '
    f'recipes: {", ".join(recipes)}; and any method+recipe, such as '
    'fixmatch+flatmatch.'
  )


def arguments(name: str) -> dict[str, float]:
  """The recipe's arguments with their defaults, for a config to list."""
  factory = RECIPES[name].perturb
  if factory is None:
    return {}
  signature = inspect.signature(factory).parameters
  return {key: value.default for key, value in signature.items()}
