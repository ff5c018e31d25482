"""Fills a local vector store (qdrant, in this process) with embeddings from a server, and searches.

pip install qdrant-client numpy
quire serve sentence-transformers/all-MiniLM-L6-v2 --port 8000
python examples/vector_store.py http://127.0.0.1:8000 20000
"""

import base64
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
from qdrant_client import QdrantClient, models

BATCH = 256  # texts of one HTTP request; a few requests at once keep the engine busy
SUBJECTS = ("The cat", "A small dog", "My neighbour", "The old captain", "Nobody", "The new engine")
DEEDS = ("sleeps on", "looks for", "paints", "forgets", "repairs", "dreams of", "sings about")
THINGS = ("a red bicycle", "the harbour", "cold soup", "a letter", "the moon", "broken clocks")


def text(number: int) -> str:
    """A sentence for each number."""
    rest, subject = divmod(number, len(SUBJECTS))
    rest, deed = divmod(rest, len(DEEDS))
    rest, thing = divmod(rest, len(THINGS))
    return f"{SUBJECTS[subject]} {DEEDS[deed]} {THINGS[thing]} on day {rest + 1}."


def embed(client: httpx.Client, texts: list[str]) -> np.ndarray:
    """f4 [number of texts, size]. base64 is smaller than numbers in JSON, and faster to read."""
    answer = client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
    answer.raise_for_status()
    rows = [base64.b64decode(entry["embedding"]) for entry in answer.json()["data"]]
    return np.frombuffer(b"".join(rows), "<f4").reshape(len(texts), -1)


def fill(client: httpx.Client, store: QdrantClient, number: int) -> None:
    starts = range(0, number, BATCH)
    batches = [[text(i) for i in range(start, min(start + BATCH, number))] for start in starts]
    size = embed(client, batches[0][:1]).shape[1]
    vectors = models.VectorParams(size=size, distance=models.Distance.COSINE)
    store.create_collection("texts", vectors_config=vectors)
    with ThreadPoolExecutor(4) as threads:
        rows = threads.map(lambda batch: embed(client, batch), batches)
        for start, batch, found in zip(starts, batches, rows, strict=True):
            store.upload_collection(
                "texts",
                vectors=found,
                payload=[{"text": one} for one in batch],
                ids=range(start, start + len(batch)),
            )


def search(client: httpx.Client, store: QdrantClient, query: str, limit: int) -> list:
    [vector] = embed(client, [query])
    return store.query_points("texts", query=vector, limit=limit).points


def main(address: str, number: int) -> None:
    store = QdrantClient(":memory:")
    with httpx.Client(base_url=address, timeout=600) as client:
        began = time.perf_counter()
        fill(client, store, number)
        seconds = time.perf_counter() - began
        count = store.count("texts").count
        print(f"{count} texts in {seconds:.1f} s ({count / seconds:.0f} texts/s)")
        for query in (text(number // 2), "a pet takes a nap"):
            began = time.perf_counter()
            points = search(client, store, query, 3)
            print(f"{query!r}, {1000 * (time.perf_counter() - began):.1f} ms")
            for point in points:
                print(f"  {point.score:.3f} {point.payload['text']}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20_000)
