// AVX-512 (F, BW, VL, DQ, VNNI, BF16) implemented with AVX2, for tests on processors without it:
// the same names, as functions. isa_avx512.cpp and isa_amx.cpp include this inside their namespace
// when QUIRE_EMULATED is defined, where these names hide the compiler's own. A kernel that uses an
// intrinsic that is missing here does not compile ("target specific option mismatch"): add it,
// following Intel's description.

// The macros that the compiler defines for the real target, for kernels that test them.
#undef __AVX512F__
#define __AVX512F__ 1
#undef __AVX512BW__
#define __AVX512BW__ 1
#undef __AVX512VL__
#define __AVX512VL__ 1
#undef __AVX512DQ__
#define __AVX512DQ__ 1
#undef __AVX512VNNI__
#define __AVX512VNNI__ 1
#undef __AVX512BF16__
#define __AVX512BF16__ 1

// ---------------------------------------------------------------- registers as arrays

template <typename E, typename V>
struct Lanes {
    static constexpr int COUNT = sizeof(V) / sizeof(E);
    E at[COUNT];
    Lanes() : at{} {}
    explicit Lanes(V v) { std::memcpy(at, &v, sizeof v); }
    operator V() const {
        V v;
        std::memcpy(&v, at, sizeof v);
        return v;
    }
};

template <typename E, typename R, typename F>
R each(F value) {  // lane i is value(i)
    Lanes<E, R> r;
    for (int i = 0; i < r.COUNT; i++) r.at[i] = (E)value(i);
    return r;
}
template <typename E, typename V>
V chosen(uint64_t mask, V yes, V no) {  // lane i of yes if bit i is set, else of no
    Lanes<E, V> y(yes), n(no);
    return each<E, V>([&](int i) { return mask >> i & 1 ? y.at[i] : n.at[i]; });
}
template <typename E, typename V, typename F>
uint64_t mask_where(V a, V b, F compare) {
    Lanes<E, V> x(a), y(b);
    uint64_t mask = 0;
    for (int i = 0; i < x.COUNT; i++) mask |= (uint64_t)(compare(x.at[i], y.at[i]) ? 1 : 0) << i;
    return mask;
}
// Masked lanes are neither read nor written: they may be on an unmapped page.
template <typename E, typename V>
V masked_load(V otherwise, uint64_t mask, const void* p) {
    Lanes<E, V> r(otherwise);
    for (int i = 0; i < r.COUNT; i++)
        if (mask >> i & 1) std::memcpy(&r.at[i], (const E*)p + i, sizeof(E));
    return r;
}
template <typename E, typename V>
void masked_store(void* p, uint64_t mask, V v) {
    Lanes<E, V> x(v);
    for (int i = 0; i < x.COUNT; i++)
        if (mask >> i & 1) std::memcpy((E*)p + i, &x.at[i], sizeof(E));
}
template <typename To, typename From, typename R, typename V>
R converted(V v) {  // the upper lanes of a wider result are zero
    Lanes<From, V> x(v);
    return each<To, R>([&](int i) { return i < x.COUNT ? x.at[i] : (From)0; });
}
template <typename V>
V unaligned(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <typename V>
void check_aligned(const void* p) {
    if ((uintptr_t)p % sizeof(V)) std::abort();  // the processor faults here
}

// Both halves at once, by the AVX2 instruction.
#define HALVES(type, half, name, narrow)                      \
    inline type name(type a, type b) {                        \
        half x[2], y[2];                                      \
        std::memcpy(x, &a, 64), std::memcpy(y, &b, 64);       \
        x[0] = narrow(x[0], y[0]), x[1] = narrow(x[1], y[1]); \
        return unaligned<type>(x);                            \
    }
#define HALVES_3(name, narrow)                                                  \
    inline __m512 name(__m512 a, __m512 b, __m512 c) {                          \
        __m256 x[2], y[2], z[2];                                                \
        std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64); \
        x[0] = narrow(x[0], y[0], z[0]), x[1] = narrow(x[1], y[1], z[1]);       \
        return unaligned<__m512>(x);                                            \
    }
#define HALVES_SHIFT(name, narrow)                                        \
    inline __m512i name(__m512i a, unsigned count) {                      \
        __m256i x[2];                                                     \
        std::memcpy(x, &a, 64);                                           \
        x[0] = narrow(x[0], (int)count), x[1] = narrow(x[1], (int)count); \
        return unaligned<__m512i>(x);                                     \
    }
#define MASKED(element, type, name, merge, zero)                       \
    inline type merge(type otherwise, uint64_t mask, type a, type b) { \
        return chosen<element>(mask, name(a, b), otherwise);           \
    }                                                                  \
    inline type zero(uint64_t mask, type a, type b) {                  \
        return chosen<element>(mask, name(a, b), type{});              \
    }

// ---------------------------------------------------------------- loads, stores, constants

inline __m512 _mm512_loadu_ps(const void* p) { return unaligned<__m512>(p); }
inline __m512i _mm512_loadu_si512(const void* p) { return unaligned<__m512i>(p); }
inline __m512i _mm512_loadu_epi8(const void* p) { return unaligned<__m512i>(p); }
inline __m512i _mm512_loadu_epi16(const void* p) { return unaligned<__m512i>(p); }
inline __m512i _mm512_loadu_epi32(const void* p) { return unaligned<__m512i>(p); }
inline __m512 _mm512_load_ps(const void* p) {
    return check_aligned<__m512>(p), unaligned<__m512>(p);
}
inline __m512i _mm512_load_si512(const void* p) {
    return check_aligned<__m512i>(p), unaligned<__m512i>(p);
}
inline void _mm512_storeu_ps(void* p, __m512 v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_storeu_si512(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_storeu_epi8(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_storeu_epi16(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_storeu_epi32(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_store_ps(void* p, __m512 v) {
    check_aligned<__m512>(p), std::memcpy(p, &v, sizeof v);
}
inline void _mm512_store_si512(void* p, __m512i v) {
    check_aligned<__m512i>(p), std::memcpy(p, &v, sizeof v);
}
inline void _mm512_stream_ps(void* p, __m512 v) { _mm512_store_ps(p, v); }
inline void _mm512_stream_si512(void* p, __m512i v) { _mm512_store_si512(p, v); }

#define MASKED_MEMORY(element, type, prefix, suffix)                                         \
    inline type prefix##_maskz_loadu_##suffix(uint64_t mask, const void* p) {                \
        return masked_load<element>(type{}, mask, p);                                        \
    }                                                                                        \
    inline type prefix##_mask_loadu_##suffix(type otherwise, uint64_t mask, const void* p) { \
        return masked_load<element>(otherwise, mask, p);                                     \
    }                                                                                        \
    inline void prefix##_mask_storeu_##suffix(void* p, uint64_t mask, type v) {              \
        masked_store<element>(p, mask, v);                                                   \
    }
MASKED_MEMORY(float, __m512, _mm512, ps)
MASKED_MEMORY(int8_t, __m512i, _mm512, epi8)
MASKED_MEMORY(int16_t, __m512i, _mm512, epi16)
MASKED_MEMORY(int32_t, __m512i, _mm512, epi32)
MASKED_MEMORY(int64_t, __m512i, _mm512, epi64)
MASKED_MEMORY(float, __m256, _mm256, ps)
MASKED_MEMORY(int8_t, __m256i, _mm256, epi8)
MASKED_MEMORY(int16_t, __m256i, _mm256, epi16)
MASKED_MEMORY(int32_t, __m256i, _mm256, epi32)
MASKED_MEMORY(int8_t, __m128i, _mm, epi8)
MASKED_MEMORY(int16_t, __m128i, _mm, epi16)
MASKED_MEMORY(int32_t, __m128i, _mm, epi32)

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512i _mm512_setzero_epi32() { return __m512i{}; }
inline __m512 _mm512_undefined_ps() { return __m512{}; }
inline __m512i _mm512_undefined_epi32() { return __m512i{}; }
inline __m512 _mm512_set1_ps(float x) {
    return each<float, __m512>([=](int) { return x; });
}
inline __m512i _mm512_set1_epi8(int8_t x) {
    return each<int8_t, __m512i>([=](int) { return x; });
}
inline __m512i _mm512_set1_epi16(int16_t x) {
    return each<int16_t, __m512i>([=](int) { return x; });
}
inline __m512i _mm512_set1_epi32(int32_t x) {
    return each<int32_t, __m512i>([=](int) { return x; });
}
inline __m512i _mm512_set1_epi64(int64_t x) {
    return each<int64_t, __m512i>([=](int) { return x; });
}
// From the last lane to the first; the compiler's _mm512_setr_* are macros in terms of these.
inline __m512i _mm512_set_epi32(int p, int o, int n, int m, int l, int k, int j, int i, int h,
                                int g, int f, int e, int d, int c, int b, int a) {
    int32_t lanes[16] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
    return unaligned<__m512i>(lanes);
}
inline __m512i _mm512_set_epi64(int64_t h, int64_t g, int64_t f, int64_t e, int64_t d, int64_t c,
                                int64_t b, int64_t a) {
    int64_t lanes[8] = {a, b, c, d, e, f, g, h};
    return unaligned<__m512i>(lanes);
}
template <typename R, typename V>
R repeated(V v) {
    R r;
    for (size_t i = 0; i < sizeof(R); i += sizeof(V)) std::memcpy((char*)&r + i, &v, sizeof v);
    return r;
}
inline __m512i _mm512_broadcast_i32x4(__m128i v) { return repeated<__m512i>(v); }
inline __m512 _mm512_broadcast_f32x4(__m128 v) { return repeated<__m512>(v); }
inline __m512i _mm512_broadcast_i64x4(__m256i v) { return repeated<__m512i>(v); }
inline __m512i _mm512_broadcast_i32x8(__m256i v) { return repeated<__m512i>(v); }
inline __m512 _mm512_broadcast_f32x8(__m256 v) { return repeated<__m512>(v); }
inline __m512 _mm512_broadcastss_ps(__m128 v) { return _mm512_set1_ps(v[0]); }
inline __m512i _mm512_broadcastd_epi32(__m128i v) {
    return _mm512_set1_epi32(_mm_cvtsi128_si32(v));
}

// ---------------------------------------------------------------- one type as another, parts

template <typename R, typename V>
R as(V v) {  // the lower part, or v and zeros above it
    R r{};
    std::memcpy(&r, &v, std::min(sizeof r, sizeof v));
    return r;
}
template <typename R, typename V>
R part(V v, int index) {
    R r;
    std::memcpy(&r, (const char*)&v + index * sizeof(R), sizeof r);
    return r;
}
template <typename V, typename P>
V with_part(V v, P p, int index) {
    std::memcpy((char*)&v + index * sizeof p, &p, sizeof p);
    return v;
}
inline __m512i _mm512_castps_si512(__m512 v) { return as<__m512i>(v); }
inline __m512 _mm512_castsi512_ps(__m512i v) { return as<__m512>(v); }
inline __m256 _mm512_castps512_ps256(__m512 v) { return as<__m256>(v); }
inline __m128 _mm512_castps512_ps128(__m512 v) { return as<__m128>(v); }
inline __m256i _mm512_castsi512_si256(__m512i v) { return as<__m256i>(v); }
inline __m128i _mm512_castsi512_si128(__m512i v) { return as<__m128i>(v); }
inline __m512 _mm512_castps256_ps512(__m256 v) { return as<__m512>(v); }
inline __m512 _mm512_castps128_ps512(__m128 v) { return as<__m512>(v); }
inline __m512i _mm512_castsi256_si512(__m256i v) { return as<__m512i>(v); }
inline __m512i _mm512_castsi128_si512(__m128i v) { return as<__m512i>(v); }
inline __m512i _mm512_zextsi256_si512(__m256i v) { return as<__m512i>(v); }
inline __m512i _mm512_zextsi128_si512(__m128i v) { return as<__m512i>(v); }
inline __m512 _mm512_zextps256_ps512(__m256 v) { return as<__m512>(v); }
inline __m256i _mm512_extracti64x4_epi64(__m512i v, int i) { return part<__m256i>(v, i); }
inline __m256i _mm512_extracti32x8_epi32(__m512i v, int i) { return part<__m256i>(v, i); }
inline __m256 _mm512_extractf32x8_ps(__m512 v, int i) { return part<__m256>(v, i); }
inline __m128i _mm512_extracti32x4_epi32(__m512i v, int i) { return part<__m128i>(v, i); }
inline __m128 _mm512_extractf32x4_ps(__m512 v, int i) { return part<__m128>(v, i); }
inline __m512i _mm512_inserti64x4(__m512i v, __m256i p, int i) { return with_part(v, p, i); }
inline __m512i _mm512_inserti32x8(__m512i v, __m256i p, int i) { return with_part(v, p, i); }
inline __m512 _mm512_insertf32x8(__m512 v, __m256 p, int i) { return with_part(v, p, i); }
inline __m512i _mm512_inserti32x4(__m512i v, __m128i p, int i) { return with_part(v, p, i); }
inline __m512 _mm512_insertf32x4(__m512 v, __m128 p, int i) { return with_part(v, p, i); }
inline float _mm512_cvtss_f32(__m512 v) { return part<float>(v, 0); }
inline int _mm512_cvtsi512_si32(__m512i v) { return part<int>(v, 0); }

// ---------------------------------------------------------------- arithmetic

HALVES(__m512, __m256, _mm512_add_ps, _mm256_add_ps)
HALVES(__m512, __m256, _mm512_sub_ps, _mm256_sub_ps)
HALVES(__m512, __m256, _mm512_mul_ps, _mm256_mul_ps)
HALVES(__m512, __m256, _mm512_div_ps, _mm256_div_ps)
HALVES(__m512, __m256, _mm512_max_ps, _mm256_max_ps)
HALVES(__m512, __m256, _mm512_min_ps, _mm256_min_ps)
HALVES(__m512, __m256, _mm512_and_ps, _mm256_and_ps)
HALVES(__m512, __m256, _mm512_or_ps, _mm256_or_ps)
HALVES(__m512, __m256, _mm512_xor_ps, _mm256_xor_ps)
HALVES(__m512, __m256, _mm512_andnot_ps, _mm256_andnot_ps)
HALVES_3(_mm512_fmadd_ps, _mm256_fmadd_ps)
HALVES_3(_mm512_fmsub_ps, _mm256_fmsub_ps)
HALVES_3(_mm512_fnmadd_ps, _mm256_fnmadd_ps)
HALVES_3(_mm512_fnmsub_ps, _mm256_fnmsub_ps)
HALVES(__m512i, __m256i, _mm512_and_si512, _mm256_and_si256)
HALVES(__m512i, __m256i, _mm512_or_si512, _mm256_or_si256)
HALVES(__m512i, __m256i, _mm512_xor_si512, _mm256_xor_si256)
HALVES(__m512i, __m256i, _mm512_andnot_si512, _mm256_andnot_si256)
HALVES(__m512i, __m256i, _mm512_and_epi32, _mm256_and_si256)
HALVES(__m512i, __m256i, _mm512_or_epi32, _mm256_or_si256)
HALVES(__m512i, __m256i, _mm512_xor_epi32, _mm256_xor_si256)
HALVES(__m512i, __m256i, _mm512_add_epi8, _mm256_add_epi8)
HALVES(__m512i, __m256i, _mm512_sub_epi8, _mm256_sub_epi8)
HALVES(__m512i, __m256i, _mm512_add_epi16, _mm256_add_epi16)
HALVES(__m512i, __m256i, _mm512_sub_epi16, _mm256_sub_epi16)
HALVES(__m512i, __m256i, _mm512_mullo_epi16, _mm256_mullo_epi16)
HALVES(__m512i, __m256i, _mm512_add_epi32, _mm256_add_epi32)
HALVES(__m512i, __m256i, _mm512_sub_epi32, _mm256_sub_epi32)
HALVES(__m512i, __m256i, _mm512_mullo_epi32, _mm256_mullo_epi32)
HALVES(__m512i, __m256i, _mm512_max_epi32, _mm256_max_epi32)
HALVES(__m512i, __m256i, _mm512_min_epi32, _mm256_min_epi32)
HALVES(__m512i, __m256i, _mm512_max_epi8, _mm256_max_epi8)
HALVES(__m512i, __m256i, _mm512_min_epi8, _mm256_min_epi8)
HALVES(__m512i, __m256i, _mm512_add_epi64, _mm256_add_epi64)
HALVES(__m512i, __m256i, _mm512_mul_epu32, _mm256_mul_epu32)
HALVES(__m512i, __m256i, _mm512_madd_epi16, _mm256_madd_epi16)
HALVES(__m512i, __m256i, _mm512_maddubs_epi16, _mm256_maddubs_epi16)
HALVES(__m512i, __m256i, _mm512_sllv_epi32, _mm256_sllv_epi32)
HALVES(__m512i, __m256i, _mm512_srlv_epi32, _mm256_srlv_epi32)
HALVES(__m512i, __m256i, _mm512_srav_epi32, _mm256_srav_epi32)
HALVES_SHIFT(_mm512_slli_epi16, _mm256_slli_epi16)
HALVES_SHIFT(_mm512_srli_epi16, _mm256_srli_epi16)
HALVES_SHIFT(_mm512_srai_epi16, _mm256_srai_epi16)
HALVES_SHIFT(_mm512_slli_epi32, _mm256_slli_epi32)
HALVES_SHIFT(_mm512_srli_epi32, _mm256_srli_epi32)
HALVES_SHIFT(_mm512_srai_epi32, _mm256_srai_epi32)
HALVES_SHIFT(_mm512_slli_epi64, _mm256_slli_epi64)
HALVES_SHIFT(_mm512_srli_epi64, _mm256_srli_epi64)
inline __m512i _mm512_srl_epi16(__m512i a, __m128i count) {
    return _mm512_srli_epi16(a, (unsigned)_mm_cvtsi128_si32(count));
}
inline __m512 _mm512_cvtph_ps(__m256i v) {
    __m256 x[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(v)),
                   _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
    return unaligned<__m512>(x);
}
MASKED(float, __m512, _mm512_add_ps, _mm512_mask_add_ps, _mm512_maskz_add_ps)
MASKED(float, __m512, _mm512_sub_ps, _mm512_mask_sub_ps, _mm512_maskz_sub_ps)
MASKED(float, __m512, _mm512_mul_ps, _mm512_mask_mul_ps, _mm512_maskz_mul_ps)
MASKED(float, __m512, _mm512_max_ps, _mm512_mask_max_ps, _mm512_maskz_max_ps)
MASKED(int32_t, __m512i, _mm512_add_epi32, _mm512_mask_add_epi32, _mm512_maskz_add_epi32)
MASKED(int32_t, __m512i, _mm512_sub_epi32, _mm512_mask_sub_epi32, _mm512_maskz_sub_epi32)
MASKED(int8_t, __m512i, _mm512_add_epi8, _mm512_mask_add_epi8, _mm512_maskz_add_epi8)
MASKED(int8_t, __m512i, _mm512_sub_epi8, _mm512_mask_sub_epi8, _mm512_maskz_sub_epi8)
inline __m512 _mm512_mask_fmadd_ps(__m512 a, uint64_t mask, __m512 b, __m512 c) {
    return chosen<float>(mask, _mm512_fmadd_ps(a, b, c), a);
}
inline __m512 _mm512_maskz_fmadd_ps(uint64_t mask, __m512 a, __m512 b, __m512 c) {
    return chosen<float>(mask, _mm512_fmadd_ps(a, b, c), __m512{});
}
inline __m512 _mm512_mask3_fmadd_ps(__m512 a, __m512 b, __m512 c, uint64_t mask) {
    return chosen<float>(mask, _mm512_fmadd_ps(a, b, c), c);
}
inline __m512 _mm512_abs_ps(__m512 v) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff)));
}
inline __m512i _mm512_abs_epi8(__m512i v) {
    return _mm512_max_epi8(v, _mm512_sub_epi8(__m512i{}, v));
}
inline __m512i _mm512_abs_epi32(__m512i v) {
    return _mm512_max_epi32(v, _mm512_sub_epi32(__m512i{}, v));
}
inline __m512 _mm512_sqrt_ps(__m512 v) {
    Lanes<float, __m512> x(v);
    return each<float, __m512>([&](int i) { return std::sqrt(x.at[i]); });
}
// to integers, ties to even: the only mode that kernels use
inline __m512 _mm512_roundscale_ps(__m512 v, int) {
    Lanes<float, __m512> x(v);
    return each<float, __m512>([&](int i) { return std::nearbyint(x.at[i]); });
}
// the fraction above the next lower integer: the only mode that kernels use
inline __m512 _mm512_reduce_ps(__m512 v, int) {
    Lanes<float, __m512> x(v);
    return each<float, __m512>(
        [&](int i) { return std::isinf(x.at[i]) ? 0.0f : x.at[i] - std::floor(x.at[i]); });
}
inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {  // a * 2**floor(b)
    Lanes<float, __m512> x(a), y(b);
    return each<float, __m512>([&](int i) {
        return std::isnan(y.at[i])
                   ? y.at[i]
                   : std::ldexp(x.at[i], (int)std::floor(std::clamp(y.at[i], -1e4f, 1e4f)));
    });
}

#include "emulated_avx512_lanes.h"
