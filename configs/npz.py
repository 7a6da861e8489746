"""Your own images as arrays in one file: see flatmatch_jax/data/arrays.py.

  python main.py --config configs/npz.py --config.data_dir=FILE.npz
  python main.py --config configs/npz.py:method=fixmatch,labels=40 \
      --config.data_dir=FILE.npz

Images keep their size. The shift is for about 32 pixels; for 96 add
--config.pad=12, and with fast=false --config.model=wrn_37_2.
"""

from flatmatch_jax.training import common


def get_config(arg=''):
  config = common.base(arg, 'npz', paper_labels=(), labels='all', fast='auto')
  common.set_own(config, image_size=32)
  return config
