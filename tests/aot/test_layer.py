"""The analysis of a layer, on a hand-written program in the format of XLA."""

from tests.aot.layer import layer_of

TEXT = """HloModule jit_forward

%fused_copy (p: f32[64,256]) -> f32[64,2,128] {
  %p = f32[64,256]{1,0:T(8,128)} parameter(0)
  ROOT %copy.1 = f32[64,2,128]{2,0,1:T(8,128)} copy(%p)
}

%inner (p.1: bf16[64,512], p.2: bf16[512,256]) -> f32[64,256] {
  ROOT %dot = f32[64,256]{1,0:T(8,128)} convolution(%p.1, %p.2), dim_labels=bf_io->bf
}

%product (p.3: bf16[64,512], p.4: bf16[512,256]) -> f32[64,256] {
  %f = f32[64,256]{1,0:T(8,128)} fusion(%p.3, %p.4), kind=kOutput, calls=%inner
  ROOT %add = f32[64,256]{1,0:T(8,128)} add(%f, %f)
}

%nothing (p.5: f32[64,256]) -> f32[64,256] {
  ROOT %p.5 = f32[64,256]{1,0} parameter(0)
}

%chunks (p.6: f32[64,256]) -> f32[64,256] {
  %p.6 = f32[64,256]{1,0} parameter(0)
  ROOT %k = f32[64,256]{0,1} copy(%p.6), backend_config={"estimated_cycles":"70"}
}

%body (arg: (s32[], f32[64,256])) -> (s32[], f32[64,256]) {
  %arg = (s32[], f32[64,256]{1,0:T(8,128)}) parameter(0)
  %x = f32[64,256]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %i = s32[] add(%x, %x), backend_config={"estimated_cycles":"3"}
  %y = f32[64,256]{1,0:T(8,128)} fusion(%x, %x), calls=%product, backend_config={"estimated_cycles":"500"}
  %z = f32[64,2,128]{2,0,1:T(8,128)S(1)} fusion(%y), calls=%fused_copy, backend_config={"estimated_cycles":"20"}
  %n = (f32[64]{0:T(128)}, f32[64,256]{1,0}) multiply(%z), backend_config={"estimated_cycles":"9223372036854775807"}
  %c = f32[64,256]{1,0} conditional(%i, %y, %y), branch_computations={%nothing, %chunks}
  ROOT %t = (s32[], f32[64,256]{1,0:T(8,128)}) tuple(%i, %y)
}

ENTRY %main (a: f32[64,256]) -> f32[64,256] {
  %w = (s32[], f32[64,256]) while(%a), condition=%cond, body=%body
}
"""


def test_instructions_of_the_loop_by_kind() -> None:
    layer = layer_of(TEXT)
    found = [(item.name, item.kind, item.num_bytes, item.cycles) for item in layer]
    assert found == [
        ("%i", "small", 4, 3),
        ("%y", "product", 64 * 256 * 4, 500),
        ("%z", "moves", 64 * 256 * 4, 20),
        ("%n", "other", 64 * 257 * 4, 0),
        ("%c", "other", 64 * 256 * 4, 0),
        ("%k", "moves", 64 * 256 * 4, 70),
    ]
    assert [item.name for item in layer if item.is_of_chunks] == ["%k"]
