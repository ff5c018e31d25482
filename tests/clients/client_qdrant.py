"""examples/vector_store.py, with fewer texts: a qdrant store is filled over HTTP and searched."""

import importlib.util
from pathlib import Path

import httpx
from checks import run
from qdrant_client import QdrantClient

REQUIREMENTS = {"qdrant": "qdrant-client numpy"}
DISTRIBUTION = "qdrant-client"

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vector_store.py"
spec = importlib.util.spec_from_file_location("vector_store", EXAMPLE)
vector_store = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vector_store)


def check_vector_store(address: str, _: str) -> None:
    store, number = QdrantClient(":memory:"), 600
    with httpx.Client(base_url=address, timeout=60) as client:
        vector_store.fill(client, store, number)
        assert store.count("texts").count == number
        for index in (0, 299, number - 1):
            points = vector_store.search(client, store, vector_store.text(index), 3)
            assert points[0].id == index and points[0].score > 0.999
            assert points[0].score >= points[1].score >= points[2].score


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
