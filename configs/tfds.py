"""Any dataset of TFDS with image and label, by its name.

  python main.py --config configs/tfds.py:name=mnist,labels=100
  python main.py --config configs/tfds.py:name=oxford_flowers102,labels=1020,\
image_size=96 --config.data_dir=TFDS_DIR

Images of one size stay as they are; others are brought to `image_size`.
"""

from flatmatch_jax.training import common


def get_config(arg=''):
  config = common.base(
    arg, 'tfds', paper_labels=(), name='', image_size=32, fast='auto'
  )
  common.set_own(config, config.image_size)
  config.tfds_name = config.name
  del config.name
  return config
