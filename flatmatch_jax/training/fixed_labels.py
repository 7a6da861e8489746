"""FlatMatch with fixed labels (Algorithm 2): when, and which.

After some plain steps the most confident guesses become labels, from which the
perturbation is taken until the run ends. fixed.json keeps them for a resumed
run.
"""

import numpy as np

from flatmatch_jax.data import splits
from flatmatch_jax.system import messages
from flatmatch_jax.training import classify as classify_lib
from flatmatch_jax.types import UserError


def step_of_fixing(config, num_labeled: int) -> int:
  """After how many plain steps labels are fixed; 0 if none are.

  If there are enough labels, none are added.
  """
  if 'num_fixed' not in config.recipe_args:
    return 0
  args = config.recipe_args
  if num_labeled >= args.num_fixed:
    return 0
  if not 1 <= args.pretrain_steps < config.steps:
    raise UserError(
      f'config.recipe_args.pretrain_steps={args.pretrain_steps} must be at '
      f'least 1 and below config.steps={config.steps}: labels are fixed then, '
      f'because {num_labeled} are fewer than the {args.num_fixed} of '
      'config.recipe_args.num_fixed.'
    )
  return args.pretrain_steps


def choose(config, files, classify, dataset, split, state) -> dict:
  """The most confident unlabeled images: their 'index' and their 'label'.

  Chosen when it is time, and read back by a run that resumes later.
  """
  if int(state.step) <= config.recipe_args.pretrain_steps:
    (surest,) = classify(
      [state.ema_params],
      state.batch_stats,
      dataset.train_images,
      keep=classify_lib.surest,
    )
    confidence, guess = surest.T
    others = np.setdiff1d(np.arange(len(guess)), split.unlabeled)
    chosen = splits.most_confident(
      confidence,
      guess,
      np.union1d(split.labeled, others),
      config.recipe_args.num_fixed,
      dataset.train_labels,
    )
    files.write('fixed.json', chosen)
    messages.say(
      f'Fixed the labels of {len(chosen["index"])} unlabeled images; '
      f'{chosen["accuracy"]}% of them are right.'
    )
  elif not files.has('fixed.json'):
    raise UserError(
      f'{files.path / "fixed.json"} is missing; it has the labels that were '
      f'fixed at step {config.recipe_args.pretrain_steps}, so the run cannot '
      'resume. Put the file back, or start in another --workdir.'
    )
  else:
    chosen = files.read('fixed.json')
    classes = len(dataset.class_names)
    if not splits.are_fixed(chosen, len(dataset.train_labels), classes):
      raise UserError(
        f'{files.path / "fixed.json"} is not what this run wrote at step '
        f'{config.recipe_args.pretrain_steps}: it was damaged or changed. Put '
        'back a copy of it, or start in another --workdir.'
      )
  return chosen
