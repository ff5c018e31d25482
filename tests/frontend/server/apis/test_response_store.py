"""ResponseStore: eviction, and the owner of each response."""

from quire.frontend.server.apis.response_store import ResponseStore, Stored


def stored(response_id: str, text: str = "") -> Stored:
    return Stored(
        {"id": response_id, "output": [{"id": f"out_{response_id}", "text": text}]},
        [{"id": f"in_{response_id}"}],
    )


def test_the_oldest_are_dropped_first() -> None:
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


def test_removing_a_response_frees_its_bytes() -> None:
    store = ResponseStore(100, max_bytes=3000)
    for i in range(20):
        store.put("", stored(str(i), "x" * 1000))
        assert store.pop("", str(i)) is not None and store.pop("", str(i)) is None
    store.put("", stored("a", "x" * 1000))
    store.put("", stored("b", "x" * 1000))
    assert len(store) == 2


def test_a_response_is_found_only_by_its_owner() -> None:
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


def test_with_a_size_of_zero_nothing_is_stored() -> None:
    store = ResponseStore(0)
    store.put("", stored("a"))
    assert not store.keeps and len(store) == 0
