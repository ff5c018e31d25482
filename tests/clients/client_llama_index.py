"""LlamaIndex's embeddings of a server with OpenAI's API, alone and in an index."""

import asyncio

from checks import run
from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai import OpenAIEmbedding

REQUIREMENTS = {"llama_index": "llama-index-embeddings-openai"}
DISTRIBUTION = "llama-index-embeddings-openai"


def embedding(address: str) -> OpenAIEmbedding:
    return OpenAIEmbedding(model_name="quire", api_base=f"{address}/v1", api_key="none")


def check_texts(address: str, _: str) -> None:
    model, texts = embedding(address), [f"text {i}" for i in range(150)]
    rows = model.get_text_embedding_batch(texts)
    assert len(rows) == 150 and abs(sum(x * x for x in rows[0]) - 1) < 1e-5
    assert model.get_query_embedding(texts[3]) == rows[3]
    assert asyncio.run(model.aget_text_embedding(texts[3])) == rows[3]


def check_an_index(address: str, _: str) -> None:
    texts = ["the cat sat on the mat", "a dog barks", "rain in the mountains"]
    documents = [Document(text=text) for text in texts]
    index = VectorStoreIndex.from_documents(documents, embed_model=embedding(address))
    [best] = index.as_retriever(similarity_top_k=1).retrieve("a dog barks")
    assert best.text == "a dog barks" and best.score > 0.999


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
