"""cohere's client, version 2 of its API: embeddings and reranking."""

import cohere
from checks import raises, run

REQUIREMENTS = {"cohere": "cohere"}
DISTRIBUTION = "cohere"


def client(address: str) -> cohere.ClientV2:
    return cohere.ClientV2(api_key="none", base_url=address)


def check_embed(address: str, _: str) -> None:
    answer = client(address).embed(
        model="quire",
        texts=["a cat", "a dog"],
        input_type="search_document",
        embedding_types=["float"],
    )
    first, second = answer.embeddings.float_
    assert len(first) == len(second) and abs(sum(x * x for x in first) - 1) < 1e-5
    assert answer.meta.billed_units.input_tokens > 0


def check_rerank(address: str, _: str) -> None:
    documents = ["a dog", "the cat sat", "a cat"]
    answer = client(address).rerank(model="quire", query="a cat", documents=documents, top_n=2)
    assert answer.results[0].index == 2 and len(answer.results) == 2
    assert answer.results[0].relevance_score > answer.results[1].relevance_score


def check_errors(address: str, _: str) -> None:
    error = raises(
        cohere.errors.BadRequestError,
        lambda: client(address).embed(
            model="quire", texts=["a"], input_type="classification", embedding_types=["int8"]
        ),
    )
    assert error.status_code == 400
    wrong = {"model": "nope", "query": "a", "documents": ["b"]}
    raises(cohere.errors.NotFoundError, lambda: client(address).rerank(**wrong))


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
