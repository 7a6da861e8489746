"""Every benchmark starts, and does its smallest work if that is cheap."""

from contextlib import nullcontext
import pathlib
import runpy
import subprocess
import sys

import pytest

from benchmarks import input_speed, pod_arithmetic
from configs import cifar10, imagenet

FOLDER = pathlib.Path(input_speed.__file__).parent
ROOT = FOLDER.parent
# Others only say what they are about: their work is tested by its parts in
# this folder, or takes minutes.
ARGUMENTS = {
  'bucket_speed': ['--images', '4', '--latency', '0'],
  'gpu_compile': ['--show', 'rows.json'],
  'hlo_bytes': ['program.txt'],
  'host_time': ['--models=fast_8', '--methods=fixmatch', '--steps=102'],
  'op_times': ['--model', 'wrn_10_1', '--batch_size', '2', '--steps', '1'],
  'pod_arithmetic': ['--chip', 'v6e', '--method', 'fixmatch'],
  'step_cost': ['--methods=fixmatch', '--recipes=plain', '--layouts=split'],
  'tpu_compile': ['--show', str(ROOT / 'docs' / 'tpu_compile.json')],
}
PROGRAM = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} add(%a, %a)
}
"""


def is_script(path):
  return "__name__ == '__main__'" in path.read_text()


SCRIPTS = [path.stem for path in FOLDER.glob('*.py') if is_script(path)]


@pytest.mark.parametrize('name', sorted(SCRIPTS))
@pytest.mark.usefixtures('tiny_network')
def test_benchmark_runs(name, tmp_path, monkeypatch, capsys):
  (tmp_path / 'rows.json').write_text('[]')
  (tmp_path / 'program.txt').write_text(PROGRAM)
  monkeypatch.chdir(tmp_path)
  script = FOLDER / f'{name}.py'
  arguments = ARGUMENTS.get(name, ['--help'])
  if 'app.run(' in script.read_text():  # absl's flags are global.
    command = [sys.executable, script, *arguments]
    subprocess.run(command, check=True, capture_output=True)
    return
  if name == 'pod_arithmetic':
    few = [cifar10.get_config(), imagenet.get_config()]
    monkeypatch.setattr(pod_arithmetic, 'configurations', lambda method: few)
    monkeypatch.setattr(sys, 'argv', [str(script), *arguments])
    pod_arithmetic.main()
  else:
    monkeypatch.setattr(sys, 'argv', [str(script), *arguments])
    helped = arguments == ['--help']
    ends = pytest.raises(SystemExit, match=r'^0$') if helped else nullcontext()
    with ends:
      runpy.run_path(str(script), run_name='__main__')
  assert capsys.readouterr().out


def test_input_is_measured(tmp_path):
  input_speed.prepare(tmp_path, 2)
  for stream in input_speed.STREAMS:
    speeds = input_speed.decode_speed(tmp_path, stream, seconds=0)
    assert min(speeds) > 0
  step, share = input_speed.waiting(tmp_path, 0, 1, batch_size=8, ratio=1)
  assert step > 0
  assert 0 <= share <= 1
