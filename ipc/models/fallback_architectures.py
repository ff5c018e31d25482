"""The architectures that run in transformers' modelling code, those that cannot and why, and which
implementation a model gets.

Must not know: tensors, layers, torch, transformers. tests/executor/models/fallback/ compares the
tables with the installed transformers and runs a model of each type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..errors import ModelLoadError
from .architectures import ARCHITECTURES, NATIVE, find_architecture
from .config_values import integer
from .decoder_config import DecoderConfig, most_of
from .encoder_config import EncoderConfig
from .encoders import FALLBACK_ENCODERS, is_fallback_encoder, parse_fallback_encoder
from .quantization_config import parse_quantization
from .rope_config import SLIDING

QUIRE, TRANSFORMERS = "quire", "transformers"

_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
# it repeats keys for the experts that a query chooses, before attention
_JETMOE = {"head_dim": "kv_channels", "num_key_value_heads": "num_attention_heads"}


class Fallback(msgspec.Struct, frozen=True):
    """How a model type's config.json is read where it differs from most.

    keys: names of config.json for ours. head_dim, kv_heads: where config.json does not say; None:
    hidden_size / num_attention_heads, num_attention_heads.
    """

    architecture: str
    head_dim: int | None = None
    kv_heads: int | None = None
    keys: Mapping[str, str] = {}


FALLBACKS = {
    "afmoe": Fallback("AfmoeForCausalLM", head_dim=128),
    "apertus": Fallback("ApertusForCausalLM"),
    "apertus1p5_text": Fallback("Apertus1p5TextForCausalLM"),
    "arcee": Fallback("ArceeForCausalLM"),
    "aria_text": Fallback("AriaTextForCausalLM"),
    "beam": Fallback("BeamForCausalLM", head_dim=128, kv_heads=8),
    "bitnet": Fallback("BitNetForCausalLM", kv_heads=5),
    "cohere": Fallback("CohereForCausalLM"),
    "cohere2": Fallback("Cohere2ForCausalLM"),
    "cohere2_moe": Fallback("Cohere2MoeForCausalLM", head_dim=128),
    "ctrl": Fallback("CTRLLMHeadModel", keys=_GPT2),
    "cwm": Fallback("CwmForCausalLM", head_dim=128, kv_heads=8),
    "dots1": Fallback("Dots1ForCausalLM", kv_heads=32),
    "ernie4_5": Fallback("Ernie4_5ForCausalLM", head_dim=128, kv_heads=2),
    "ernie4_5_moe": Fallback("Ernie4_5_MoeForCausalLM", kv_heads=4),
    "exaone": Fallback("LlamaForCausalLM", kv_heads=8),
    "exaone4": Fallback("Exaone4ForCausalLM", kv_heads=32),
    "exaone_moe": Fallback("ExaoneMoeForCausalLM", kv_heads=32),
    "flex_olmo": Fallback("FlexOlmoForCausalLM"),
    "flint": Fallback("FlintForCausalLM", head_dim=128, kv_heads=4),
    "gemma": Fallback("GemmaForCausalLM", head_dim=256, kv_heads=16),
    "gemma2": Fallback("Gemma2ForCausalLM", head_dim=256, kv_heads=4),
    "gemma3_text": Fallback("Gemma3ForCausalLM", head_dim=256, kv_heads=4),
    "glm": Fallback("GlmForCausalLM", head_dim=128, kv_heads=2),
    "glm4": Fallback("Glm4ForCausalLM", head_dim=128, kv_heads=2),
    "glm4_moe": Fallback("Glm4MoeForCausalLM", kv_heads=8),
    "gpt-sw3": Fallback("GPT2LMHeadModel", keys=_GPT2),
    "gpt2": Fallback("GPT2LMHeadModel", keys=_GPT2),
    "gpt_bigcode": Fallback("GPTBigCodeForCausalLM", keys=_GPT2),
    "gpt_neox": Fallback("GPTNeoXForCausalLM"),
    "gpt_oss": Fallback("GptOssForCausalLM", head_dim=64, kv_heads=8),
    "granite": Fallback("GraniteForCausalLM"),
    "granite_swa": Fallback("GraniteSWAForCausalLM", kv_heads=4),
    "granitemoe": Fallback("GraniteMoeForCausalLM"),
    "granitemoe_swa": Fallback("GraniteMoeSWAForCausalLM"),
    "granitemoeshared": Fallback("GraniteMoeSharedForCausalLM"),
    "helium": Fallback("HeliumForCausalLM", head_dim=128, kv_heads=20),
    "hunyuan_v1_dense": Fallback("HunYuanDenseV1ForCausalLM"),
    "hunyuan_v1_moe": Fallback("HunYuanMoEV1ForCausalLM"),
    "hy_v3": Fallback("HYV3ForCausalLM", head_dim=128, kv_heads=8),
    "hyperclovax": Fallback("HyperCLOVAXForCausalLM"),
    "internlm3": Fallback("LlamaForCausalLM", head_dim=128, kv_heads=2),
    "iquestcoder": Fallback("LlamaForCausalLM", head_dim=128, kv_heads=8),
    "jais2": Fallback("Jais2ForCausalLM"),
    "jetmoe": Fallback("JetMoeForCausalLM", head_dim=128, keys=_JETMOE),
    "kolibri1": Fallback("Kolibri1ForCausalLM", head_dim=128, kv_heads=4),
    "laguna": Fallback("LagunaForCausalLM", head_dim=128, kv_heads=8),
    "llama": Fallback("LlamaForCausalLM"),
    "mellum": Fallback("MellumForCausalLM", head_dim=128, kv_heads=4),
    "minimax_m2": Fallback("MiniMaxM2ForCausalLM", head_dim=128, kv_heads=8),
    "minimax_m3_vl_text": Fallback("MiniMaxM3VLForCausalLM", head_dim=128, kv_heads=4),
    "ministral": Fallback("MinistralForCausalLM", kv_heads=8),
    "ministral3": Fallback("Ministral3ForCausalLM", head_dim=128, kv_heads=8),
    "mistral": Fallback("MistralForCausalLM", kv_heads=8),
    "mixtral": Fallback("MixtralForCausalLM", kv_heads=8),
    "modernbert-decoder": Fallback("ModernBertDecoderForCausalLM"),
    "nanochat": Fallback("NanoChatForCausalLM"),
    "nemotron": Fallback("NemotronForCausalLM"),
    "olmo": Fallback("OlmoForCausalLM"),
    "olmo2": Fallback("Olmo2ForCausalLM"),
    "olmo3": Fallback("Olmo3ForCausalLM"),
    "olmoe": Fallback("OlmoeForCausalLM"),
    "opt": Fallback("OPTForCausalLM"),
    "persimmon": Fallback("PersimmonForCausalLM"),
    "phi": Fallback("PhiForCausalLM"),
    "phi3": Fallback("Phi3ForCausalLM"),
    "phimoe": Fallback("PhimoeForCausalLM", kv_heads=8),
    "qwen2": Fallback("Qwen2ForCausalLM", kv_heads=32),
    "qwen2_moe": Fallback("Qwen2MoeForCausalLM", kv_heads=16),
    "qwen3": Fallback("Qwen3ForCausalLM", head_dim=128, kv_heads=32),
    "qwen3_moe": Fallback("Qwen3MoeForCausalLM", kv_heads=4),
    "sarvam_moe": Fallback("Glm4MoeForCausalLM", head_dim=64, kv_heads=4),
    "seed_oss": Fallback("SeedOssForCausalLM", head_dim=128, kv_heads=8),
    "smollm3": Fallback("SmolLM3ForCausalLM", kv_heads=4),
    "solar_open": Fallback("SolarOpenForCausalLM", head_dim=128, kv_heads=8),
    "starcoder2": Fallback("Starcoder2ForCausalLM", kv_heads=2),
    "vaultgemma": Fallback("VaultGemmaForCausalLM", head_dim=256, kv_heads=4),
}

# of those whose configuration has no layer_types
WINDOW_IN_ALL_LAYERS = {"ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"}


WITH_CONV1D = ("gpt-sw3", "gpt2")  # transposed linear layers, in the words of transformers


class FallbackConfig(DecoderConfig, frozen=True):
    hf_config: Mapping[str, Any] = {}  # what transformers reads


def choose_implementation(
    hf_config: Mapping[str, Any], model_impl: str, native: Iterable[str] = NATIVE
) -> tuple[str, str]:
    """QUIRE and an architecture, or TRANSFORMERS and a model type.

    model_impl: QUIRE, TRANSFORMERS or "auto", which prefers QUIRE. Raises ModelLoadError, with the
    reason where it is known.
    """
    model_type, names = hf_config.get("model_type"), hf_config.get("architectures") or []
    found = FALLBACKS.get(model_type) if isinstance(model_type, str) else None
    problem = f"transformers has no supported model for architectures={names!r:.100} and "
    problem += f"model_type={model_type!r:.60}"
    if model_impl != TRANSFORMERS:
        try:
            name = find_architecture(dict(hf_config), native)
            if model_impl == QUIRE or found is None or found.architecture != name:
                return QUIRE, name
            if name not in ARCHITECTURES or ARCHITECTURES[name].model_type == model_type:
                return QUIRE, name
            # the type reads its keys in another way, and only its layers are those of the page
        except ModelLoadError as error:
            if model_impl == QUIRE:
                raise
            problem = str(error)
    if isinstance(model_type, str):
        # as in transformers the type decides, and checkpoints have names of their own code
        is_causal = any(name.endswith("ForCausalLM") for name in names if isinstance(name, str))
        if found is not None and (not names or found.architecture in names or is_causal):
            return TRANSFORMERS, model_type
        if is_fallback_encoder(hf_config):
            return TRANSFORMERS, model_type
        types = [known for known, row in FALLBACKS.items() if row.architecture in names]
        if model_type in REFUSED and types:  # an older config.json, such as MiniMax M2's first one
            raise ModelLoadError(
                f"config.json: architectures={names!r:.100} belongs to model_type {types[0]}, not "
                f'to {model_type}; set hf_overrides={{"model_type": "{types[0]}"}}'
            )
        if model_type in REFUSED:
            raise ModelLoadError(f"model_type {model_type} is not supported: {REFUSED[model_type]}")
    raise ModelLoadError(f"{problem}; docs/models.md lists what runs through transformers")


def parse_model(
    hf_config: dict[str, Any], model_impl: str = "auto"
) -> tuple[str, str, DecoderConfig | EncoderConfig]:
    """Returns QUIRE or TRANSFORMERS, the architecture and its configuration.

    Raises ModelLoadError, with the engine's message, for a model that the engine would reject.
    """
    implementation, name = choose_implementation(hf_config, model_impl)
    if implementation == QUIRE:
        return QUIRE, name, NATIVE[name].parse(hf_config)
    if name in FALLBACK_ENCODERS:
        config = parse_fallback_encoder(hf_config)
        return TRANSFORMERS, FALLBACK_ENCODERS[name].architecture, config
    return TRANSFORMERS, FALLBACKS[name].architecture, parse_fallback_config(hf_config)


def parse_fallback_config(hf_config: Mapping[str, Any]) -> FallbackConfig:
    """What plan and runner need; transformers reads the rest.

    Raises ModelLoadError, naming the key, for one that is missing or out of range.
    """
    known = FALLBACKS[hf_config["model_type"]]
    quantization = parse_quantization(dict(hf_config))  # refuses what is unsupported
    if quantization is not None and hf_config["model_type"] in WITH_CONV1D:
        raise ModelLoadError(
            f"config.json: quantization_config is not supported for {hf_config['model_type']}, "
            f"whose linear layers are transposed"
        )

    def size(name: str, default: int | None = None) -> int:
        key = known.keys.get(name, name)
        value = hf_config.get(key, hf_config.get(name))
        return integer(key, default if value is None else value, most_of(name))

    hidden_size, num_heads = size("hidden_size"), size("num_attention_heads")
    num_layers = size("num_hidden_layers")
    num_kv_heads = size("num_key_value_heads", known.kv_heads or num_heads)
    if hf_config["model_type"] == "gpt_bigcode":
        num_kv_heads = 1 if hf_config.get("multi_query", True) else num_heads
    return FallbackConfig(
        vocab_size=size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size", 4 * hidden_size),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=size("head_dim", known.head_dim or hidden_size // num_heads),
        max_position_embeddings=size("max_position_embeddings"),
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        rope=dict(hf_config.get("rope_scaling") or {}),
        sliding_windows=_windows(hf_config, num_layers),
        hf_config=hf_config,
    )


def _windows(hf_config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The window of each layer, 0: none, as far as config.json has it. The engine finds it out by
    running the model; a window that is only in transformers' defaults is missing in plans.
    """
    window, layer_types = hf_config.get("sliding_window"), hf_config.get("layer_types")
    if layer_types is None and hf_config["model_type"] in WINDOW_IN_ALL_LAYERS:
        layer_types = [SLIDING] * num_layers
    if type(window) is not int or type(layer_types) is not list or len(layer_types) < num_layers:
        return (0,) * num_layers
    return tuple(window if kind == SLIDING else 0 for kind in layer_types[:num_layers])


_STREAMS = (
    "it has several residual streams (hyper-connections), embeddings of hashed n-grams, and an "
    "indexer that selects blocks of keys"
)
_RECURRENT = "its layers keep a recurrent state of a kind that no row has"
_LATENT = "its keys and values have different sizes (latent attention)"
_INDEXER = "an indexer selects the keys that it attends to"
_BIDIRECTIONAL = "it is an encoder, which reads its whole input in both directions"
_ENCODER_DECODER = "it is an encoder with a decoder"
_OWN_ATTENTION = "its attention does not call transformers' attention interface"
_UNDECLARED = "transformers does not declare that other attention functions serve it"
_COMPOSITE = "it is a model of images or sound, and only its text model could run"
_TWICE = "its layers attend more than once"
_PER_LAYER = "its layers have heads of different sizes, or share keys and values"
_CHUNKED = "its attention is cut into chunks"
_MASKED = "it computes a mask of its own for every token"
_NESTED = "its config.json has its sizes in nested objects"

REFUSED = {
    model_type: reason
    for reason, model_types in {
        _RECURRENT: "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid "
        "inkling2_loop_text inkling2_text inkling_text jamba kimi_linear lara_mini lfm2 lfm2_moe "
        "lfm3 mamba mamba2 minimax nemotron_h "
        "olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next "
        "recurrent_gemma rwkv xlstm zamba zamba2 zaya",
        _STREAMS: "qwen4_exp qwen4_exp_text",
        _LATENT: "axk1 axk2 deepseek_v2 deepseek_v3 dots3_note_text glm4_moe_lite longcat_flash "
        "mimo_v2_flash minicpm3 sarvam_mla youtu",
        _INDEXER: "deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4",
        _BIDIRECTIONAL: "bert bert-generation big_bird camembert data2vec-text electra ernie "
        "megatron-bert modernbert rembert roberta roberta-prelayernorm roc_bert roformer "
        "xlm-roberta xlm-roberta-xl xlm xlnet xmod",
        _ENCODER_DECODER: "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp "
        "pegasus plbart prophetnet trocr whisper",
        _OWN_ATTENTION: "bloom codegen cpmant falcon gpt_neo gpt_neox_japanese gptj mpt "
        "openai-gpt reformer xglm",
        _UNDECLARED: "biogpt blt stablelm",
        _COMPOSITE: "cohere_compass_text dots3_note emu3 fuyu gemma3 gemma3n gemma4 "
        "gemma4_assistant gemma4_unified gemma4_unified_assistant git got_ocr2 llama4 mllama "
        "moshi moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal",
        _TWICE: "diffllama dory hrm_text",
        _PER_LAYER: "gemma3n_text gemma4_text gemma4_unified_text",
        _CHUNKED: "llama4_text",
        _MASKED: "doge",
        _NESTED: "dbrx",
    }.items()
    for model_type in model_types.split()
}
