"""What the paper's runs compute, by arithmetic."""

import sys
from typing import NamedTuple

from flatmatch_jax.step import recipes
from flatmatch_jax.training import fixed_labels

# Training images, and their shape.
IMAGES = {
  'cifar10': (50_000, (32, 32, 3)),
  'cifar100': (50_000, (32, 32, 3)),
  'svhn': (604_388, (32, 32, 3)),
  'stl10': (105_000, (96, 96, 3)),
  'imagenet30': (39_000, (224, 224, 3)),
  'imagenet': (1_281_167, (224, 224, 3)),
}

# Multiplications in a forward pass of one image of the above.
MACS = {
  'wrn_28_2': 0.2144e9,
  'wrn_28_8': 3.360e9,
  'wrn_37_2': 0.6457e9,
  'resnet_50': 4.09e9,
  'vit_base_16': 17.6e9,
}


class Rows(NamedTuple):
  """Images that pass through the network in a plain step.

  In multiples of the unlabeled batch, with and without gradient, and likewise
  of the labeled batch.
  """

  trained: int = 1
  forward: int = 1
  labeled_forward: int = 0
  labeled_trained: int = 1
  extra_trained: int = 0  # Unlabeled, but as many as are labeled.


ROWS = {
  'supervised': Rows(0, 0),
  'pseudo_label': Rows(1, 0),
  'vat': Rows(3, 0),  # Weak, adversarial, and the search for it.
  'mixmatch': Rows(2, 2),
  'remixmatch': Rows(5, 1),
  'mpl': Rows(2, 1, 2),  # Two networks.
  'adamatch': Rows(2, 0, labeled_trained=2),  # BatchNorm couples the views.
  'defixmatch': Rows(labeled_trained=2),
  'sequencematch': Rows(2),
  'comatch': Rows(2),
  'crmatch': Rows(extra_trained=4),  # In four rotations.
  'daso': Rows(labeled_forward=1),  # Of the averaged weights.
}


def flops(config) -> float:
  """Of a whole run, in the layout `split`; a backward pass is two forward.

  Only convolutions and matrices count, and neither augmentation nor tests.
  """
  method, recipe = recipes.parse(config.method)
  plain = fix_at(config)
  if recipes.RECIPES[recipe].fixed and not plain:
    recipe = 'flatmatch'  # Which it is where there are labels enough.
  images = plain * images_per_step(config, method, 'plain')
  images += (config.steps - plain) * images_per_step(config, method, recipe)
  return 2 * MACS[config.model] * images


def images_per_step(config, method, name):
  """Forward passes of an image that a step is worth, at the least."""
  batch, unlabeled = config.batch_size, config.unlabeled_batch_size
  rows, recipe = ROWS.get(method, Rows()), recipes.RECIPES[name]
  passes = [recipe.clean, recipe.worst]
  if recipe.fixed or recipe.source != recipe.clean:
    passes.append(recipe.source)  # Equal rows share one backward pass.
  trained = sum(
    weights.labeled * rows.labeled_trained * batch
    + weights.unlabeled
    * (rows.trained * unlabeled + rows.extra_trained * batch)
    for weights in passes
  )
  only_forward = rows.forward * unlabeled + rows.labeled_forward * batch
  return 3 * trained + only_forward


def fix_at(config) -> int:
  """After how many steps the config fixes labels; 0 if it does not."""
  num_labeled = sys.maxsize if config.labels == 'all' else config.labels
  return fixed_labels.step_of_fixing(config, num_labeled)
