"""ResponseStore: eviction, the share of each owner, and the items by id."""

import pytest
from quire.frontend.server.apis.responses_items import Item
from quire.frontend.server.response_store import ITEM_BYTES, ResponseStore, Stored


def stored(response_id: str, text: str = "", **ids: str) -> Stored:
    """`ids`: of further input items, with their texts."""
    return Stored(
        {"id": response_id, "output": []},
        [Item(id=f"in_{response_id}"), *(Item(id=name, content=ids[name]) for name in ids)],
        [Item(id=f"out_{response_id}", content=text)],
    )


def kept(store: ResponseStore, tenant: str, ids: str) -> str:
    return "".join(name for name in ids if store.get(tenant, name) is not None)


def test_the_oldest_are_dropped_first() -> None:
    store = ResponseStore(2)
    for response_id in "abc":
        store.put("", stored(response_id))
    assert len(store) == 2 and kept(store, "", "abc") == "bc"


def test_bytes_are_bounded_too() -> None:
    store = ResponseStore(100, max_bytes=10 * (1000 + 2 * ITEM_BYTES))
    for i in range(50):
        store.put("", stored(str(i), "x" * 1000))
    assert 5 <= len(store) <= 9 and store.get("", "49") is not None
    store.put("", stored("too large", "x" * 100_000))
    assert len(store) == 0
    store.put("", stored("fits"))
    assert store.get("", "fits") is not None


def test_removing_a_response_frees_its_bytes() -> None:
    store = ResponseStore(100, max_bytes=2 * (1500 + 2 * ITEM_BYTES))
    for i in range(20):
        store.put("", stored(str(i), "x" * 1000))
        assert store.pop("", str(i)) is not None and store.pop("", str(i)) is None
    store.put("", stored("a", "x" * 1000))
    store.put("", stored("b", "x" * 1000))
    assert len(store) == 2


@pytest.mark.parametrize(
    "limits",
    [{"most": 4}, {"most": 100, "max_bytes": 4 * (1100 + 2 * ITEM_BYTES)}],
    ids=["by count", "by bytes"],
)
def test_an_owner_above_its_share_evicts_its_own_responses(limits: dict[str, int]) -> None:
    store = ResponseStore(**limits)

    def put(tenant: str, response_id: str) -> None:
        store.put(tenant, stored(response_id, "x" * 1000))

    for name in "abcd":
        put("large", name)
    assert kept(store, "large", "abcd") == "abcd"  # a tenant alone may use everything
    put("small", "e")
    put("small", "f")
    assert (kept(store, "large", "abcd"), kept(store, "small", "ef")) == ("cd", "ef")
    for name in "ghi":
        put("large", name)
    assert (kept(store, "large", "abcdghi"), kept(store, "small", "ef")) == ("hi", "ef")
    put("third", "j")
    assert kept(store, "third", "j") == "j" and len(store) == 4


def test_a_response_is_found_only_by_its_owner() -> None:
    store = ResponseStore(9)
    store.put("me", stored("a"))
    assert (
        store.get("you", "a") is None
        and store.pop("you", "a") is None
        and store.find_item("you", "out_a") is None
    )
    assert store.find_item("me", "out_a") == Item(id="out_a", content="")
    assert store.find_item("me", "in_a") == Item(id="in_a")
    assert store.find_item("me", "in_b") is None


def test_an_item_is_that_of_the_latest_response_that_has_it() -> None:
    store = ResponseStore(2)
    store.put("", stored("a", same="first"))
    store.put("", stored("b", same="second"))
    assert store.find_item("", "same").content == "second"
    store.pop("", "b")
    assert store.find_item("", "same").content == "first"
    store.put("", stored("c"))
    store.put("", stored("d"))  # evicts a
    assert store.find_item("", "same") is None


def test_what_has_the_same_id_is_replaced() -> None:
    store = ResponseStore(9, max_bytes=4 * (1100 + 3 * ITEM_BYTES))
    for number in range(20):
        store.put("", stored("a", "x" * 1000, **{f"item_{number}": "", "same": str(number)}))
        store.put("", stored("b"))
    assert len(store) == 2 and store.find_item("", "same").content == "19"
    assert store.find_item("", "item_18") is None and store.find_item("", "item_19") is not None
    store.pop("", "a")
    assert store.find_item("", "same") is None


def test_with_a_size_of_zero_nothing_is_stored() -> None:
    store = ResponseStore(0)
    store.put("", stored("a"))
    assert not store.keeps and len(store) == 0 and store.find_item("", "in_a") is None
