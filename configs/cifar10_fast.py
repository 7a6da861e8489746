"""CIFAR-10 in a quarter of an hour of one CPU core: docs/results.md.

  python main.py --config configs/cifar10_fast.py:labels=250 --workdir runs/fast
  python main.py --config configs/cifar10_fast.py:method=fixmatch,labels=4000

In one tuning run FreeMatch had 41% error from 250 labels after 4,000 steps, 6
minutes of a core, on images held out of the training set. Longer runs have not
paid yet. The time of the default 10,000 steps is an estimate.
"""

from configs import cifar10, common


def get_config(arg=''):
  variant = common.parse(arg, labels=250)
  config = cifar10.get_config(
    ','.join(f'{key}={value}' for key, value in variant.items())
  )
  common.set_fast(config)
  if config.labels == 'all' or config.labels > 1000:
    config.batch_size = 32  # Or each label would be seen too rarely.
  return config
