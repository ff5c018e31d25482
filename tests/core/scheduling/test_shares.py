"""What owners hold while others wait: tokens of a step, slots and blocks."""

import pytest
from quire.core.scheduling.shares import divide_budget
from quire.tests.core.scheduling.loop import Loop, distinct


def names(step: dict[str, int]) -> str:
    return "".join(sorted(request_id[0] for request_id in step))


def flood(loop: Loop, number: int, length: int = 20, max_tokens: int = 200, owner="a") -> None:
    for i in range(number):
        loop.add(f"{owner}{i}", distinct(i, length), max_tokens=max_tokens, owner=owner)


def test_one_owner_has_everything():
    loop = Loop(max_num_batched_tokens=16)
    flood(loop, 20)
    for _ in range(30):
        assert divide_budget(loop.scheduler, {}) is None
        loop.step()
    assert loop.scheduler.stats().num_preemptions == 0


def test_a_long_prompt_of_another_delays_a_request_by_no_step():
    loop = Loop(max_num_batched_tokens=16)
    loop.add("a", distinct(0, 200), owner="a")
    loop.step()
    loop.add("b", distinct(1, 8), owner="b", max_tokens=20)
    assert loop.step() == {"a": 8, "b": 8}
    # nor is one that decodes, though it arrived later
    assert [loop.step() for _ in range(3)] == [{"a": 15, "b": 1}] * 3


def test_the_budget_is_divided_by_weight_and_what_one_does_not_want_goes_to_others():
    loop = Loop(max_num_batched_tokens=60, max_num_seqs=4)
    loop.add("a", distinct(0, 200), owner="a")
    loop.add("b", distinct(1, 200), owner="b", owner_weight=2.0)
    loop.add("c", distinct(2, 10), owner="c", owner_weight=2.0)
    loop.step()
    shares = divide_budget(loop.scheduler, {})
    by_name = {owner.identity[1]: number for owner, number in shares.items()}
    assert by_name == {"a": 17, "b": 33, "c": 10}  # c wants 10; 50 are divided 1 to 2
    loop.run()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_slots_held_by_one_owner_are_shared_when_another_comes(mode):
    loop = Loop(max_num_seqs=4, preemption_mode=mode)
    flood(loop, 12, max_tokens=60)
    loop.step()
    loop.step()
    loop.add("b0", distinct(50, 20), owner="b", max_tokens=60)
    assert names(loop.step()) == "aaab"
    for i in range(1, 8):
        loop.add(f"b{i}", distinct(50 + i, 20), owner="b", max_tokens=60)
    steps = [names(loop.step()) for _ in range(40)]
    assert set(steps) == {"aaab", "aabb"}  # at last half of the slots, and no more
    assert steps == sorted(steps)
    assert loop.scheduler.stats().num_preemptions == 2
    loop.run()
    assert len(loop.ends) == 20


def test_blocks_held_by_one_owner_are_shared_when_another_comes():
    loop = Loop(num_gpu_blocks_override=17, max_num_seqs=8, enable_prefix_caching=False)
    flood(loop, 6, length=60, max_tokens=100)
    loop.step()
    assert loop.state("running") == ["a0", "a1", "a2", "a3"]  # 16 blocks, and all are in use
    loop.add("b", distinct(50, 60), owner="b", max_tokens=4)
    assert names(loop.step()) == "aaab"
    loop.run()
    assert len(loop.ends) == 7


def test_an_owner_takes_no_more_than_its_share():
    loop = Loop(max_num_seqs=4)
    flood(loop, 2, max_tokens=60)
    flood(loop, 2, max_tokens=60, owner="b")
    loop.step()
    flood(loop, 8, max_tokens=60, owner="c")  # its share is 4/3 of a slot
    steps = [names(loop.step()) for _ in range(30)]
    assert len(set(steps)) == 1 and steps[0].count("c") == 1
    assert loop.scheduler.stats().num_preemptions == 1
    loop.run()
    assert len(loop.ends) == 12


def test_with_more_owners_than_slots_each_still_has_its_turn():
    loop = Loop(max_num_seqs=2)
    for owner in "abcde":
        flood(loop, 3, max_tokens=6, owner=owner)
    loop.run()
    first = [name[0] for name in loop.ends][:5]
    assert sorted(first) == list("abcde")


def test_light_use_by_one_owner_costs_another_little():
    """Tokens of a flood in a fixed number of steps, with and without another owner's requests."""

    def tokens_of_a(with_b: bool) -> tuple[int, list[int]]:
        loop = Loop(max_num_seqs=8, num_gpu_blocks_override=257)
        flood(loop, 100, max_tokens=50)
        waited = []
        for i in range(200):
            if with_b and i % 20 == 10:
                loop.add(f"b{i}", distinct(i, 30), owner="b", max_tokens=4)
            loop.step()
            waited += [i for name, tokens in loop.tokens.items() if name == f"b{i}" and tokens]
        return sum(len(t) for name, t in loop.tokens.items() if name[0] == "a"), waited

    alone, _ = tokens_of_a(False)
    shared, waited = tokens_of_a(True)
    assert len(waited) == 10  # each has its first token in the step after it came
    assert shared >= 0.95 * alone
