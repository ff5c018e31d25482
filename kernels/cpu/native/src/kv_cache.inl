// Layout of keys and values in the cache: unchanged, or in int8 (kernels/ops.py:
// reshape_and_cache), where a token's head is head_dim integers and a scale. Int8 keys, and the
// queries that multiply them, are multiplied by a Hadamard matrix. This scales their products by
// its size, and spreads a channel much larger than the others, as keys have them, over many
// channels (QuaRot; Ashkboos et al. 2024).

constexpr int64_t MAX_HEAD_DIM = 576;

// Whether a cache that holds numbers as C has scales for them
template <typename C>
constexpr bool IS_SCALED = sizeof(C) == 1;

// A block of a cache that holds numbers as C: [block_size, kv_heads, head_dim] numbers, in int8
// followed by scales [kv_heads, block_size] in fp32. A head's numbers therefore begin at a cache
// line, and its scales of a block are one line. The next block begins `apart` numbers later.
template <typename C>
struct BlockLayout {
    int64_t block_size, kv_heads, head_dim, apart;

    int64_t size() const { return block_size * kv_heads * head_dim; }
    C* numbers(const void* cache, int64_t block, int64_t offset, int64_t head) const {
        return (C*)cache + block * apart + (offset * kv_heads + head) * head_dim;
    }
    float* scale(const void* cache, int64_t block, int64_t offset, int64_t head) const {
        return (float*)((C*)cache + block * apart + size()) + head * block_size + offset;
    }
};

// the largest power of two that divides it
inline int64_t hadamard_size(int64_t head_dim) { return head_dim & -head_dim; }

// In place: each block of hadamard_size numbers is multiplied by H, without normalisation.
// head_dim: a multiple of 16. The reference adds in this order too.
inline void hadamard(float* x, int64_t head_dim) {
    for (int64_t stride = hadamard_size(head_dim) / 2; stride >= 8; stride /= 2)
        for (int64_t start = 0; start < head_dim; start += 2 * stride)
            for (float* at = x + start; at < x + start + stride; at += 8) {
                __m256 a = _mm256_loadu_ps(at), b = _mm256_loadu_ps(at + stride);
                _mm256_storeu_ps(at, _mm256_add_ps(a, b));
                _mm256_storeu_ps(at + stride, _mm256_sub_ps(a, b));
            }
    const __m256 four = _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f),
                 two = _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f),
                 one = _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f);
    // strides of 4, 2 and 1: numbers change places, and the later ones their sign
    for (float* at = x; at < x + head_dim; at += 8) {
        __m256 v = _mm256_loadu_ps(at);
        v = _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, four));
        v = _mm256_add_ps(_mm256_permute_ps(v, 0x4e), _mm256_xor_ps(v, two));
        v = _mm256_add_ps(_mm256_permute_ps(v, 0xb1), _mm256_xor_ps(v, one));
        _mm256_storeu_ps(at, v);
    }
}

// heads [., head_dim], `head` apart, of one token -> its slot of the cache
template <typename T>
void store_heads(const BlockLayout<T>& layout, const T* from, int64_t head, void* cache,
                 int64_t slot) {
    T* to = layout.numbers(cache, slot / layout.block_size, slot % layout.block_size, 0);
    for (int64_t h = 0; h < layout.kv_heads; h++)
        std::memcpy(to + h * layout.head_dim, from + h * head, layout.head_dim * sizeof(T));
}
template <typename T>
void store_heads_int8(const BlockLayout<int8_t>& layout, const T* from, int64_t head, bool turned,
                      void* cache, int64_t slot) {
    alignas(64) float x[MAX_HEAD_DIM];
    int64_t block = slot / layout.block_size, offset = slot % layout.block_size;
    for (int64_t h = 0; h < layout.kv_heads; h++) {
        copy_numbers(from + h * head, x, layout.head_dim);
        if (turned) hadamard(x, layout.head_dim);
        quantized::Scaling scaling(x, layout.head_dim);
        int8_t* to = layout.numbers(cache, block, offset, h);
        scaling.store(x, layout.head_dim, to);
        *layout.scale(cache, block, offset, h) = scaling.scale;
    }
}

// A: WriteKv or RotaryAndWriteKv
template <typename T, typename A>
void store_token(const A& a, int64_t row, int64_t slot) {
    if (slot < 0) return;
    const T *key = (const T*)a.key + row * a.key_row,
            *value = (const T*)a.value + row * a.value_row;
    if (a.cache_dtype == INT8) {
        BlockLayout<int8_t> layout{a.block_size, a.kv_heads, a.head_dim, a.cache_block};
        store_heads_int8(layout, key, a.key_head, true, a.key_cache, slot);
        store_heads_int8(layout, value, a.value_head, false, a.value_cache, slot);
    } else {
        BlockLayout<T> layout{a.block_size, a.kv_heads, a.head_dim, a.cache_block};
        store_heads(layout, key, a.key_head, a.key_cache, slot);
        store_heads(layout, value, a.value_head, a.value_cache, slot);
    }
}

// A row of integers as T, which holds them exactly. size: a multiple of 16.
inline __m256 eight_floats(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
inline void widen_row(const int8_t* from, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += 8) _mm256_storeu_ps(out + i, eight_floats(from + i));
}
inline void widen_row(const int8_t* from, int64_t size, uint16_t* out) {
    for (int64_t i = 0; i < size; i += 16) {
        __m256i low = _mm256_srli_epi32(_mm256_castps_si256(eight_floats(from + i)), 16);
        __m256i high = _mm256_srli_epi32(_mm256_castps_si256(eight_floats(from + i + 8)), 16);
        _mm256_storeu_si256((__m256i*)(out + i),
                            _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
    }
}

// Four integers of each of 8 rows -> their columns: 4 of fp32, or 2 of pairs of bf16, `apart`
// dwords apart.
template <int I>
inline __m256i float_of_fours(__m256i fours) {
    return _mm256_castps_si256(
        _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(fours, 24 - 8 * I), 24)));
}
inline void widen_fours(__m256i fours, float* out, int64_t apart) {
    _mm256_storeu_si256((__m256i*)out, float_of_fours<0>(fours));
    _mm256_storeu_si256((__m256i*)(out + apart), float_of_fours<1>(fours));
    _mm256_storeu_si256((__m256i*)(out + 2 * apart), float_of_fours<2>(fours));
    _mm256_storeu_si256((__m256i*)(out + 3 * apart), float_of_fours<3>(fours));
}
inline void widen_fours(__m256i fours, uint16_t* out, int64_t apart) {
    _mm256_storeu_si256(
        (__m256i*)out,
        _mm256_or_si256(_mm256_srli_epi32(float_of_fours<0>(fours), 16), float_of_fours<1>(fours)));
    _mm256_storeu_si256(
        (__m256i*)(out + 2 * apart),
        _mm256_or_si256(_mm256_srli_epi32(float_of_fours<2>(fours), 16), float_of_fours<3>(fours)));
}
