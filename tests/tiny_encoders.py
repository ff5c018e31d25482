"""Tiny random text encoders and classifiers, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.tests.tiny_models import KINDS, make_tiny_config, save_tiny_tokenizer

VOCAB_SIZE = 320
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "pad_token_id": 0,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _SIZES,
    "roberta": _SIZES | {"type_vocab_size": 1, "max_position_embeddings": 258, "pad_token_id": 1},
    "xlm-roberta": _SIZES | {"type_vocab_size": 2, "pad_token_id": 3, "hidden_act": "gelu_new"},
    "camembert": _SIZES | {"type_vocab_size": 1, "pad_token_id": 1},
    "mpnet": _SIZES | {"pad_token_id": 1},
    "distilbert": {
        "vocab_size": VOCAB_SIZE,
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 96,
        "activation": "relu",
    },
    "modernbert": _SIZES | {"local_attention": 16, "norm_bias": True},
    "nomic_bert": _SIZES,
}
EMBEDDING_GEMMA = {"use_bidirectional_attention": True, "architectures": ["Gemma3TextModel"]}


def save_tiny_encoder(
    directory: str | Path, kind: str, auto: str = "AutoModel", seed: int = 0, **overrides: Any
) -> Path:
    """Writes config.json, weights and a tokenizer. `auto`: the class of transformers that chooses
    the model, such as AutoModelForSequenceClassification; `overrides`: keys of config.json.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    if kind in KINDS:
        config = make_tiny_config(kind, **overrides)
    else:
        sizes = ENCODERS.get(kind, _SIZES)
        config = transformers.AutoConfig.for_model(kind, **{**sizes, **overrides})
    model = getattr(transformers, auto).from_config(config)
    randomize(model, seed)
    model.save_pretrained(directory)
    save_tiny_tokenizer(directory)
    return Path(directory)


def randomize(model: Any, seed: int) -> None:
    """Norms around 1, biases around 0, everything else so that layers keep the size of their
    input.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                is_scale = "norm" in name.lower() and name.endswith("weight")
                parameter.copy_(is_scale + 0.2 * noise)
            elif "embed" in name or "relative" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def save_word_piece(directory: Path, texts: list[str], kind: str = "uncased") -> Any:
    """Writes a tokenizer.json as BERT's are, trained on `texts`, and returns the tokenizer. `kind`:
    "uncased", "cased", or "accents", which makes texts lower case and leaves their accents.
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    strip = False if kind == "accents" else None
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=kind != "cased", strip_accents=strip
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, show_progress=False, limit_alphabet=150
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer
