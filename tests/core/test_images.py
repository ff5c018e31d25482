"""Images in the core: what is refused, block hashes, and the rows of the table."""

import random

import msgspec
import pytest
from quire.core.encoder_cache import EncoderCache
from quire.core.request import Request
from quire.ipc.messages import Array, EngineCoreRequest, digest_of
from quire.ipc.step_messages import SchedulerOutput
from quire.tests.core.engine_loop import make_core, make_request, run
from quire.tests.fake_encoder import PLACEHOLDER, VISION, WHOLE, item, read_prompt
from quire.tests.fakes import expected_output

replace = msgspec.structs.replace
PROMPT = [1, 2, *[PLACEHOLDER] * 6, 3, 4, *[PLACEHOLDER] * 4, 5]
FIRST, SECOND = item(1, (2, 3), (2, 6)), item(2, (2, 2), (10, 4))


def asked(images=(FIRST, SECOND), name="r", prompt=PROMPT) -> EngineCoreRequest:
    return make_request(name, prompt, images=list(images))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spans": []}, "spans: must not be empty"),
        ({"spans": [(1, 6)]}, "spans: the prompt must have the token 90 there"),
        ({"spans": [(2, 5)]}, "spans: must have 6 tokens, as many as the grid, got 5"),
        ({"spans": [(12, 6)]}, "spans: must ascend, and lie between 0 and the 15 tokens"),
        ({"spans": [(4, 4), (2, 2)]}, "spans: must ascend, and lie between 8 and the 15 tokens"),
        ({"spans": [(2, 3), (5, 3)]}, "spans: must be 1 of this model, got 2"),
        ({"grid": (3, 2)}, r"grid: must be \(2, 3\) for these pixels, got \(3, 2\)"),
        ({"digest": b"\0" * 32}, "digest: must be that of pixels and grid"),
        (
            {"pixels": Array("f4", (4, 6, 3), bytes(288))},
            r"pixels: must be u1 \[height, width, 3\]",
        ),
        ({"pixels": Array("u1", (4, 6, 3), bytes(71))}, "pixels: must have 72 bytes, got 71"),
        ({"pixels": Array("u1", (4, 5, 3), bytes(60))}, "height and width must be multiples of 2"),
    ],
)
def test_images_that_are_refused(change, problem):
    core = make_core(vision=WHOLE)
    core.add_request(asked([replace(FIRST, **change)]))
    (answer,) = run(core)[0].values()
    assert answer.error is not None
    with pytest.raises(AssertionError, match=rf"images: \[0\]\..*{problem}"):
        raise AssertionError(answer.error)


@pytest.mark.parametrize(
    ("vision", "settings", "problem"),
    [
        (None, {}, "must be empty: this model reads text only"),
        (VISION, {"encoder_cache_tokens": 5}, "must have at most encoder_cache_tokens=5 rows"),
        (WHOLE, {"max_num_batched_tokens": 5}, "must have at most max_num_batched_tokens=5 tokens"),
        (
            VISION,
            {"encoder_cache_tokens": 9, "enable_chunked_prefill": False},
            "must have at most encoder_cache_tokens=9 rows together with enable_chunked_prefill",
        ),
    ],
)
def test_images_that_an_engine_does_not_take(vision, settings, problem):
    core = make_core(vision=vision, **settings)
    core.add_request(asked())
    (answer,) = run(core)[0].values()
    assert problem in answer.error


def hashes(images, prompt=PROMPT) -> list[bytes]:
    return Request(asked(images, prompt=prompt), max_model_len=100).extend_block_hashes(2)


def test_blocks_that_an_image_touches_have_its_digest():
    base, other = hashes([FIRST, SECOND]), hashes([FIRST, item(3, (2, 2), (10, 4))])
    assert [a == b for a, b in zip(base, other)] == [True] * 5 + [False] * 2
    assert hashes([FIRST]) == hashes([FIRST, SECOND])[:5] + hashes([FIRST])[5:]
    assert hashes([]) != base and hashes([])[:1] == base[:1]
    # the same image of which other rows stand there
    shifted = item(1, (2, 3), (2, 2), (5, 4))
    assert hashes([FIRST])[2] != hashes([shifted])[2]


def test_the_table_keeps_what_fits_and_drops_the_least_recently_used():
    cache = EncoderCache(10)
    names = [bytes([i]) * 32 for i in range(4)]
    assert [cache.add(name, 3, 0).first_row for name in names[:3]] == [0, 3, 6]
    assert cache.add(names[3], 3, 0) is None  # this step uses all others
    assert cache.find(names[0], 1).first_row == 0
    assert cache.add(names[3], 3, 1).first_row == 3
    assert cache.find(names[1], 1) is None and cache.find(names[2], 1).first_row == 6
    cache.clear()
    assert cache.num_used_rows == 0 and cache.add(names[0], 10, 1) is not None


def test_random_images_never_overlap():
    rng = random.Random(0)
    for _ in range(20):
        cache = EncoderCache(rng.randint(1, 40))
        for step in range(60):
            used = {}
            for _ in range(rng.randint(1, 4)):
                name = bytes([rng.randrange(9)]) * 32
                size = 1 + name[0]
                found = cache.find(name, step)
                if found is None and size <= cache.num_rows:
                    found = cache.add(name, size, step)
                    assert found is not None or used  # the first of a step has room
                if found is not None:
                    used[name] = found.first_row
            assert all(cache.peek(name).first_row == row for name, row in used.items())
            cache.check_integrity()


def test_what_was_reserved_for_a_step_without_rows_is_not_there():
    core = make_core(vision=VISION)
    planner = core.scheduler.images
    planner.begin_step(0)
    request = Request(asked(), max_model_len=100)
    assert planner.fit(request, 0, 15, 15) == 15 and planner.cache.num_used_rows == 10
    planner.begin_step(0)
    assert planner.cache.num_used_rows == 0
    assert core.observer.get_metrics()["num_images_encoded"] == 0


def test_a_prompt_without_chunks_has_room_for_all_its_images():
    settings = {"encoder_cache_tokens": 10, "max_encoder_tokens": 1}
    core = make_core(vision=VISION, enable_chunked_prefill=False, **settings)
    planner, other = core.scheduler.images, item(3, (3, 1), (0, 3))
    small = [item(2, (2, 2), (place, 4)) for place in (3, 0)]  # in the middle of the table
    large = item(1, (2, 3), (4, 6))
    for step, images in enumerate(([other, small[0]], [small[1], large])):
        planner.begin_step(step)
        end = images[-1].end
        prompt = [PLACEHOLDER] * end
        request = Request(asked(images, prompt=prompt), max_model_len=100)
        assert planner.fit(request, 0, end, end) == end
        request.slot = 0
        planner.place(SchedulerOutput(step, [], [], [], []), request, 0, end)
    late = Request(asked([other], prompt=[PLACEHOLDER] * 3), max_model_len=100)
    assert planner.fit(late, 0, 3, 3) == 0  # this step uses all rows
    planner.begin_step(2)
    assert planner.fit(late, 0, 3, 3) == 3
    planner.cache.check_integrity()


def test_sleep_and_a_reset_forget_encoded_images():
    core = make_core(vision=VISION, enable_prefix_caching=False)
    for count, between in enumerate((lambda: None, core.pausing.reset_prefix_cache), start=1):
        between()
        request = asked(name=f"{count}")
        core.add_request(request)
        (answer,) = run(core)[0].values()
        assert (answer.tokens, answer.reason, answer.stop_reason) == expected_output(
            read_prompt(request), request.sampling_params, [], core.config
        )
        assert core.observer.get_metrics()["num_images_encoded"] == 2 * count


def test_the_digest_depends_on_pixels_and_grid():
    pixels = FIRST.pixels
    changed = Array("u1", pixels.shape, bytes(pixels.data)[:-1] + b"\0")
    assert (
        len({digest_of(*one) for one in ((pixels, (2, 3)), (changed, (2, 3)), (pixels, (3, 2)))})
        == 3
    )
