"""The reader of PTX finds tensor copies at addresses that a loop moves by less than their alignment."""

import pytest

from tests.aot.ptx import TENSOR_ALIGNMENT, tensor_addresses

LOOP = """
	mov.b64 	%rd1, __dynamic_shmem__0;
	cvt.u32.u64 	%r1, %rd1;
	ld.param.b32 	%r9, [kernel_param_0];
	shl.b32 	%r2, %r9, 10;
	add.s32 	%r3, %r1, %r2;
	mov.b32 	%r4, %r3;
$L__BB0_1:
	@%p19 cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd64, {%r9, %r9, %r9, %r9} ], [%r4];
	add.s32 	%r4, %r4, STEP;
	@%p2 bra 	$L__BB0_1;
	@%p51 cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd40, {%r9,%r9}], [%r9];
"""


@pytest.mark.parametrize(("step", "alignment"), [(160, 32), (192, 64), (128, 128), (256, 256)])
def test_alignment_of_the_copies_in_a_loop(step: int, alignment: int) -> None:
    (_, stored), (_, fetched) = tensor_addresses(LOOP.replace("STEP", str(step)))
    assert stored == alignment
    assert fetched == 1024
    assert TENSOR_ALIGNMENT == 128
