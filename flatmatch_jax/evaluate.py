"""Test error of a run's checkpoint.

python -m flatmatch_jax.evaluate --workdir DIR [--checkpoint best]
"""

import argparse

from flatmatch_jax import classify, cli, data, program
from flatmatch_jax.workdir import Workdir


def main():
  parser = argparse.ArgumentParser(description='Test error of a run.')
  parser.add_argument('--workdir', required=True, help='folder of the run')
  parser.add_argument(
    '--checkpoint', default='latest', help='latest (default) or best'
  )
  parser.add_argument('--data_dir', help='TFDS folder, if it has moved')
  args = parser.parse_args()

  run = program.load_run(Workdir(args.workdir), args.checkpoint)
  dataset = data.load(run.config.dataset, args.data_dir or run.config.data_dir)
  errors = classify.errors(
    run.classify, run.state, dataset.test_images, dataset.test_labels
  )
  print(
    f'step {int(run.state.step)}: test error {errors["error"]}% '
    f'(raw weights {errors["error_raw"]}%) '
    f'on {len(dataset.test_labels)} images'
  )


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
