from orca_jax.values.request import RequestUpdate, plain_update
from orca_jax.values.step import Member, plain_member


def test_a_plain_member_has_the_defaults_of_the_other_fields() -> None:
    plain = plain_member("a", 2, 3, (7,), True, True, 1, ((4,),))
    expected = Member(
        "a", 2, 3, (7,), True, last_on_device=True, num_old_blocks=1, new_blocks=((4,),)
    )
    assert isinstance(plain, Member)
    assert plain == expected
    assert plain.num_tokens == 2


def test_a_plain_update_has_the_defaults_of_the_other_fields() -> None:
    plain = plain_update("a", (1, 2))
    assert isinstance(plain, RequestUpdate)
    assert plain == RequestUpdate("a", (1, 2))
