"""A semi-supervised method: pure functions, all but one with defaults."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from flatmatch_jax.types import Head, Losses, Views


class Prepared(NamedTuple):
  """What a method makes of a batch at θ, before any loss."""

  views: Views  # What the student sees.
  targets: dict[str, jax.Array]  # Over a batch: recipes may cut them in parts.
  kept: Any = None  # For `feedback` alone; anything.


def standard_views(predict, state, batch, rng) -> Prepared:
  """All views of the batch; targets are the labels and indices.

  The weak view of the labeled images is 'labeled', a strong one
  'labeled_strong'.
  """
  del predict, state, rng
  views = {f'labeled_{k}': v for k, v in batch.labeled.items() if v.ndim == 4}
  views['labeled'] = views.pop('labeled_weak')
  views |= {k: v for k, v in batch.unlabeled.items() if v.ndim == 4}
  targets = {'label': batch.labeled['label'], 'index': batch.unlabeled['index']}
  return Prepared(views, targets)


class Method(NamedTuple):
  """What distinguishes one semi-supervised method from another.

  Targets, masks and the new state may depend on everything but `student`, and
  gradients reach only `student`: then any recipe may move the student to θ + ε.

  Each loss has rows of its own: of the student, the labeled loss takes the
  views whose names start with 'labeled', and the unlabeled loss all others.
  Then a recipe can take one loss without the other, and without its passes.

  Attributes:
    loss: (student, teacher, targets, method_state, step) -> (Losses,
      method_state, metrics). `student` and `teacher` are Outputs. Metrics are
      scalars, and 'pseudo_labels' where the method guesses labels. A method
      with a table over all examples returns its state as Pending.
    prepare: (predict, train_state, batch, rng) -> Prepared. Outside
      differentiation: guesses labels, mixes images, seeks adversarial noise.
    init: (rng, variables, DatasetInfo) -> method_state.
    feedback: (before, after, batch, targets, kept) -> method_state. Runs after
      the update, for a teacher that learns from what the student did.
    heads: extra outputs that the network must have.
    trains_on: weights of the losses in the update; a labeled loss of weight 0
      still is what a recipe may climb.
    views: names of the views that the data pipeline must make, each after its
      augmentation: 'weak', 'medium', 'strong', or 'strong2' for one more. Those
      of labeled images, beside the weak one, start with 'labeled_'. None means
      that the method has no unlabeled loss.
    populations: groups of views, by name, that share BatchNorm's statistics
      whatever `config.batch_norm` is; it groups the views that none names. To
      be in two populations, images are two views.
  """

  loss: Callable
  prepare: Callable = standard_views
  init: Callable = lambda rng, variables, info: ()
  feedback: Callable = lambda before, after, batch, targets, kept: after.method
  heads: tuple[Head, ...] = ()
  trains_on: Losses = Losses(1.0, 1.0)
  views: tuple[str, ...] = ('weak', 'strong')
  populations: tuple[tuple[str, ...], ...] = ()
