"""The reader of compiled programs: bytes and turns, by hand and by XLA."""

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import pytest

from benchmarks import hlo

# In the form of a TPU's compiler: tiled layouts, parts, counted tuples.
PROGRAM = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  ROOT %sum = f32[]{:T(128)} add(%x, %x)
}

%inner (p: bf16[64,3]) -> bf16[64,3] {
  %p = bf16[64,3]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %sent = bf16[64,3]{1,0:T(8,128)(2,1)} collective-permute(%p), \
channel_id=1, source_target_pairs={{0,1},{1,0}}
}

%body (q: (s32[], bf16[64,3])) -> (s32[], bf16[64,3]) {
  %q = (s32[], bf16[64,3]{1,0}) parameter(0)
  %part = bf16[64,3]{1,0} get-tuple-element(%q), index=1
  %turned = bf16[64,3]{1,0} fusion(%part), kind=kLoop, calls=%inner
  ROOT %out = (s32[], bf16[64,3]{1,0}) tuple(%part, %turned)
}

%test (r: (s32[], bf16[64,3])) -> pred[] {
  %r = (s32[], bf16[64,3]{1,0}) parameter(0)
  ROOT %less = pred[]{:T(512)} compare(%r, %r), direction=LT
}

%left (a: pred[40]) -> pred[40] {
  %a = pred[40]{0} parameter(0)
  ROOT %any = pred[40]{0} all-reduce(%a), channel_id=2, to_apply=%add
}

%right (b: pred[40]) -> pred[40] {
  ROOT %b = pred[40]{0} parameter(0)
}

ENTRY %main (g: f32[16,8], h: s32[5]) -> f32[16,8] {
  %g = f32[16,8]{1,0:T(8,128)} parameter(0)
  %h = s32[5]{0:T(128)} parameter(1)
  %u = u8[24]{0} constant({...})
  %start.1 = (f32[16,8]{1,0:T(8,128)}, f32[128,8]{1,0:T(8,128)}) \
all-gather-start(%g), channel_id=3, dimensions={0}, \
metadata={op_name="jit(step)/all-to-all(x)"}
  %gathered = f32[128,8]{1,0:T(8,128)} all-gather-done(%start.1), \
metadata={op_name="jit(step)/dot"}
  %all = (f32[16,8]{1,0:T(8,128)}, /*index=1*/s32[5]{0:T(128)}, u8[24]{0}) \
all-reduce(%g, %h, %u), channel_id=4, to_apply=%add
  %scattered = f32[16,8]{1,0} reduce-scatter(%gathered), channel_id=5, \
dimensions={0}, to_apply=%add
  %moved-start = ((f32[16,8]{1,0}), f32[16,8]{1,0}, u32[], u32[]) \
all-to-all-start(%g), channel_id=6, dimensions={0}
  %moved = f32[16,8]{1,0} all-to-all-done(%moved-start)
  %loop = (s32[], bf16[64,3]{1,0}) while(%h), condition=%test, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %again = (s32[], bf16[64,3]{1,0}) while(%loop), condition=%test, body=%body
  %either = pred[40]{0} conditional(%h, %u, %u), \
branch_computations={%right, %left}
  ROOT %done = f32[16,8]{1,0} copy(%scattered)
}
"""


def test_kinds_bytes_and_turns_of_a_program_by_hand():
  found = hlo.collectives(PROGRAM)
  assert sorted(c[:3] for c in found) == [
    ('all-gather', 128 * 8 * 4, 1),
    ('all-reduce', 40, 1),
    ('all-reduce', 16 * 8 * 4 + 5 * 4 + 24, 1),
    ('all-to-all', 16 * 8 * 4, 1),
    # Called from two loops: three turns, and one that is not known.
    ('collective-permute', 64 * 3 * 2, 4),
    # What is reduced, not the eighth that is left of it.
    ('reduce-scatter', 128 * 8 * 4, 1),
  ]
  assert [c.arrays for c in found if len(c.arrays) > 1] == [(512, 20, 24)]
  assert {c.operation for c in found} == {'', 'jit(step)/dot'}
  assert hlo.totals(found) == {
    'all-reduce': (2, 556 + 40),
    'all-gather': (1, 4096),
    'reduce-scatter': (1, 4096),
    'collective-permute': (4, 4 * 384),
    'all-to-all': (1, 512),
  }


@pytest.mark.parametrize(
  ('kind', 'size'),
  [
    ('pred[3]', 3),
    ('s4[6]', 3),
    ('u8[2,3]', 6),
    ('f8e4m3fn[5]', 5),
    ('bf16[2,5]', 20),
    ('f32[]', 4),
    ('s64[<=4]', 32),
    ('c64[2]', 16),
    ('token[]', 0),
    ('f32[0,4]', 0),
  ],
)
def test_size_of_elements(kind, size):
  assert hlo.sizes(f'({kind}{{0:T(8,128)}}, u32[])') == (size, 4)


def test_collectives_of_a_program_by_xla():
  """A sum over the rows, thrice in a loop, and a shift of the rows."""
  axes = (AxisType.Auto,)
  mesh = jax.make_mesh((jax.device_count(),), ('data',), axis_types=axes)
  rows = NamedSharding(mesh, PartitionSpec('data'))
  size = mesh.size

  @jax.jit
  def program(x):
    centre = lambda x, _: (x - x.mean(0), None)
    y, _ = jax.lax.scan(centre, x, length=3)
    return jax.lax.with_sharding_constraint(y[::-1], rows)

  x = jax.ShapeDtypeStruct((4 * size, 5), 'float32', sharding=rows)
  text = program.lower(x).compile().as_text()
  assert hlo.totals(hlo.collectives(text)) == {
    'all-reduce': (3, 3 * 5 * 4),
    'collective-permute': (1, 4 * 5 * 4),
  }
