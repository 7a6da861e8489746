"""The file of numbers that TensorBoard draws, written without TensorFlow."""

import os
import pathlib
import socket
import time

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class Events:
  """Adds rows to a new file in a folder; each is there at once."""

  def __init__(self, folder: pathlib.Path):
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads files in the order of their names.
    name = f'{time.time():.6f}.{socket.gethostname()}.{os.getpid()}'
    path = folder / f'events.out.tfevents.{name}'
    self._file = RecordWriter(path.open('xb'))
    self._add(file_version='brain.Event:2')

  def write(self, step: int, scalars: dict[str, float]) -> None:
    value = Summary.Value
    values = [value(tag=k, simple_value=v) for k, v in scalars.items()]
    self._add(step=step, summary=Summary(value=values))

  def close(self) -> None:
    self._file.close()

  def _add(self, **content):
    event = Event(wall_time=time.time(), **content)
    self._file.write(event.SerializeToString())
    self._file.flush()
