// Included by emulated_avx512.h: instructions that compare, convert, reorder and sum lanes, and the
// instructions of VNNI and BF16.

// ---------------------------------------------------------------- comparisons, choices, masks

inline bool compare(float a, float b, int predicate) {
    switch (predicate) {
        case _CMP_EQ_OQ:
            return a == b;
        case _CMP_LT_OS:
        case _CMP_LT_OQ:
            return a < b;
        case _CMP_LE_OS:
        case _CMP_LE_OQ:
            return a <= b;
        case _CMP_UNORD_Q:
            return std::isnan(a) || std::isnan(b);
        case _CMP_ORD_Q:
            return !std::isnan(a) && !std::isnan(b);
        case _CMP_NEQ_UQ:
            return !(a == b);
        case _CMP_NLT_UQ:
        case _CMP_NLT_US:
            return !(a < b);
        case _CMP_NLE_UQ:
        case _CMP_NLE_US:
            return !(a <= b);
        case _CMP_GE_OQ:
        case _CMP_GE_OS:
            return a >= b;
        case _CMP_GT_OQ:
        case _CMP_GT_OS:
            return a > b;
        case _CMP_NGE_UQ:
        case _CMP_NGE_US:
            return !(a >= b);
        case _CMP_NGT_UQ:
        case _CMP_NGT_US:
            return !(a > b);
    }
    std::abort();  // not implemented yet
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int p) {
    return mask_where<float>(a, b, [=](float x, float y) { return compare(x, y, p); });
}
inline __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int p) {
    return mask & _mm512_cmp_ps_mask(a, b, p);
}
#define COMPARE_LANES(element, mask_type, suffix)                                      \
    inline mask_type _mm512_cmpeq_##suffix##_mask(__m512i a, __m512i b) {              \
        return mask_where<element>(a, b, [](element x, element y) { return x == y; }); \
    }                                                                                  \
    inline mask_type _mm512_cmpneq_##suffix##_mask(__m512i a, __m512i b) {             \
        return mask_where<element>(a, b, [](element x, element y) { return x != y; }); \
    }                                                                                  \
    inline mask_type _mm512_cmplt_##suffix##_mask(__m512i a, __m512i b) {              \
        return mask_where<element>(a, b, [](element x, element y) { return x < y; });  \
    }                                                                                  \
    inline mask_type _mm512_cmple_##suffix##_mask(__m512i a, __m512i b) {              \
        return mask_where<element>(a, b, [](element x, element y) { return x <= y; }); \
    }                                                                                  \
    inline mask_type _mm512_cmpgt_##suffix##_mask(__m512i a, __m512i b) {              \
        return mask_where<element>(a, b, [](element x, element y) { return x > y; });  \
    }                                                                                  \
    inline mask_type _mm512_cmpge_##suffix##_mask(__m512i a, __m512i b) {              \
        return mask_where<element>(a, b, [](element x, element y) { return x >= y; }); \
    }
COMPARE_LANES(int8_t, __mmask64, epi8)
COMPARE_LANES(int16_t, __mmask32, epi16)
COMPARE_LANES(int32_t, __mmask16, epi32)
COMPARE_LANES(uint32_t, __mmask16, epu32)
inline __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
    return mask_where<int32_t>(a, b, [](int32_t x, int32_t y) { return (x & y) != 0; });
}
inline __mmask64 _mm512_test_epi8_mask(__m512i a, __m512i b) {
    return mask_where<int8_t>(a, b, [](int8_t x, int8_t y) { return (x & y) != 0; });
}
inline __mmask64 _mm512_movepi8_mask(__m512i a) {
    return mask_where<int8_t>(a, a, [](int8_t x, int8_t) { return x < 0; });
}
inline __m512 _mm512_mask_blend_ps(uint64_t mask, __m512 no, __m512 yes) {
    return chosen<float>(mask, yes, no);
}
inline __m512i _mm512_mask_blend_epi8(uint64_t mask, __m512i no, __m512i yes) {
    return chosen<int8_t>(mask, yes, no);
}
inline __m512i _mm512_mask_blend_epi16(uint64_t mask, __m512i no, __m512i yes) {
    return chosen<int16_t>(mask, yes, no);
}
inline __m512i _mm512_mask_blend_epi32(uint64_t mask, __m512i no, __m512i yes) {
    return chosen<int32_t>(mask, yes, no);
}
inline __m512 _mm512_mask_mov_ps(__m512 no, uint64_t mask, __m512 yes) {
    return chosen<float>(mask, yes, no);
}
inline __m512 _mm512_maskz_mov_ps(uint64_t mask, __m512 yes) {
    return chosen<float>(mask, yes, __m512{});
}
inline __m512i _mm512_mask_mov_epi32(__m512i no, uint64_t mask, __m512i yes) {
    return chosen<int32_t>(mask, yes, no);
}
inline __m512i _mm512_maskz_mov_epi8(uint64_t mask, __m512i yes) {
    return chosen<int8_t>(mask, yes, __m512i{});
}
inline __m512i _mm512_maskz_mov_epi16(uint64_t mask, __m512i yes) {
    return chosen<int16_t>(mask, yes, __m512i{});
}
inline __m512i _mm512_maskz_mov_epi32(uint64_t mask, __m512i yes) {
    return chosen<int32_t>(mask, yes, __m512i{});
}
inline __m512i _mm512_maskz_set1_epi32(uint64_t mask, int x) {
    return chosen<int32_t>(mask, _mm512_set1_epi32(x), __m512i{});
}
inline __mmask16 _cvtu32_mask16(unsigned x) { return x; }
inline __mmask32 _cvtu32_mask32(unsigned x) { return x; }
inline __mmask64 _cvtu64_mask64(unsigned long long x) { return x; }
inline unsigned _cvtmask16_u32(__mmask16 x) { return x; }
inline unsigned _cvtmask32_u32(__mmask32 x) { return x; }

// ---------------------------------------------------------------- conversions

template <typename R>
R nearest_int(__m512 v, bool truncate) {
    Lanes<float, __m512> x(v);
    return each<int32_t, R>([&](int i) {
        float whole = truncate ? std::trunc(x.at[i]) : std::nearbyint(x.at[i]);
        return whole >= -0x1p31f && whole < 0x1p31f ? (int32_t)whole : INT32_MIN;
    });
}
inline __m512i _mm512_cvtps_epi32(__m512 v) { return nearest_int<__m512i>(v, false); }
inline __m512i _mm512_cvttps_epi32(__m512 v) { return nearest_int<__m512i>(v, true); }
inline __m512 _mm512_cvtepi32_ps(__m512i v) { return converted<float, int32_t, __m512>(v); }
inline __m512 _mm512_cvtepu32_ps(__m512i v) { return converted<float, uint32_t, __m512>(v); }
inline __m512i _mm512_cvtepu8_epi16(__m256i v) { return converted<int16_t, uint8_t, __m512i>(v); }
inline __m512i _mm512_cvtepi8_epi16(__m256i v) { return converted<int16_t, int8_t, __m512i>(v); }
inline __m512i _mm512_cvtepu8_epi32(__m128i v) { return converted<int32_t, uint8_t, __m512i>(v); }
inline __m512i _mm512_cvtepi8_epi32(__m128i v) { return converted<int32_t, int8_t, __m512i>(v); }
inline __m512i _mm512_cvtepu16_epi32(__m256i v) { return converted<int32_t, uint16_t, __m512i>(v); }
inline __m512i _mm512_cvtepi16_epi32(__m256i v) { return converted<int32_t, int16_t, __m512i>(v); }
inline __m512i _mm512_maskz_cvtepu16_epi32(uint64_t mask, __m256i v) {
    return chosen<int32_t>(mask, _mm512_cvtepu16_epi32(v), __m512i{});
}
inline __m256i _mm512_cvtepi32_epi16(__m512i v) { return converted<int16_t, int32_t, __m256i>(v); }
inline __m128i _mm512_cvtepi32_epi8(__m512i v) { return converted<int8_t, int32_t, __m128i>(v); }
inline __m256i _mm512_cvtepi16_epi8(__m512i v) { return converted<int8_t, int16_t, __m256i>(v); }
template <typename To>
int32_t saturated(int32_t x) {
    return std::clamp<int32_t>(x, std::numeric_limits<To>::min(), std::numeric_limits<To>::max());
}
inline __m128i _mm512_cvtsepi32_epi8(__m512i v) {
    Lanes<int32_t, __m512i> x(v);
    return each<int8_t, __m128i>([&](int i) { return saturated<int8_t>(x.at[i]); });
}
inline void _mm512_mask_cvtepi32_storeu_epi16(void* p, uint64_t mask, __m512i v) {
    masked_store<int16_t>(p, mask, _mm512_cvtepi32_epi16(v));
}
inline void _mm512_mask_cvtepi32_storeu_epi8(void* p, uint64_t mask, __m512i v) {
    masked_store<int8_t>(p, mask, _mm512_cvtepi32_epi8(v));
}

// ---------------------------------------------------------------- order of lanes

HALVES(__m512i, __m256i, _mm512_unpacklo_epi8, _mm256_unpacklo_epi8)
HALVES(__m512i, __m256i, _mm512_unpackhi_epi8, _mm256_unpackhi_epi8)
HALVES(__m512i, __m256i, _mm512_unpacklo_epi16, _mm256_unpacklo_epi16)
HALVES(__m512i, __m256i, _mm512_unpackhi_epi16, _mm256_unpackhi_epi16)
HALVES(__m512i, __m256i, _mm512_unpacklo_epi32, _mm256_unpacklo_epi32)
HALVES(__m512i, __m256i, _mm512_unpackhi_epi32, _mm256_unpackhi_epi32)
HALVES(__m512i, __m256i, _mm512_unpacklo_epi64, _mm256_unpacklo_epi64)
HALVES(__m512i, __m256i, _mm512_unpackhi_epi64, _mm256_unpackhi_epi64)
HALVES(__m512, __m256, _mm512_unpacklo_ps, _mm256_unpacklo_ps)
HALVES(__m512, __m256, _mm512_unpackhi_ps, _mm256_unpackhi_ps)
HALVES(__m512i, __m256i, _mm512_packs_epi32, _mm256_packs_epi32)
HALVES(__m512i, __m256i, _mm512_packus_epi32, _mm256_packus_epi32)
HALVES(__m512i, __m256i, _mm512_packs_epi16, _mm256_packs_epi16)
HALVES(__m512i, __m256i, _mm512_packus_epi16, _mm256_packus_epi16)
HALVES(__m512i, __m256i, _mm512_shuffle_epi8, _mm256_shuffle_epi8)
template <size_t BYTES>
using Index =
    std::conditional_t<BYTES == 2, uint16_t, std::conditional_t<BYTES == 4, uint32_t, uint64_t>>;
template <typename E, typename V>
V permuted(V v, __m512i index) {
    Lanes<E, V> x(v);
    Lanes<Index<sizeof(E)>, __m512i> n(index);
    return each<E, V>([&](int i) { return x.at[n.at[i] % x.COUNT]; });
}
template <typename E, typename V>
V permuted(V a, __m512i index, V b) {  // lane COUNT + i is b's lane i
    Lanes<E, V> x(a), y(b);
    Lanes<Index<sizeof(E)>, __m512i> n(index);
    return each<E, V>([&](int i) { return (n.at[i] / x.COUNT % 2 ? y : x).at[n.at[i] % x.COUNT]; });
}
inline __m512 _mm512_permutexvar_ps(__m512i index, __m512 v) { return permuted<float>(v, index); }
inline __m512i _mm512_permutexvar_epi32(__m512i index, __m512i v) {
    return permuted<int32_t>(v, index);
}
inline __m512i _mm512_permutexvar_epi16(__m512i index, __m512i v) {
    return permuted<int16_t>(v, index);
}
inline __m512i _mm512_permutexvar_epi64(__m512i index, __m512i v) {
    return permuted<int64_t>(v, index);
}
inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b) {
    return permuted<float>(a, index, b);
}
inline __m512i _mm512_permutex2var_epi32(__m512i a, __m512i index, __m512i b) {
    return permuted<int32_t>(a, index, b);
}
inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
    return permuted<int16_t>(a, index, b);
}
inline __m512i _mm512_permutex2var_epi64(__m512i a, __m512i index, __m512i b) {
    return permuted<int64_t>(a, index, b);
}
template <typename E, typename V>
V shuffled(V a, V b, int imm) {  // pieces 0 and 1 from a, 2 and 3 from b
    V r;
    for (int i = 0; i < 4; i++)
        r = with_part(i ? r : V{}, part<E>(i < 2 ? a : b, imm >> 2 * i & 3), i);
    return r;
}
inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int imm) {
    return shuffled<__m128i>(a, b, imm);
}
inline __m512i _mm512_shuffle_i64x2(__m512i a, __m512i b, int imm) {
    return shuffled<__m128i>(a, b, imm);
}
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int imm) {
    return shuffled<__m128>(a, b, imm);
}
inline __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int imm) {
    Lanes<float, __m512> x(a), y(b);
    return each<float, __m512>(
        [&](int i) { return (i % 4 < 2 ? x : y).at[i / 4 * 4 + (imm >> 2 * (i % 4) & 3)]; });
}
inline __m512i _mm512_shuffle_epi32(__m512i a, int imm) {
    Lanes<int32_t, __m512i> x(a);
    return each<int32_t, __m512i>(
        [&](int i) { return x.at[i / 4 * 4 + (imm >> 2 * (i % 4) & 3)]; });
}

// ---------------------------------------------------------------- sums over lanes: in halves, like
// the compilers

template <typename E, typename V, typename F>
E reduced(V v, F op) {
    Lanes<E, V> x(v);
    for (int n = x.COUNT / 2; n; n /= 2)
        for (int i = 0; i < n; i++) x.at[i] = op(x.at[i], x.at[i + n]);
    return x.at[0];
}
inline float _mm512_reduce_add_ps(__m512 v) {
    return reduced<float>(v, [](float a, float b) { return a + b; });
}
inline float _mm512_reduce_max_ps(__m512 v) {
    return reduced<float>(v, [](float a, float b) { return a > b ? a : b; });
}
inline float _mm512_reduce_min_ps(__m512 v) {
    return reduced<float>(v, [](float a, float b) { return a < b ? a : b; });
}
inline int _mm512_reduce_add_epi32(__m512i v) {
    return (int)reduced<uint32_t>(v, [](uint32_t a, uint32_t b) { return a + b; });
}
inline int _mm512_reduce_max_epi32(__m512i v) {
    return reduced<int32_t>(v, [](int32_t a, int32_t b) { return std::max(a, b); });
}
inline int _mm512_reduce_min_epi32(__m512i v) {
    return reduced<int32_t>(v, [](int32_t a, int32_t b) { return std::min(a, b); });
}

// ---------------------------------------------------------------- VNNI

template <typename V>
V dot_bytes(V sum, V a, V b) {  // four products of an unsigned and a signed byte per lane
    Lanes<uint32_t, V> s(sum);
    Lanes<uint8_t, V> x(a);
    Lanes<int8_t, V> y(b);
    return each<uint32_t, V>([&](int i) {
        for (int j = 4 * i; j < 4 * i + 4; j++) s.at[i] += (uint32_t)(x.at[j] * y.at[j]);
        return s.at[i];
    });
}
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
    return dot_bytes(sum, a, b);
}
#undef _mm256_dpbusd_epi32  // a macro since it has two encodings
inline __m256i _mm256_dpbusd_epi32(__m256i sum, __m256i a, __m256i b) {
    return dot_bytes(sum, a, b);
}
inline __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}

// ---------------------------------------------------------------- BF16, where denormal operands
// and results count as zero

inline float flushed(float x) {
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint16_t to_bf16(float x) {
    x = flushed(x);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return std::isnan(x) ? (uint16_t)(bits >> 16 | 0x40)
                         : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float fma_flushed(float a, float b, float c) {
    return flushed(std::fma(flushed(a), flushed(b), flushed(c)));
}

// the upper number of each pair first, as in Intel's manual
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    Lanes<float, __m512> s(sum);
    Lanes<uint16_t, __m512bh> x(a), y(b);
    return each<float, __m512>([&](int i) {
        float upper = fma_flushed(from_bf16(x.at[2 * i + 1]), from_bf16(y.at[2 * i + 1]), s.at[i]);
        return fma_flushed(from_bf16(x.at[2 * i]), from_bf16(y.at[2 * i]), upper);
    });
}
inline __m512 _mm512_mask_dpbf16_ps(__m512 sum, uint64_t mask, __m512bh a, __m512bh b) {
    return chosen<float>(mask, _mm512_dpbf16_ps(sum, a, b), sum);
}
inline __m256bh _mm512_cvtneps_pbh(__m512 v) {
    Lanes<float, __m512> x(v);
    return each<uint16_t, __m256bh>([&](int i) { return to_bf16(x.at[i]); });
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
    Lanes<float, __m512> x(lower), y(upper);
    return each<uint16_t, __m512bh>(
        [&](int i) { return to_bf16(i < 16 ? x.at[i] : y.at[i - 16]); });
}
inline __m512 _mm512_cvtpbh_ps(__m256bh v) {
    Lanes<uint16_t, __m256bh> x(v);
    return each<float, __m512>([&](int i) { return from_bf16(x.at[i]); });
}

#undef HALVES
#undef HALVES_3
#undef HALVES_SHIFT
#undef MASKED
#undef MASKED_MEMORY
#undef COMPARE_LANES
