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
            for (float* at = x + start; at < x + start + stride; at += 8)
                add_and_subtract_8(at, at + stride);
    for (float* at = x; at < x + head_dim; at += 8) hadamard_8(at);
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
inline void widen_row(const int8_t* from, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += 8) widen_8(from + i, out + i);
}
inline void widen_row(const int8_t* from, int64_t size, uint16_t* out) {
    for (int64_t i = 0; i < size; i += 16) widen_16(from + i, out + i);
}

// Four integers of each of 8 rows -> their columns: 4 of fp32, or 2 of pairs of bf16, `apart`
// dwords apart.
inline void widen_fours(Eight fours, float* out, int64_t apart) {
    fours.float_of_byte<0>().store(out);
    fours.float_of_byte<1>().store(out + apart);
    fours.float_of_byte<2>().store(out + 2 * apart);
    fours.float_of_byte<3>().store(out + 3 * apart);
}
inline void widen_fours(Eight fours, uint16_t* out, int64_t apart) {
    Eight::pairs(fours.float_of_byte<0>(), fours.float_of_byte<1>()).store(out);
    Eight::pairs(fours.float_of_byte<2>(), fours.float_of_byte<3>()).store(out + 2 * apart);
}
