"""The error of a run's checkpoint, class by class.

  python -m flatmatch_jax.evaluate --workdir DIR [--checkpoint best]

On the test images or, without any, on those held out. Writes evaluation.json
into DIR: errors in percent, of each class too, the calibration error and the
confusion matrix, whose rows are the truth.
"""

from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import cli, messages
from flatmatch_jax.training import classify, load

SHOWN = 20  # Classes; all are in the file.


def describe(step, found, names, which) -> str:
  lines = [
    f'step {step}: error {found["error"]:.2f}% '
    f'(raw weights {found["error_raw"]:.2f}%, mean of the classes '
    f'{found["balanced_error"]:.2f}%, calibration '
    f'{found["calibration_error"]:.2f}%) on {which} images'
  ]
  known = [
    (error, name)
    for error, name in zip(found['class_errors'], names, strict=True)
    if error is not None
  ]
  for error, name in sorted(known, key=lambda pair: -pair[0])[:SHOWN]:
    lines.append(f'{error:7.2f}% {messages.printable(name)}')
  if len(known) > SHOWN:
    lines.append(f'and {len(known) - SHOWN} classes with lower errors')
  return '\n'.join(lines)


def main():
  parser = cli.Parser(
    prog='python -m flatmatch_jax.evaluate', description='Test error of a run.'
  )
  parser.add_argument('--workdir', required=True, help='folder of the run')
  parser.add_argument(
    '--checkpoint', default='latest', help='latest (default) or best'
  )
  parser.add_argument('--data_dir', help='folder of the data, if it has moved')
  args = parser.parse_args()

  files = Workdir(args.workdir)
  run = load.load_run(files, args.checkpoint)
  dataset = load.load_data(run, args.data_dir)
  images, labels, kind = load.choose_images(files, run, dataset)
  found = classify.evaluate(run.classify, run.state, images, labels)
  step, names = int(run.state.step), dataset.class_names
  files.write('evaluation.json', {'step': step, 'images': kind, **found})
  print(describe(step, found, names, f'{len(labels)} {kind}'))


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
