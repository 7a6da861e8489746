"""CIFAR-10 on one small GPU, such as Colab's T4.

  python main.py --config configs/cifar10_t4.py:labels=250 --workdir runs/t4

The settings of cifar10_fast.py with a network twice as wide, larger batches and
more steps. Neither time nor error has been measured on a GPU. By XLA's count a
step takes 260 GFLOP, so at a third of a T4's peak (8.1 TFLOP/s in float32)
20,000 steps would take about half an hour.
"""

from configs import cifar10_fast


def get_config(arg=''):
  config = cifar10_fast.get_config(arg)
  config.model = 'fast_128_256_512'
  ratio = config.unlabeled_batch_size // 16
  config.batch_size = 32
  config.unlabeled_batch_size = 32 * (7 if ratio == 4 else ratio)
  config.steps = 20_000
  return config
