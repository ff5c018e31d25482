"""The structs of src/abi.h, field by field.

Must not know: what an operation computes (kernels/ops.py), tensors.
"""

from ctypes import Structure, c_double, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any

ABI_VERSION = 24

BF16, F32, INT8 = 0, 1, 2
ALL_TOKENS, ALL_LOGITS = -1, -2  # values of `rows`: the step's num_tokens, the step's num_logits


class Op(IntEnum):
    RMS_NORM = 0
    ADD_RMS_NORM = 1
    SILU_AND_MUL = 2
    EMBEDDING = 3
    LINEAR = 4
    LINEAR_INT8 = 5
    LINEAR_INT4 = 6
    ROTARY = 7
    WRITE_KV = 8
    ROTARY_AND_WRITE_KV = 9
    ATTENTION = 10
    ARGMAX = 11
    SAMPLE = 12
    GATHER_ROWS = 13
    QUANTIZE_INT8 = 14
    QUANTIZE_INT4 = 15
    EMBEDDING_INT8 = 16
    EMBEDDING_PACKED = 17
    GATHER_LOGPROBS = 18
    NEXT_TOKENS = 19
    LINEAR_Q8_0 = 20
    LINEAR_Q4_0 = 21
    LINEAR_Q4_1 = 22
    LINEAR_Q4_K = 23
    LINEAR_Q5_K = 24
    LINEAR_Q6_K = 25
    EMBEDDING_Q8_0 = 26
    EMBEDDING_Q4_0 = 27
    EMBEDDING_Q4_1 = 28
    EMBEDDING_Q4_K = 29
    EMBEDDING_Q5_K = 30
    EMBEDDING_Q6_K = 31
    GELU_TANH_AND_MUL = 32
    SCALE = 33
    ADD = 34
    LINEAR_Q5_0 = 35
    LINEAR_Q5_1 = 36
    LINEAR_IQ4_NL = 37
    EMBEDDING_Q5_0 = 38
    EMBEDDING_Q5_1 = 39
    EMBEDDING_IQ4_NL = 40
    LINEAR_INT4_32 = 41
    LINEAR_INT4_128 = 42
    EMBEDDING_INT4_32 = 43
    EMBEDDING_INT4_128 = 44
    ROUTE_EXPERTS = 45
    SORT_BY_EXPERT = 46
    COMBINE_EXPERTS = 47
    ADD_GATED = 48
    EXPERTS_LINEAR = 49
    EXPERTS_LINEAR_INT8 = 50
    EXPERTS_LINEAR_INT4 = 51
    EXPERTS_LINEAR_BLOCKS = 52
    EXTERNAL = 53
    LINEAR_MXFP4 = 54
    EMBEDDING_MXFP4 = 55
    COUNT_EXPERTS = 56
    LAYER_NORM = 57
    ADD_LAYER_NORM = 58
    GELU = 59
    GELU_TANH = 60
    SILU = 61
    RELU = 62
    GELU_AND_MUL = 63
    ENCODER_ATTENTION = 64
    ADD_LORA = 65
    ADD_LORA_EMBEDDING = 66
    FIRST_DRAFTS = 67
    PLACE_DRAFTS = 68
    ACCEPT_DRAFTS = 69
    SPREAD_LOGITS = 70
    ALL_REDUCE = 71
    ALL_GATHER = 72
    LOOKUP_DRAFTS = 73
    ACCEPT_LOOKUPS = 74


def _fields(**types: type) -> list[tuple[str, type]]:
    return list(types.items())


class Step(Structure):
    _fields_ = _fields(
        num_tokens=c_int64,
        num_requests=c_int64,
        token_ids=c_void_p,
        positions=c_void_p,
        slot_mapping=c_void_p,
        query_start_loc=c_void_p,
        seq_lens=c_void_p,
        block_tables=c_void_p,
        block_table_row=c_int64,
        num_logits=c_int64,
        logits_indices=c_void_p,
        num_groups=c_int64,
        slot_mapping_group=c_int64,
        block_table_group=c_int64,
        token_types=c_void_p,
        adapters=c_void_p,
    )


class Call(Structure):
    _fields_ = _fields(op=c_int32, dtype=c_int32, rows=c_int64)
    origin: Any = None  # what Recorder.origin says of a recorded call; not part of the struct


class RmsNorm(Call):
    _fields_ = _fields(
        x=c_void_p,
        weight=c_void_p,
        out=c_void_p,
        x_row=c_int64,
        x_head=c_int64,
        out_row=c_int64,
        out_head=c_int64,
        heads=c_int64,
        size=c_int64,
        eps=c_double,
        weight_dtype=c_int64,
    )


class AddRmsNorm(Call):
    _fields_ = _fields(
        x=c_void_p,
        residual=c_void_p,
        weight=c_void_p,
        x_row=c_int64,
        residual_row=c_int64,
        size=c_int64,
        eps=c_double,
        weight_dtype=c_int64,
    )


class LayerNorm(Call):
    _fields_ = _fields(
        x=c_void_p,
        weight=c_void_p,
        bias=c_void_p,
        out=c_void_p,
        x_row=c_int64,
        out_row=c_int64,
        size=c_int64,
        eps=c_double,
    )


class AddLayerNorm(Call):
    _fields_ = _fields(
        x=c_void_p,
        residual=c_void_p,
        weight=c_void_p,
        bias=c_void_p,
        x_row=c_int64,
        residual_row=c_int64,
        size=c_int64,
        eps=c_double,
    )


class Scale(Call):
    _fields_ = _fields(x=c_void_p, x_row=c_int64, size=c_int64, factor=c_double)


class Add(Call):
    _fields_ = _fields(
        x=c_void_p, residual=c_void_p, x_row=c_int64, residual_row=c_int64, size=c_int64
    )


class Activate(Call):
    _fields_ = _fields(x=c_void_p, out=c_void_p, x_row=c_int64, out_row=c_int64, size=c_int64)


class SiluAndMul(Call):
    _fields_ = _fields(x=c_void_p, out=c_void_p, x_row=c_int64, out_row=c_int64, size=c_int64)


class Ids(IntEnum):
    TOKEN_IDS = 0
    POSITIONS = 1
    TOKEN_TYPES = 2


class Embedding(Call):
    _fields_ = [
        *_fields(table=c_void_p, out=c_void_p, out_row=c_int64, num_ids=c_int64, size=c_int64),
        *_fields(ids=c_int64, first_id=c_int64, is_part=c_int64),
    ]


class GatherRows(Call):
    _fields_ = _fields(x=c_void_p, out=c_void_p, x_row=c_int64, out_row=c_int64, size=c_int64)


class Rotary(Call):
    _fields_ = _fields(
        query=c_void_p,
        key=c_void_p,
        cos_sin=c_void_p,
        query_row=c_int64,
        query_head=c_int64,
        key_row=c_int64,
        key_head=c_int64,
        heads=c_int64,
        kv_heads=c_int64,
        rotary_dim=c_int64,
    )


class WriteKv(Call):
    _fields_ = _fields(
        key=c_void_p,
        value=c_void_p,
        key_cache=c_void_p,
        value_cache=c_void_p,
        key_row=c_int64,
        key_head=c_int64,
        value_row=c_int64,
        value_head=c_int64,
        kv_heads=c_int64,
        head_dim=c_int64,
        block_size=c_int64,
        cache_dtype=c_int64,
        group=c_int64,
    )


class RotaryAndWriteKv(Rotary):
    _fields_ = _fields(
        value=c_void_p,
        key_cache=c_void_p,
        value_cache=c_void_p,
        value_row=c_int64,
        value_head=c_int64,
        head_dim=c_int64,
        block_size=c_int64,
        cache_dtype=c_int64,
        group=c_int64,
    )


class Attention(Call):
    _fields_ = _fields(
        query=c_void_p,
        key_cache=c_void_p,
        value_cache=c_void_p,
        out=c_void_p,
        query_row=c_int64,
        query_head=c_int64,
        heads=c_int64,
        kv_heads=c_int64,
        head_dim=c_int64,
        block_size=c_int64,
        sliding_window=c_int64,
        cache_dtype=c_int64,
        group=c_int64,
        scale=c_double,
        softcap=c_double,
        sinks=c_void_p,
    )


class EncoderAttention(Call):
    _fields_ = _fields(
        query=c_void_p,
        key=c_void_p,
        value=c_void_p,
        bias=c_void_p,
        out=c_void_p,
        query_row=c_int64,
        query_head=c_int64,
        key_row=c_int64,
        key_head=c_int64,
        value_row=c_int64,
        value_head=c_int64,
        heads=c_int64,
        kv_heads=c_int64,
        head_dim=c_int64,
        window=c_int64,
        bias_distance=c_int64,
        scale=c_double,
    )


class Epilogue(IntEnum):
    PLAIN = 0
    GATED = 1
    GATED_GELU_TANH = 2
    GATED_CLAMPED = 3
    GATED_GELU = 4
    GELU = 5
    GELU_TANH = 6
    SILU = 7
    RELU = 8

    @property
    def is_gated(self) -> bool:
        return Epilogue.GATED <= self <= Epilogue.GATED_GELU


class Linear(Call):
    _fields_ = _fields(
        x=c_void_p,
        weight=c_void_p,
        bias=c_void_p,
        out=c_void_p,
        x_row=c_int64,
        out_row=c_int64,
        in_features=c_int64,
        out_features=c_int64,
        epilogue=c_int32,
        out_dtype=c_int32,
        gate_scale=c_double,
        gate_limit=c_double,
    )


class Argmax(Call):
    _fields_ = _fields(
        logits=c_void_p, out=c_void_p, is_finite=c_void_p, logits_row=c_int64, vocab_size=c_int64
    )


class Sample(Call):
    _fields_ = _fields(
        logits=c_void_p,
        temperature=c_void_p,
        top_k=c_void_p,
        top_p=c_void_p,
        min_p=c_void_p,
        seeds=c_void_p,
        positions=c_void_p,
        out=c_void_p,
        logits_row=c_int64,
        vocab_size=c_int64,
    )


class QuantizedLinear(Linear):
    _fields_ = _fields(scales=c_void_p)


class Quantize(Call):
    _fields_ = _fields(
        weight=c_void_p,
        packed=c_void_p,
        scales=c_void_p,
        weight_row=c_int64,
        in_features=c_int64,
        out_features=c_int64,
    )


class EmbeddingInt8(Embedding):
    _fields_ = _fields(scales=c_void_p)


class GatherLogprobs(Call):
    _fields_ = _fields(
        logits=c_void_p,
        token_ids=c_void_p,
        ids=c_void_p,
        logprobs=c_void_p,
        ranks=c_void_p,
        logits_row=c_int64,
        vocab_size=c_int64,
        k=c_int64,
    )


class NextTokens(Call):
    _fields_ = _fields(
        token_ids=c_void_p,
        is_finite=c_void_p,
        kept=c_void_p,
        kept_finite=c_void_p,
        draw_positions=c_void_p,
        block_size=c_int64,
        is_last=c_int64,
    )


class RouteExperts(Call):
    _fields_ = _fields(
        logits=c_void_p,
        bias=c_void_p,
        ids=c_void_p,
        weights=c_void_p,
        logits_row=c_int64,
        count=c_int64,
        top_k=c_int64,
        is_sigmoid=c_int64,
        renormalize=c_int64,
        num_groups=c_int64,
        top_groups=c_int64,
        scale=c_double,
    )


class SortByExpert(Call):
    _fields_ = _fields(
        ids=c_void_p,
        starts=c_void_p,
        tokens=c_void_p,
        places=c_void_p,
        counts=c_void_p,
        count=c_int64,
        top_k=c_int64,
    )


class CountExperts(Call):
    _fields_ = _fields(ids=c_void_p, slots=c_void_p, counts=c_void_p, count=c_int64, top_k=c_int64)


class CombineExperts(Call):
    _fields_ = _fields(
        x=c_void_p,
        places=c_void_p,
        weights=c_void_p,
        out=c_void_p,
        x_row=c_int64,
        out_row=c_int64,
        size=c_int64,
        top_k=c_int64,
    )


class AddGated(Call):
    _fields_ = _fields(
        x=c_void_p,
        gate=c_void_p,
        out=c_void_p,
        x_row=c_int64,
        gate_row=c_int64,
        out_row=c_int64,
        size=c_int64,
    )


class ExpertsLinear(QuantizedLinear):
    _fields_ = _fields(
        weights=c_void_p,
        all_scales=c_void_p,
        biases=c_void_p,
        starts=c_void_p,
        tokens=c_void_p,
        count=c_int64,
        top_k=c_int64,
        kind=c_int64,
    )


class External(Call):
    _fields_ = _fields(
        data0=c_void_p,
        data1=c_void_p,
        data2=c_void_p,
        data3=c_void_p,
        data4=c_void_p,
        data5=c_void_p,
        data6=c_void_p,
        data7=c_void_p,
        row=c_int64 * 8,
        size=c_int64 * 8,
        tensor_dtype=c_int64 * 8,
        numbers=c_double * 4,
        function=c_int64,
    )


class BlockLayout(Structure):
    _fields_ = _fields(
        num_bytes=c_int32,
        numbers=c_int32 * 2,
        num_scales=c_int32,
        scales=c_int32 * 3 * 3,
    )
