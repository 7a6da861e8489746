"""CIFAR-10 in less than an hour of one CPU core: docs/results.md.

  python main.py --config configs/cifar10_fast.py:labels=250 --workdir runs/fast
  python main.py --config configs/cifar10_fast.py:method=fixmatch,labels=4000

8,000 steps of a network with 1.2 million parameters.
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
