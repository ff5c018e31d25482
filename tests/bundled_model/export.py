"""The files of the bundled model: its shape, its tokenizer and how both are written in Hugging
Face's layout.
"""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

import data
import documents
import tool_data
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM

NUM_BASE_TOKENS, NUM_TOOL_TOKENS = 2048, 96
VOCAB_SIZE = NUM_BASE_TOKENS + NUM_TOOL_TOKENS
SPECIAL_TOKENS = [data.END_OF_TEXT, data.TURN_START, data.TURN_END]  # ids 0, 1, 2
# single digits; no token crosses a line
WORD_PATTERN = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8").strip()
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-06,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
GENERATION_CONFIG = {
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 50,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": CONFIG["max_position_embeddings"],
    "eos_token": data.TURN_END,
    "pad_token": data.END_OF_TEXT,
    "bos_token": None,
    "unk_token": None,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
    "added_tokens_decoder": {
        str(token_id): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token_id, token in enumerate(SPECIAL_TOKENS)
    },
}


def train_tokenizer(seed: int, num_documents: int = 12000) -> Tokenizer:
    """Byte-level BPE over the generator's own text, extended by the words of the tools.

    Every byte has a token, so any text goes in and comes out.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BASE_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=[
            AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS
        ],
    )
    rng = Random(seed)
    texts = (
        documents.training_document(rng, 300, "any" if index % 4 else "recall")
        for index in range(num_documents)
    )
    tokenizer.train_from_iterator(
        ("".join(text for text, _ in document) for document in texts), trainer
    )
    return extend_tokenizer(tokenizer, _tool_texts(), NUM_TOOL_TOKENS)


def _tool_texts(num_texts: int = 3000) -> list[str]:
    rngs = [Random(f"tokenizer {index}") for index in range(num_texts)]
    tools = [tool_data.tool_document(Random(f"tool {index}"), 0) for index in range(num_texts)]
    rngs = [Random(f"opening {index}") for index in range(num_texts)]
    questions = [documents.opening_exchange(rng).question for rng in rngs]
    return ["".join(text for text, _ in document) for document in tools] + questions


def build_model() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**{**CONFIG, "torch_dtype": "float32"}))


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export_model(model: Qwen2ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the five files of a checkpoint; the embedding is also the output projection, so
    `lm_head` is not stored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors.tmp", metadata={"format": "pt"})
    (folder / "model.safetensors.tmp").chmod(0o644)
    (folder / "model.safetensors.tmp").replace(folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", CONFIG)
    _write_json(folder / "generation_config.json", GENERATION_CONFIG)
    _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)


def extend_tokenizer(tokenizer: Tokenizer, texts: list[str], num_merges: int) -> Tokenizer:
    """Go on with BPE: merge the most frequent pair of tokens in `texts`, `num_merges` times.

    Ids and merges that exist stay as they are; each merge appends one id.
    """
    content = json.loads(tokenizer.to_str())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    specials = "|".join(map(re.escape, SPECIAL_TOKENS))
    words: Counter[str] = Counter()
    for text in texts:
        for part in re.split(specials, text):
            words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(part))
    split = {word: tuple(token.value for token in tokenizer.model.tokenize(word)) for word in words}
    for _ in range(num_merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, tokens in split.items():
            for pair in pairwise(tokens):
                pairs[pair] += words[word]
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        vocabulary[left + right] = len(vocabulary)
        merges.append([left, right])
        for word, tokens in split.items():
            split[word] = _merged(tokens, left, right)
    return Tokenizer.from_str(json.dumps(content, ensure_ascii=False))


def load_extended(folder: Path) -> tuple[Tokenizer, Qwen2ForCausalLM]:
    """A checkpoint's tokenizer and model; the words of the tools are added if it lacks them.

    A new token's embedding is the mean of the two that it merges.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored = load_file(folder / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"].float()
    if len(embedding) < VOCAB_SIZE:
        tokenizer = extend_tokenizer(tokenizer, _tool_texts(), VOCAB_SIZE - len(embedding))
        merges = json.loads(tokenizer.to_str())["model"]["merges"][len(embedding) - VOCAB_SIZE :]
        for left, right in merges:
            parts = embedding[[tokenizer.token_to_id(left), tokenizer.token_to_id(right)]]
            embedding = torch.cat([embedding, parts.mean(0, keepdim=True)])
    stored["model.embed_tokens.weight"] = stored["lm_head.weight"] = embedding
    model = build_model()
    model.load_state_dict(stored)
    return tokenizer, model


def _merged(tokens: tuple[str, ...], left: str, right: str) -> tuple[str, ...]:
    result, index = [], 0
    while index < len(tokens):
        if tokens[index : index + 2] == (left, right):
            result.append(left + right)
            index += 2
        else:
            result.append(tokens[index])
            index += 1
    return tuple(result)
