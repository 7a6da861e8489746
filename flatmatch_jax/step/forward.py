"""Named views through the network: one call per BatchNorm population.

A population is a group of views that share batch statistics. Layouts:

  joint         [labeled; weak; strong] together, as published code bases do;
  clean_strong  [labeled; weak] and [strong];
  split         each view alone: the cheapest, since XLA drops every view that
                a pass does not need.

A method may name populations of its own, which are the same in every layout.
"""

from collections.abc import Callable

import jax

from flatmatch_jax.system import rows
from flatmatch_jax.types import Outputs, PyTree

LAYOUTS = ('joint', 'clean_strong', 'split')

# (params, batch_stats, views[, rng]) -> (outputs, the batch's own statistics)
Forward = Callable[..., tuple[Outputs, PyTree]]


# Names of views, by population; those of a method.
Populations = tuple[tuple[str, ...], ...]


def populations(
  names: list[str], layout: str, own: Populations = ()
) -> list[list[str]]:
  """Groups the names of views by BatchNorm population.

  First the method's `own`, as far as there are such views; then all other
  views by layout.
  """
  if own:
    groups = [[name for name in group if name in names] for group in own]
    others = [name for name in names if all(name not in g for g in groups)]
    groups += populations(others, layout)
    return [group for group in groups if group]
  if layout == 'joint':
    return [names]
  if layout == 'split':
    return [[name] for name in names]
  strong = [name for name in names if 'strong' in name or name == 'medium']
  clean = [name for name in names if name not in strong]
  return [group for group in (clean, strong) if group]


def make_forward(
  model,
  layout: str,
  microbatches: int = 1,
  gather=lambda params: params,
  own_populations: Populations = (),
) -> Forward:
  """Returns `forward(params, batch_stats, views, rng) -> (outputs, stats)`.

  `stats` are the batch's own, which the train step averages: those of the
  population that holds the weak unlabeled view, whose images are clean and
  many; without one, of the first. The network's BatchNorm layers need a
  momentum of 0. Layers that training does not apply return what they were
  given.

  Without `rng` the network draws nothing, such as which blocks to skip.

  With `microbatches` a population goes through the network part after part,
  and again in the backward pass: memory is that of one part, and losses still
  see all outputs, so every method and recipe stays what it was. BatchNorm then
  normalizes each part by itself.

  `gather` is that of the mesh, where parameters are split over devices.

  `own_populations` are those of the method: `Method.populations`.
  """

  def apply(params, batch_stats, views, rng):
    variables = {'params': params, 'batch_stats': batch_stats}
    prediction, updates = model.apply(
      variables,
      rows.interleave(views),
      train=True,
      mutable=['batch_stats'],
      rngs={} if rng is None else {'dropout': rng},
    )
    split = lambda x: rows.separate(x, [len(view) for view in views])
    predictions = jax.tree.transpose(
      jax.tree.structure(prediction),
      jax.tree.structure([0] * len(views)),
      jax.tree.map(split, prediction),
    )
    return predictions, updates.get('batch_stats', {})

  def apply_in_parts(params, batch_stats, views, rng):
    # Every part takes rows from everywhere: they stay on their devices.
    cut = lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)
    rngs = rng if rng is None else jax.random.split(rng, microbatches)
    one = jax.checkpoint(lambda x: apply(params, batch_stats, *x))
    predictions, stats = jax.lax.map(one, (jax.tree.map(cut, views), rngs))
    join = lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
    average = lambda x: x.mean(0)
    return jax.tree.map(join, predictions), jax.tree.map(average, stats)

  run = apply if microbatches == 1 else apply_in_parts

  def forward(params, batch_stats, views, rng=None):
    outputs: Outputs = {}
    new_stats = None
    params = gather(params)  # Once for all populations.
    groups = populations(list(views), layout, own_populations)
    for number, names in enumerate(groups):
      key = None if rng is None else jax.random.fold_in(rng, number)
      group = [views[name] for name in names]
      predictions, stats = run(params, batch_stats, group, key)
      if new_stats is None or 'weak' in names:
        new_stats = stats
      outputs |= dict(zip(names, predictions, strict=True))
    return outputs, new_stats

  return forward


def with_scaled_gradients(forward: Forward, scale) -> Forward:
  """The same function; inside, gradients are `scale` times as large.

  float16 would round small ones to zero. With a power of two, others keep their
  bits.
  """

  def scaled(params, *args, **kwargs):
    params = _times_in_backward(params, 1 / scale)
    outputs, stats = forward(params, *args, **kwargs)
    return _times_in_backward(outputs, scale), stats

  return scaled


def _times_in_backward(tree, factor):
  """`tree`; its gradient is multiplied by `factor`.

  A `custom_vjp` would make zeros of the gradients that a view does not get, and
  the network would pass them back. Infinities become NaN.
  """

  def leaf(x):
    still = jax.lax.stop_gradient(x)
    return still + factor * (x - still)

  return jax.tree.map(leaf, tree)
