"""Named views through the network: one call per BatchNorm population.

A population is a group of views that share batch statistics. Layouts:

  joint         [labeled; weak; strong] together, as published code bases do;
  clean_strong  [labeled; weak] and [strong];
  split         each view alone: the cheapest, since XLA drops every view that
                a pass does not need.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from flatmatch_jax.types import Outputs, PyTree, Views

LAYOUTS = ('joint', 'clean_strong', 'split')

Forward = Callable[[PyTree, PyTree, Views], tuple[Outputs, PyTree]]


def populations(names: list[str], layout: str) -> list[list[str]]:
  """Groups the names of views by BatchNorm population."""
  if layout == 'joint':
    return [names]
  if layout == 'split':
    return [[name] for name in names]
  strong = [name for name in names if name.startswith('strong')]
  clean = [name for name in names if name not in strong]
  return [group for group in (clean, strong) if group]


def make_forward(model, layout: str) -> Forward:
  """Returns `forward(params, batch_stats, views) -> (outputs, batch_stats)`.

  The new running statistics are those of the population that holds the weak
  unlabeled view: clean images, and many; without one, of the first.
  """

  def forward(params, batch_stats, views):
    variables = {'params': params, 'batch_stats': batch_stats}
    outputs: Outputs = {}
    new_stats = None
    for names in populations(list(views), layout):
      images = jnp.concatenate([views[name] for name in names])
      prediction, updates = model.apply(
        variables, images, train=True, mutable=['batch_stats']
      )
      if new_stats is None or 'weak' in names:
        new_stats = updates.get('batch_stats', {})
      start = 0
      for name in names:
        rows = slice(start, start + len(views[name]))
        outputs[name] = jax.tree.map(lambda x, rows=rows: x[rows], prediction)
        start = rows.stop
    return outputs, new_stats

  return forward
