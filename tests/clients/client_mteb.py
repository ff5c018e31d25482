"""MTEB's runner with an encoder that asks a server with OpenAI's API. The tasks are defined here:
nothing is downloaded.
"""

from typing import Any

import mteb
import numpy as np
import openai
from checks import run
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta
from mteb.types import PromptType

REQUIREMENTS = {"mteb": "mteb openai"}
DISTRIBUTION = "mteb"
PROMPTS = {"query": "Answer this question: ", "document": "A passage: "}

PAIRS = [  # two sentences, and how much they mean the same, 0 to 5
    ("A cat sits on the mat.", "A cat sits on the mat.", 5.0),
    ("A man plays a guitar.", "A man is playing the guitar.", 4.8),
    ("The train was late again.", "Once more the train did not come on time.", 4.2),
    ("She cooked soup for dinner.", "She made a meal in the evening.", 3.4),
    ("Children play football in the park.", "Some boys are running on a field.", 2.8),
    ("A dog barks at the postman.", "A dog sleeps in its basket.", 1.8),
    ("It rains in the mountains.", "The weather in the city is hot.", 1.4),
    ("The bank raised its interest rates.", "A woman cuts an onion.", 0.0),
]
DOCUMENTS = [
    "Penguins are birds that cannot fly; most of them live in the southern hemisphere.",
    "Bread rises because yeast turns sugar into carbon dioxide.",
    "The Danube flows from the Black Forest to the Black Sea.",
    "A violin has four strings, tuned in fifths.",
    "Vaccines train the immune system to recognize a virus.",
    "The first people landed on the Moon in July 1969.",
    "A chess game ends when a king is checkmated or the players agree on a draw.",
    "Glaciers shrink when more ice melts in summer than snow falls in winter.",
]
OTHERS = [  # documents that answer no query
    "Ostriches run on the ground and use their wings to keep their balance.",
    "Dough is kneaded by hand or by a machine.",
    "A guitar has six strings.",
    "In winter the mountain roads are covered with ice and closed.",
]
QUERIES = [
    "Which animal has wings but stays on the ground?",
    "What makes dough grow?",
    "Where does this river end?",
    "How many strings does this instrument have?",
    "How does a shot protect against disease?",
    "When did astronauts walk on the Moon?",
    "How does one win this board game?",
    "Why does ice in the mountains disappear?",
]


def metadata(name: str, kind: str, main_score: str) -> TaskMetadata:
    return TaskMetadata(
        name=name,
        description="A task of this test.",
        dataset={"path": "none/none", "revision": "1"},
        type=kind,
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )


class Similarity(AbsTaskSTS):
    metadata = metadata("QuireSimilarity", "STS", "cosine_spearman")

    def load_data(self, num_proc: int | None = None, **_: Any) -> None:
        columns = zip(("sentence1", "sentence2", "score"), zip(*PAIRS, strict=True), strict=True)
        self.dataset = {"test": Dataset.from_dict({name: list(rows) for name, rows in columns})}
        self.data_loaded = True


class Questions(AbsTaskRetrieval):
    """Query `i` is answered by document `i`."""

    metadata = metadata("QuireQuestions", "Retrieval", "ndcg_at_10")
    texts = QUERIES

    def load_data(self, num_proc: int | None = None, **_: Any) -> None:
        number = range(len(DOCUMENTS))
        texts = DOCUMENTS + OTHERS
        documents = {"id": [f"d{i}" for i in range(len(texts))], "text": texts}
        queries = {"id": [f"q{i}" for i in number], "text": self.texts}
        split = {
            "corpus": Dataset.from_dict(documents),
            "queries": Dataset.from_dict(queries),
            "relevant_docs": {f"q{i}": {f"d{i}": 1} for i in number},
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


class Copies(Questions):
    """The queries are the documents themselves, in the same order."""

    metadata = metadata("QuireCopies", "Retrieval", "ndcg_at_10")
    texts = DOCUMENTS


class QuireEncoder(AbsEncoder):
    """An encoder for mteb.evaluate. `prompts` are put in front of the texts; their keys are those
    of MTEB: a task, a type of task, or "query" and "document".
    """

    def __init__(self, address: str, prompts: dict[str, str] | None = None) -> None:
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        self.model_prompts = prompts
        self.mteb_model_meta = ModelMeta.create_empty({"name": "quire/quire", "revision": "1"})
        self.calls: list[tuple[PromptType | None, list[str], np.ndarray]] = []

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return f4 [number of texts, size]."""
        answer = self.client.embeddings.create(model="quire", input=texts)
        return np.array([entry.embedding for entry in answer.data], np.float32)

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """One HTTP request for each batch of MTEB, so that batch_size is that of encode_kwargs."""
        name = self.get_prompt_name(task_metadata, prompt_type)
        prompt = self.model_prompts[name] if name else ""
        batches = [list(batch["text"]) for batch in inputs]
        rows = np.concatenate([self.embed([prompt + text for text in batch]) for batch in batches])
        self.calls.append((prompt_type, [text for batch in batches for text in batch], rows))
        return rows


def scores(model: Any, batch_size: int = 32) -> dict[str, dict[str, float]]:
    """Return the scores of each task, by the name of the task."""
    result = mteb.evaluate(
        model,
        [Similarity(), Questions(), Copies()],
        cache=None,
        co2_tracker=False,
        show_progress_bar=False,
        encode_kwargs={"batch_size": batch_size, "show_progress_bar": False},
    )
    return {one.task_name: one.scores["test"][0] for one in result.task_results}


def check_scores(address: str, _: str) -> None:
    found = scores(QuireEncoder(address))
    similarity, questions = found["QuireSimilarity"], found["QuireQuestions"]
    for kind in ("cosine", "euclidean", "manhattan"):
        assert 0.2 < abs(similarity[f"{kind}_spearman"]) <= 1
        assert 0.2 < abs(similarity[f"{kind}_pearson"]) <= 1
    for name in ("ndcg_at_10", "map_at_10", "recall_at_1", "mrr_at_10"):
        assert 0 <= questions[name] <= 1
    assert questions["recall_at_20"] == 1  # there are fewer than twenty documents
    assert found["QuireCopies"]["ndcg_at_1"] == found["QuireCopies"]["main_score"] == 1


def check_the_same_in_two_runs_and_in_other_batches(address: str, _: str) -> None:
    found = scores(QuireEncoder(address))
    for batch_size in (32, 3):
        again = scores(QuireEncoder(address), batch_size)
        for task, values in found.items():
            np.testing.assert_equal(again[task], values)


def check_prompts_of_queries_and_documents(address: str, _: str) -> None:
    encoder = QuireEncoder(address, PROMPTS)
    plain, prompted = scores(QuireEncoder(address)), scores(encoder)
    assert prompted["QuireSimilarity"] == plain["QuireSimilarity"]  # it has neither
    seen = {}
    for prompt_type, texts, rows in encoder.calls:
        prompt = PROMPTS[prompt_type.value] if prompt_type else ""
        assert np.array_equal(rows, encoder.embed([prompt + text for text in texts]))
        assert bool(prompt) != np.array_equal(rows, encoder.embed(texts))
        seen.setdefault(prompt, []).append(texts)
    assert sorted(seen) == sorted(["", *PROMPTS.values()])
    assert seen[PROMPTS["query"]] == [QUERIES, DOCUMENTS]
    assert seen[PROMPTS["document"]] == [DOCUMENTS + OTHERS] * 2


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
