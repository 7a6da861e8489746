"""SVHN (train and extra) with WRN-28-2, as in Table 1 of the paper.

  python main.py --config configs/svhn.py --workdir runs/svhn
  python main.py --config configs/svhn.py:labels=1000 --config.flip=false

Digits are flipped by default, as in the code behind the published numbers.
"""

from flatmatch_jax.training import common, run_length


def get_config(arg=''):
  config = common.base(arg, 'svhn', paper_labels=(40, 250, 1000))
  config.mean = (0.4380, 0.4440, 0.4730)
  config.std = (0.1751, 0.1771, 0.1744)
  common.set_fairness(config, small=(40, 250, 1000))
  if 'max_threshold' in config.method_args:  # FreeMatch is held tighter here.
    config.method_args.update(min_threshold=0.9, max_threshold=0.95)
    run_length.follow(config, config.method_args, warmup_steps=2049)
  return config
