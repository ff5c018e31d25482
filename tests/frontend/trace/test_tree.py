"""The tree's form, against a file."""

from pathlib import Path

from quire.frontend.trace.tree import REASONS, _row, experts_line, sentence
from quire.ipc.trace import Row
from quire.tests.frontend.trace.made import made

GOLDEN = Path(__file__).with_name("tree.txt")


def test_the_form_of_the_tree():
    assert made().tree(width=190) == GOLDEN.read_text()


def test_a_narrow_terminal_shows_fewer_columns():
    text = made().tree(width=110)
    assert "median" in text and "max µs" not in text and "blocks.py:7" not in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_the_text_names_the_kernel_that_dominates():
    trace = made()
    entry = max(trace.kernels(), key=lambda one: one.total_s)
    text = sentence(entry, 2 * entry.total_s)
    assert text == (
        "most time: layers[i].mlp.down_proj (linear), 50% of execute_model, at 40% of the limit "
        "that memory bandwidth sets"
    )


def test_a_trace_without_steps_says_so():
    trace = made()
    trace.engine.steps.clear()
    assert "no step was made" in trace.tree()


def test_every_reason_is_explained():
    from quire.ipc.trace import Waiting

    assert all(f'"{reason}"' in Waiting.__doc__ for reason in REASONS)


def test_rows_of_experts_are_one_line():
    line = experts_line({0: [4, 0, 0, 0], 1: [1, 1, 1, 1], 5: [2, 2, 0, 0]})
    assert line == (
        "experts of 3 layers: 0 to 4 rows each, median 1; 1 to 4 of 4 read per layer; imbalance "
        "1.0 to 4.0, median 2.0"
    )


def test_a_row_says_how_many_drafts_held():
    drafted = Row("a", 1, 8, 7, 9, False, 0, 0, num_ahead=3)
    assert "8 to 8 of 9 known and 3 of at most 7 more;" in _row(drafted)
    ahead = Row("a", 1, 8, 7, 9, False, 0, 0, num_ahead=7)
    assert "8 to 8 of 9 known and 7 more;" in _row(ahead)
    assert "known;" in _row(Row("a", 1, 8, 0, 9, False, 0, 0))
