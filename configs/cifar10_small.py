"""CIFAR-10 for two CPU cores: the protocol of docs/results.md.

  python main.py --config configs/cifar10_small.py --workdir runs/small
  python main.py --config configs/cifar10_small.py:method=fixmatch,labels=1000

A network and a schedule that two cores finish in minutes; not a setting to
compare with published numbers. Averages forget faster than the paper's 0.999,
because the run is five hundred times shorter.
"""

from configs import cifar10, common

# What the papers set for runs of a million steps.
_SHORT = {
  'decay': 0.99,
  'warmup_steps': 100,
  'interval': 50,
  'uda_warmup_steps': 250,
  'pretrain_steps': 500,
}


def get_config(arg=''):
  variant = common.parse(arg, labels=250)
  config = cifar10.get_config(
    ','.join(f'{key}={value}' for key, value in variant.items())
  )
  config.model = 'wrn_10_1'
  config.bn_momentum = 0.99
  config.ema_decay = 0.99
  ratio = config.unlabeled_batch_size // config.batch_size
  config.batch_size = 16
  config.unlabeled_batch_size = 16 * min(ratio, 4)
  config.steps = 2000
  config.log_every = 50
  config.probe_every = 200
  config.eval_every = config.checkpoint_every = 200
  for args in (config.method_args, config.recipe_args):
    common.set_known(args, **_SHORT)
  return config
