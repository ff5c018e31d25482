"""ResponseStore: what goes when it is full, and whose answers are whose."""

from quire.frontend.server.apis.response_store import ResponseStore, Stored


def stored(response_id: str, text: str = "") -> Stored:
    return Stored(
        {"id": response_id, "output": [{"id": f"out_{response_id}", "text": text}]},
        [{"id": f"in_{response_id}"}],
    )


def test_the_oldest_go_first() -> None:
    store = ResponseStore(2)
    for response_id in "abc":
        store.put("", stored(response_id))
    assert len(store) == 2 and store.get("", "a") is None and store.get("", "c") is not None


def test_bytes_are_bounded_too() -> None:
    store = ResponseStore(100, max_bytes=10_000)
    for i in range(50):
        store.put("", stored(str(i), "x" * 1000))
    assert 5 <= len(store) <= 9 and store.get("", "49") is not None
    store.put("", stored("too large", "x" * 20_000))
    assert len(store) == 0
    store.put("", stored("fits"))
    assert store.get("", "fits") is not None


def test_what_is_taken_out_frees_its_bytes() -> None:
    store = ResponseStore(100, max_bytes=3000)
    for i in range(20):
        store.put("", stored(str(i), "x" * 1000))
        assert store.pop("", str(i)) is not None and store.pop("", str(i)) is None
    store.put("", stored("a", "x" * 1000))
    store.put("", stored("b", "x" * 1000))
    assert len(store) == 2


def test_an_answer_is_found_only_by_whom_it_was_made_for() -> None:
    store = ResponseStore(9)
    store.put("me", stored("a"))
    assert (
        store.get("you", "a") is None
        and store.pop("you", "a") is None
        and store.find_item("you", "out_a") is None
    )
    assert store.find_item("me", "out_a") == {"id": "out_a", "text": ""} and store.find_item(
        "me", "in_a"
    ) == {"id": "in_a"}


def test_without_room_nothing_is_kept() -> None:
    store = ResponseStore(0)
    store.put("", stored("a"))
    assert not store.keeps and len(store) == 0
