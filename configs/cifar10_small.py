"""CIFAR-10 for two CPU cores: the protocol of docs/results.md.

  python main.py --config configs/cifar10_small.py --workdir runs/small
  python main.py --config configs/cifar10_small.py:method=fixmatch,labels=1000

A network and a schedule that two cores finish in minutes; not a setting to
compare with published numbers.
"""

from configs import cifar10, common


def get_config(arg=''):
  variant = common.parse(arg, labels=250)
  config = cifar10.get_config(
    ','.join(f'{key}={value}' for key, value in variant.items())
  )
  config.model = 'wrn_10_1'
  ratio = config.unlabeled_batch_size // config.batch_size
  config.batch_size = 16
  config.unlabeled_batch_size = 16 * min(ratio, 4)
  config.steps = 2000
  config.log_every = 50
  config.probe_every = 200
  config.eval_every = config.checkpoint_every = 200
  return config
