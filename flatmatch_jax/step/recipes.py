"""The named recipes: which losses are taken where in the step's equation.

  g = ∇(clean·L)(θ) + ∇(worst·L)(θ + ε),   ε = perturb(∇(source·L)(θ))

with L = (labeled, unlabeled). Equation numbers are those of the paper.
"""

from collections.abc import Callable
from typing import NamedTuple

from flatmatch_jax.methods import METHODS
from flatmatch_jax.step.perturb import Perturbation, ascent, last, memory
from flatmatch_jax.system import arguments
from flatmatch_jax.system.arguments import PositiveCount
from flatmatch_jax.types import Losses, UserError, did_you_mean


class Recipe(NamedTuple):
  """Weights of the losses in each term, and the factory of ε (None: plain).

  `fixed` takes the source's gradient on labeled images and on the unlabeled
  ones that were most confident after plain pre-training.
  """

  clean: Losses = Losses(1.0, 1.0)
  worst: Losses = Losses(0.0, 0.0)
  source: Losses = Losses(0.0, 0.0)
  perturb: Callable[..., Perturbation] | None = None
  fixed: bool = False


_NONE = Losses(0.0, 0.0)
_LABELED = Losses(1.0, 0.0)
_UNLABELED = Losses(0.0, 1.0)
_BOTH = Losses(1.0, 1.0)

RECIPES = {
  # name: clean, worst, source, perturbation
  'plain': Recipe(),  # Eq. 3
  'flatmatch': Recipe(_LABELED, _UNLABELED, _LABELED, ascent),  # Eq. 5
  'flatmatch_e': Recipe(_LABELED, _UNLABELED, _LABELED, memory),  # Algorithm 1
  'flatmatch_fix': Recipe(_LABELED, _UNLABELED, _LABELED, ascent, fixed=True),
  # The ablation table: "w/o EMA", and sharpness on D^l, on D^u, on both.
  'flatmatch_last': Recipe(_LABELED, _UNLABELED, _LABELED, last),
  'sharp_labeled': Recipe(_UNLABELED, _LABELED, _LABELED, ascent),
  'sharp_unlabeled': Recipe(_LABELED, _UNLABELED, _UNLABELED, ascent),
  'sharp_all': Recipe(_NONE, _BOTH, _BOTH, ascent),
  # The authors' released code in fp32 counts the labeled gradient twice.
  'flatmatch_official': Recipe(_LABELED, _BOTH, _LABELED, ascent),
  'sam': Recipe(_NONE, _LABELED, _LABELED, ascent),  # Eq. 2
}

# What a recipe alone is a recipe over: FlatMatch in the paper's tables takes
# thresholds and losses from FreeMatch.
_ALONE = dict.fromkeys(RECIPES, 'freematch') | {'sam': 'supervised'}


class FixedLabels(NamedTuple):
  """After how many plain steps how many labels are fixed, by dataset."""

  pretrain_steps: PositiveCount = 16 * 1024
  num_fixed: PositiveCount = 500


class Choice(NamedTuple):
  """What `config.method` names: keys of METHODS and of RECIPES."""

  method: str
  recipe: str


def parse(name: str) -> Choice:
  """Reads `config.method`: 'fixmatch+flatmatch' is method and recipe.

  A method alone is trained plainly; a recipe alone is over FreeMatch.
  """
  recipes = [recipe for recipe in RECIPES if recipe != 'plain']
  method, plus, recipe = name.partition('+')
  if not plus and method in recipes:
    method, recipe = _ALONE[method], method
  elif not plus:
    recipe = 'plain'
  if method not in METHODS or (plus and recipe not in recipes):
    raise UserError(
      f'Unknown method {name!r}. Known methods: {", ".join(METHODS)}; '
      f'recipes: {", ".join(recipes)}; and any method+recipe, such as '
      f'fixmatch+flatmatch.{did_you_mean(name, [*METHODS, *recipes])}'
    )
  return Choice(method, recipe)


def defaults(name: str) -> dict[str, float]:
  """The recipe's arguments with their defaults, for a config to list."""
  found: dict = {}
  for factory in _factories(name):
    found |= arguments.defaults(factory)
  return found


def bounds(name: str) -> dict[str, arguments.Number]:
  """Which numbers the recipe's arguments take."""
  found: dict = {}
  for factory in _factories(name):
    found |= arguments.bounds(factory)
  return found


def _factories(name):
  recipe = RECIPES[name]
  if recipe.perturb is None:
    return []
  return [recipe.perturb, FixedLabels] if recipe.fixed else [recipe.perturb]


def create(name: str, **kwargs) -> tuple[Recipe, Perturbation | None]:
  """The recipe `name` and its perturbation."""
  recipe = RECIPES[name]
  if recipe.perturb is None:
    return recipe, None
  own = {k: v for k, v in kwargs.items() if k not in FixedLabels._fields}
  return recipe, recipe.perturb(**own)


def objection(method: str, recipe: str, has_unlabeled: bool) -> str | None:
  """Why the two make no sense together, or None."""
  rows = RECIPES[recipe]
  uses = any(row.unlabeled for row in (rows.clean, rows.worst, rows.source))
  if recipe == 'plain' or uses == has_unlabeled:
    return None
  if uses:
    return (
      f'{recipe} moves the unlabeled loss, and {method} has none; take a '
      'semi-supervised method'
    )
  return (
    f'{recipe} leaves out the unlabeled loss, and {method} lives by it; take '
    f'{recipe} alone'
  )
