"""The files of the bundled model: its shape, its tokenizer and how both are written in Hugging
Face's layout.
"""

import json
from pathlib import Path
from random import Random

import data
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB_SIZE = 2048
SPECIAL_TOKENS = [data.END_OF_TEXT, data.TURN_START, data.TURN_END]  # ids 0, 1, 2
# single digits; no token crosses a line
WORD_PATTERN = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
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
    """Byte-level BPE over the generator's own text; every byte has a token, so any text goes in and
    comes out.
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
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=[
            AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS
        ],
    )
    rng = Random(seed)
    documents = (
        data.training_document(rng, 300, "any" if index % 4 else "recall")
        for index in range(num_documents)
    )
    tokenizer.train_from_iterator(
        ("".join(text for text, _ in document) for document in documents), trainer
    )
    return tokenizer


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
