"""The analyses of one run, by name: each gives a dict of arrays.

Or a text that says why there is nothing to measure. What begins with `log_` is
what the run wrote into metrics.jsonl along training.
"""

import functools
import json

import jax
import numpy as np
from tqdm import tqdm

from flatmatch_jax.analysis import hessian, landscape, pseudo_labels, sharpness
from flatmatch_jax.analysis.setting import Setting
from flatmatch_jax.run.settings import as_dict
from flatmatch_jax.step import probe

_RHOS = np.linspace(0.0, 0.5, 21)
_EIGENVALUES = 5
_ITERATIONS = 15
_BATCHES = 10
_MOST_GUESSES = 10000
_LOGGED = ('sharpness', 'cross_sharpness', 'held_out_sharpness')
_GRADIENTS = (
  'gradient_angle',
  'labeled_gradient_norm',
  'unlabeled_gradient_norm',
  'total_gradient_norm',
  'labeled_loss',
  'unlabeled_loss',
)


def measure_landscape(given: Setting, args) -> dict:
  """Both losses on a plane through θ, and along its first direction."""
  params = given.run.state.params
  directions = tuple(
    landscape.random_direction(key, params)
    for key in jax.random.split(jax.random.key(0))
  )
  at = np.linspace(-1, 1, args.points)
  curve_at = np.linspace(-1, 1, 4 * args.points - 3)
  found = {'at': at, 'curve_at': curve_at}
  for name, loss in given.rotated.items():
    compute = functools.partial(
      landscape.surface, loss, params, progress=bar(name)
    )
    found[f'{name}_surface'] = compute(directions, at)
    found[f'{name}_curve'] = compute(directions[:1], curve_at)
  return found


def measure_sharpness(given: Setting, args) -> dict:
  """Over ρ at the checkpoint; over steps as the run logged it."""
  del args
  losses, params = given.losses, given.run.state.params
  found = {'rho': _RHOS}
  for name, of, up in (
    ('labeled', 'labeled', 'labeled'),
    ('cross', 'unlabeled', 'labeled'),
    ('held_out', 'held_out', 'held_out'),
  ):
    if of in losses:
      rises = sharpness.rises(losses[of], losses[up], params, _RHOS)
      found[f'{name}_rise'] = rises
  if logged := _logged(given, _LOGGED):
    rho = given.run.config.recipe_args.get('rho', probe.DEFAULT_RHO)
    found |= logged | {'log_rho': rho}
  return found


def measure_hessian(given: Setting, args) -> dict:
  """The largest eigenvalues of each loss's Hessian at θ."""
  del args
  found = {}
  for name, loss in given.losses.items():
    found[f'{name}_eigenvalues'], found[f'{name}_errors'] = (
      hessian.top_eigenvalues(
        loss,
        given.run.state.params,
        _EIGENVALUES,
        _ITERATIONS,
        progress=bar(f'{name} Hessian'),
      )
    )
  return found


def measure_gradients(given: Setting, args) -> dict:
  """Norms, angle and losses over batches at θ; over steps as logged."""
  del args
  look = jax.jit(given.run.program.probe)
  batches = bar('gradients')(given.batches(_BATCHES), total=_BATCHES)
  rows = [jax.device_get(look(given.run.state, batch)) for batch in batches]
  found = {key: np.array([row[key] for row in rows]) for key in rows[0]}
  return found | _logged(given, _GRADIENTS)


def measure_pseudo_labels(given: Setting, args) -> dict | str:
  """The guesses for as many images as the pool has, drawn as in training."""
  del args
  run = given.run
  if not run.program.views:
    return f'{run.config.method} guesses no labels'
  images = min(len(given.split.unlabeled), _MOST_GUESSES)
  number = -(-images // run.config.unlabeled_batch_size)
  guess = pseudo_labels.make_guess(run.program.forward, run.program.method)
  rows = []
  for batch in bar('pseudo-labels')(given.batches(number), total=number):
    found = *guess(run.state, batch), batch.unlabeled['truth']
    rows.append(jax.device_get(found))
  label, weight, truth = map(np.concatenate, zip(*rows, strict=True))
  quality = pseudo_labels.quality(
    label, weight, truth, len(given.dataset.class_names)
  )
  return quality | {'class_names': np.array(given.dataset.class_names)}


def measure_convergence(given: Setting, args) -> dict | str:
  """Test error and losses along training, from the log alone."""
  del args
  losses = _logged(given, ('unlabeled_loss', 'labeled_loss'))
  errors = _logged(given, ('error',), 'error_')
  return losses | errors or 'the run has logged nothing'


def measure_outcome(given: Setting, args) -> dict | str:
  """What came out, at what settings, and how long a step took."""
  del args
  if not given.files.has('result.json'):
    return 'the run has not finished'
  config, result = given.run.config, given.files.read('result.json')
  if 'error_last' not in result:
    return 'the run has measured no errors'
  images = config.batch_size
  if given.run.program.views:
    images += config.unlabeled_batch_size
  return {
    'error_last': result['error_last'],
    'error_best': result['error_best'],
    'step_seconds': images / (result['images_per_second'] or np.nan),
    'config': json.dumps(as_dict(config)),
  }


def bar(name: str):
  """A progress bar on a terminal, nothing elsewhere."""
  return functools.partial(tqdm, desc=name, disable=None, leave=False)


def _logged(given, keys, prefix='log_') -> dict:
  """What the run logged together, by step; empty if it never did."""
  rows = [r for r in given.files.metrics() if r.get(keys[0]) is not None]
  if not rows:
    return {}
  return {
    f'{prefix}{key}': np.array([row[key] for row in rows], float)
    for key in ('step', *keys)
    if key in rows[0]
  }


ANALYSES = {
  'landscape': measure_landscape,
  'sharpness': measure_sharpness,
  'hessian': measure_hessian,
  'gradients': measure_gradients,
  'pseudo_labels': measure_pseudo_labels,
  'convergence': measure_convergence,
  'sensitivity': measure_outcome,
  'efficiency': measure_outcome,
}
