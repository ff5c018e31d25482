"""Which rows of encoded images the tokens of a step read, and where their tokens are."""

import random

import numpy as np
from quire.executor.runner.image_table import ImageTable, no_images
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import ImagePlace, NewRequestData, SchedulerOutput

PLACES = [ImagePlace(3, 9, 2, 3), ImagePlace(9, 13, 4, 1), ImagePlace(20, 21, 1, 1)]
# of PLACES: (time, row, column) of each of the first 23 tokens, as transformers' Qwen2-VL counts
COMPONENTS = [
    *((i, i, i) for i in range(3)),
    *((3, 3 + i, 3 + j) for i in range(2) for j in range(3)),
    *((6, 6 + i, 6) for i in range(4)),
    *((10 + i,) * 3 for i in range(10)),
]


def table(has_components=True, sees_whole=True) -> ImageTable:
    made = ImageTable(has_components, sees_whole)
    new = NewRequestData(2, "r", [0] * 23, 23, SamplingParams(seed=0), images=PLACES)
    made.apply(SchedulerOutput(0, new_requests=[new]))
    return made


def columns(made: ImageTable, slots, firsts, counts):
    return made.columns(*(np.array(one, np.int64) for one in (slots, firsts, counts)))


def test_tokens_have_the_components_of_their_images():
    found = columns(table(), [2], [0], [23])
    positions = np.arange(23)
    assert (found.offsets + positions).T.tolist() == [*map(list, COMPONENTS)]
    ends = {place.start + i: place.end for place in PLACES for i in range(place.end - place.start)}
    assert found.later.tolist() == [ends.get(i, i + 1) - i - 1 for i in range(23)]


def test_a_part_has_what_the_whole_has_and_output_follows_the_last_image():
    made, rng = table(), random.Random(0)
    whole = columns(made, [2], [0], [40])
    assert (whole.offsets[:, 21:] == whole.offsets[0, 22]).all() and not whole.later[21:].any()
    for _ in range(50):
        first, count = rng.randrange(39), rng.randint(1, 8)
        count = min(count, 40 - first)
        part = columns(made, [1, 2, 0], [5, first, 7], [3, count, 1])
        for name in ("offsets", "later"):
            own, expected = getattr(part, name), getattr(whole, name)
            assert (own[..., 3 : 3 + count] == expected[..., first : first + count]).all()
            assert not own[..., :3].any() and not own[..., 3 + count :].any()


def test_models_with_one_component_have_no_offsets_and_causal_ones_see_nothing_later():
    found = columns(table(has_components=False, sees_whole=False), [2], [0], [23])
    assert not found.offsets.any() and not found.later.any()


def test_rows_are_those_of_this_step():
    made = table()
    made.apply(SchedulerOutput(1, image_rows=[(2, 3, 6, 40), (2, 9, 2, 7)]))
    assert columns(made, [0, 2], [4, 2], [1, 9]).rows.tolist() == [
        *(-1, -1),
        *range(40, 46),
        *(7, 8),
    ]
    # a later pass of the step computes tokens behind them
    assert columns(made, [2], [11], [1]).rows.tolist() == [-1]
    made.apply(SchedulerOutput(2))
    assert columns(made, [2], [3], [2]).rows.tolist() == [-1, -1]
    made.apply(SchedulerOutput(3, freed_slots=[2]))
    assert not columns(made, [2], [3], [6]).offsets.any()


def test_texts_read_no_rows():
    found = no_images(5)
    assert found.rows.tolist() == [-1] * 5
    assert found.offsets.shape == (3, 5) and not found.offsets.any() and not found.later.any()
