// AVX-512 (F, BW, VL, DQ, VNNI, BF16) by way of AVX2, for tests on processors without it: the same names, as functions.
// isa_avx512.cpp and isa_amx.cpp include this inside their namespace when QUIRE_EMULATED is defined, where these names hide the compiler's own.
// A kernel that uses an intrinsic which is missing here does not compile ("target specific option mismatch"): add it, from Intel's description.

// What the compiler defines when it targets the real thing, for kernels that ask.
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
V chosen(uint64_t mask, V yes, V no) {  // lane i of yes where bit i is set
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
// Masked lanes are neither read nor written: a page that is not there may lie behind them.
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
    if ((uintptr_t)p % sizeof(V)) std::abort();  // the processor faults
}

// Both halves at once, by the AVX2 instruction.
#define HALVES(type, half, name, narrow)                          \
    inline type name(type a, type b) {                            \
        half x[2], y[2];                                          \
        std::memcpy(x, &a, 64), std::memcpy(y, &b, 64);           \
        x[0] = narrow(x[0], y[0]), x[1] = narrow(x[1], y[1]);     \
        return unaligned<type>(x);                                \
    }
#define HALVES_3(name, narrow)                                                          \
    inline __m512 name(__m512 a, __m512 b, __m512 c) {                                  \
        __m256 x[2], y[2], z[2];                                                        \
        std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);         \
        x[0] = narrow(x[0], y[0], z[0]), x[1] = narrow(x[1], y[1], z[1]);               \
        return unaligned<__m512>(x);                                                    \
    }
#define HALVES_SHIFT(name, narrow)                                \
    inline __m512i name(__m512i a, unsigned count) {              \
        __m256i x[2];                                             \
        std::memcpy(x, &a, 64);                                   \
        x[0] = narrow(x[0], (int)count), x[1] = narrow(x[1], (int)count); \
        return unaligned<__m512i>(x);                             \
    }
#define MASKED(element, type, name, merge, zero)                                                                            \
    inline type merge(type otherwise, uint64_t mask, type a, type b) { return chosen<element>(mask, name(a, b), otherwise); } \
    inline type zero(uint64_t mask, type a, type b) { return chosen<element>(mask, name(a, b), type{}); }

// ---------------------------------------------------------------- loads, stores, constants

inline __m512 _mm512_loadu_ps(const void* p) { return unaligned<__m512>(p); }
inline __m512i _mm512_loadu_si512(const void* p) { return unaligned<__m512i>(p); }
inline __m512i _mm512_loadu_epi8(const void* p) { return unaligned<__m512i>(p); }
inline __m512i _mm512_loadu_epi16(const void* p) { return unaligned<__m512i>(p); }
inline __m512i _mm512_loadu_epi32(const void* p) { return unaligned<__m512i>(p); }
inline __m512 _mm512_load_ps(const void* p) { return check_aligned<__m512>(p), unaligned<__m512>(p); }
inline __m512i _mm512_load_si512(const void* p) { return check_aligned<__m512i>(p), unaligned<__m512i>(p); }
inline void _mm512_storeu_ps(void* p, __m512 v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_storeu_si512(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_storeu_epi8(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_storeu_epi16(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_storeu_epi32(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }
inline void _mm512_store_ps(void* p, __m512 v) { check_aligned<__m512>(p), std::memcpy(p, &v, sizeof v); }
inline void _mm512_store_si512(void* p, __m512i v) { check_aligned<__m512i>(p), std::memcpy(p, &v, sizeof v); }
inline void _mm512_stream_ps(void* p, __m512 v) { _mm512_store_ps(p, v); }
inline void _mm512_stream_si512(void* p, __m512i v) { _mm512_store_si512(p, v); }

#define MASKED_MEMORY(element, type, prefix, suffix)                                                                                            \
    inline type prefix##_maskz_loadu_##suffix(uint64_t mask, const void* p) { return masked_load<element>(type{}, mask, p); }                   \
    inline type prefix##_mask_loadu_##suffix(type otherwise, uint64_t mask, const void* p) { return masked_load<element>(otherwise, mask, p); } \
    inline void prefix##_mask_storeu_##suffix(void* p, uint64_t mask, type v) { masked_store<element>(p, mask, v); }
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
inline __m512 _mm512_set1_ps(float x) { return each<float, __m512>([=](int) { return x; }); }
inline __m512i _mm512_set1_epi8(int8_t x) { return each<int8_t, __m512i>([=](int) { return x; }); }
inline __m512i _mm512_set1_epi16(int16_t x) { return each<int16_t, __m512i>([=](int) { return x; }); }
inline __m512i _mm512_set1_epi32(int32_t x) { return each<int32_t, __m512i>([=](int) { return x; }); }
inline __m512i _mm512_set1_epi64(int64_t x) { return each<int64_t, __m512i>([=](int) { return x; }); }
// From the last lane to the first; the compiler's _mm512_setr_* are macros in terms of these.
inline __m512i _mm512_set_epi32(int p, int o, int n, int m, int l, int k, int j, int i, int h, int g, int f, int e, int d, int c, int b, int a) {
    int32_t lanes[16] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
    return unaligned<__m512i>(lanes);
}
inline __m512i _mm512_set_epi64(int64_t h, int64_t g, int64_t f, int64_t e, int64_t d, int64_t c, int64_t b, int64_t a) {
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
inline __m512i _mm512_broadcastd_epi32(__m128i v) { return _mm512_set1_epi32(_mm_cvtsi128_si32(v)); }

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
MASKED(float, __m512, _mm512_add_ps, _mm512_mask_add_ps, _mm512_maskz_add_ps)
MASKED(float, __m512, _mm512_sub_ps, _mm512_mask_sub_ps, _mm512_maskz_sub_ps)
MASKED(float, __m512, _mm512_mul_ps, _mm512_mask_mul_ps, _mm512_maskz_mul_ps)
MASKED(float, __m512, _mm512_max_ps, _mm512_mask_max_ps, _mm512_maskz_max_ps)
MASKED(int32_t, __m512i, _mm512_add_epi32, _mm512_mask_add_epi32, _mm512_maskz_add_epi32)
MASKED(int32_t, __m512i, _mm512_sub_epi32, _mm512_mask_sub_epi32, _mm512_maskz_sub_epi32)
MASKED(int8_t, __m512i, _mm512_sub_epi8, _mm512_mask_sub_epi8, _mm512_maskz_sub_epi8)
inline __m512 _mm512_mask_fmadd_ps(__m512 a, uint64_t mask, __m512 b, __m512 c) { return chosen<float>(mask, _mm512_fmadd_ps(a, b, c), a); }
inline __m512 _mm512_maskz_fmadd_ps(uint64_t mask, __m512 a, __m512 b, __m512 c) { return chosen<float>(mask, _mm512_fmadd_ps(a, b, c), __m512{}); }
inline __m512 _mm512_mask3_fmadd_ps(__m512 a, __m512 b, __m512 c, uint64_t mask) { return chosen<float>(mask, _mm512_fmadd_ps(a, b, c), c); }
inline __m512 _mm512_abs_ps(__m512 v) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff))); }
inline __m512i _mm512_abs_epi8(__m512i v) { return _mm512_max_epi8(v, _mm512_sub_epi8(__m512i{}, v)); }
inline __m512i _mm512_abs_epi32(__m512i v) { return _mm512_max_epi32(v, _mm512_sub_epi32(__m512i{}, v)); }
inline __m512 _mm512_sqrt_ps(__m512 v) {
    Lanes<float, __m512> x(v);
    return each<float, __m512>([&](int i) { return std::sqrt(x.at[i]); });
}
inline __m512 _mm512_roundscale_ps(__m512 v, int) {  // to whole numbers, ties to even: the only use here
    Lanes<float, __m512> x(v);
    return each<float, __m512>([&](int i) { return std::nearbyint(x.at[i]); });
}
inline __m512 _mm512_reduce_ps(__m512 v, int) {  // what is left of numbers over whole ones below: the only use here
    Lanes<float, __m512> x(v);
    return each<float, __m512>([&](int i) { return std::isinf(x.at[i]) ? 0.0f : x.at[i] - std::floor(x.at[i]); });
}
inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {  // a * 2**floor(b)
    Lanes<float, __m512> x(a), y(b);
    return each<float, __m512>([&](int i) { return std::isnan(y.at[i]) ? y.at[i] : std::ldexp(x.at[i], (int)std::floor(std::clamp(y.at[i], -1e4f, 1e4f))); });
}

// ---------------------------------------------------------------- comparisons, choices, masks

inline bool compare(float a, float b, int predicate) {
    switch (predicate) {
        case _CMP_EQ_OQ: return a == b;
        case _CMP_LT_OS: case _CMP_LT_OQ: return a < b;
        case _CMP_LE_OS: case _CMP_LE_OQ: return a <= b;
        case _CMP_UNORD_Q: return std::isnan(a) || std::isnan(b);
        case _CMP_ORD_Q: return !std::isnan(a) && !std::isnan(b);
        case _CMP_NEQ_UQ: return !(a == b);
        case _CMP_NLT_UQ: case _CMP_NLT_US: return !(a < b);
        case _CMP_NLE_UQ: case _CMP_NLE_US: return !(a <= b);
        case _CMP_GE_OQ: case _CMP_GE_OS: return a >= b;
        case _CMP_GT_OQ: case _CMP_GT_OS: return a > b;
        case _CMP_NGE_UQ: case _CMP_NGE_US: return !(a >= b);
        case _CMP_NGT_UQ: case _CMP_NGT_US: return !(a > b);
    }
    std::abort();  // add it
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int p) { return mask_where<float>(a, b, [=](float x, float y) { return compare(x, y, p); }); }
inline __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int p) { return mask & _mm512_cmp_ps_mask(a, b, p); }
#define COMPARE_LANES(element, mask_type, suffix)                                                                                       \
    inline mask_type _mm512_cmpeq_##suffix##_mask(__m512i a, __m512i b) { return mask_where<element>(a, b, [](element x, element y) { return x == y; }); }  \
    inline mask_type _mm512_cmpneq_##suffix##_mask(__m512i a, __m512i b) { return mask_where<element>(a, b, [](element x, element y) { return x != y; }); } \
    inline mask_type _mm512_cmplt_##suffix##_mask(__m512i a, __m512i b) { return mask_where<element>(a, b, [](element x, element y) { return x < y; }); }   \
    inline mask_type _mm512_cmple_##suffix##_mask(__m512i a, __m512i b) { return mask_where<element>(a, b, [](element x, element y) { return x <= y; }); }  \
    inline mask_type _mm512_cmpgt_##suffix##_mask(__m512i a, __m512i b) { return mask_where<element>(a, b, [](element x, element y) { return x > y; }); }   \
    inline mask_type _mm512_cmpge_##suffix##_mask(__m512i a, __m512i b) { return mask_where<element>(a, b, [](element x, element y) { return x >= y; }); }
COMPARE_LANES(int8_t, __mmask64, epi8)
COMPARE_LANES(int16_t, __mmask32, epi16)
COMPARE_LANES(int32_t, __mmask16, epi32)
COMPARE_LANES(uint32_t, __mmask16, epu32)
inline __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) { return mask_where<int32_t>(a, b, [](int32_t x, int32_t y) { return (x & y) != 0; }); }
inline __mmask64 _mm512_movepi8_mask(__m512i a) { return mask_where<int8_t>(a, a, [](int8_t x, int8_t) { return x < 0; }); }
inline __m512 _mm512_mask_blend_ps(uint64_t mask, __m512 no, __m512 yes) { return chosen<float>(mask, yes, no); }
inline __m512i _mm512_mask_blend_epi8(uint64_t mask, __m512i no, __m512i yes) { return chosen<int8_t>(mask, yes, no); }
inline __m512i _mm512_mask_blend_epi16(uint64_t mask, __m512i no, __m512i yes) { return chosen<int16_t>(mask, yes, no); }
inline __m512i _mm512_mask_blend_epi32(uint64_t mask, __m512i no, __m512i yes) { return chosen<int32_t>(mask, yes, no); }
inline __m512 _mm512_mask_mov_ps(__m512 no, uint64_t mask, __m512 yes) { return chosen<float>(mask, yes, no); }
inline __m512 _mm512_maskz_mov_ps(uint64_t mask, __m512 yes) { return chosen<float>(mask, yes, __m512{}); }
inline __m512i _mm512_mask_mov_epi32(__m512i no, uint64_t mask, __m512i yes) { return chosen<int32_t>(mask, yes, no); }
inline __m512i _mm512_maskz_mov_epi8(uint64_t mask, __m512i yes) { return chosen<int8_t>(mask, yes, __m512i{}); }
inline __m512i _mm512_maskz_mov_epi16(uint64_t mask, __m512i yes) { return chosen<int16_t>(mask, yes, __m512i{}); }
inline __m512i _mm512_maskz_mov_epi32(uint64_t mask, __m512i yes) { return chosen<int32_t>(mask, yes, __m512i{}); }
inline __m512i _mm512_maskz_set1_epi32(uint64_t mask, int x) { return chosen<int32_t>(mask, _mm512_set1_epi32(x), __m512i{}); }
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
inline __m512i _mm512_maskz_cvtepu16_epi32(uint64_t mask, __m256i v) { return chosen<int32_t>(mask, _mm512_cvtepu16_epi32(v), __m512i{}); }
inline __m256i _mm512_cvtepi32_epi16(__m512i v) { return converted<int16_t, int32_t, __m256i>(v); }
inline __m128i _mm512_cvtepi32_epi8(__m512i v) { return converted<int8_t, int32_t, __m128i>(v); }
inline __m256i _mm512_cvtepi16_epi8(__m512i v) { return converted<int8_t, int16_t, __m256i>(v); }
template <typename To>
int32_t saturated(int32_t x) { return std::clamp<int32_t>(x, std::numeric_limits<To>::min(), std::numeric_limits<To>::max()); }
inline __m128i _mm512_cvtsepi32_epi8(__m512i v) {
    Lanes<int32_t, __m512i> x(v);
    return each<int8_t, __m128i>([&](int i) { return saturated<int8_t>(x.at[i]); });
}
inline void _mm512_mask_cvtepi32_storeu_epi16(void* p, uint64_t mask, __m512i v) { masked_store<int16_t>(p, mask, _mm512_cvtepi32_epi16(v)); }
inline void _mm512_mask_cvtepi32_storeu_epi8(void* p, uint64_t mask, __m512i v) { masked_store<int8_t>(p, mask, _mm512_cvtepi32_epi8(v)); }

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
using Index = std::conditional_t<BYTES == 2, uint16_t, std::conditional_t<BYTES == 4, uint32_t, uint64_t>>;
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
inline __m512i _mm512_permutexvar_epi32(__m512i index, __m512i v) { return permuted<int32_t>(v, index); }
inline __m512i _mm512_permutexvar_epi16(__m512i index, __m512i v) { return permuted<int16_t>(v, index); }
inline __m512i _mm512_permutexvar_epi64(__m512i index, __m512i v) { return permuted<int64_t>(v, index); }
inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b) { return permuted<float>(a, index, b); }
inline __m512i _mm512_permutex2var_epi32(__m512i a, __m512i index, __m512i b) { return permuted<int32_t>(a, index, b); }
inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) { return permuted<int16_t>(a, index, b); }
inline __m512i _mm512_permutex2var_epi64(__m512i a, __m512i index, __m512i b) { return permuted<int64_t>(a, index, b); }
template <typename E, typename V>
V shuffled(V a, V b, int imm) {  // pieces 0 and 1 from a, 2 and 3 from b
    V r;
    for (int i = 0; i < 4; i++) r = with_part(i ? r : V{}, part<E>(i < 2 ? a : b, imm >> 2 * i & 3), i);
    return r;
}
inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int imm) { return shuffled<__m128i>(a, b, imm); }
inline __m512i _mm512_shuffle_i64x2(__m512i a, __m512i b, int imm) { return shuffled<__m128i>(a, b, imm); }
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int imm) { return shuffled<__m128>(a, b, imm); }
inline __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int imm) {
    Lanes<float, __m512> x(a), y(b);
    return each<float, __m512>([&](int i) { return (i % 4 < 2 ? x : y).at[i / 4 * 4 + (imm >> 2 * (i % 4) & 3)]; });
}
inline __m512i _mm512_shuffle_epi32(__m512i a, int imm) {
    Lanes<int32_t, __m512i> x(a);
    return each<int32_t, __m512i>([&](int i) { return x.at[i / 4 * 4 + (imm >> 2 * (i % 4) & 3)]; });
}

// ---------------------------------------------------------------- sums over lanes: in halves, as the compilers' own

template <typename E, typename V, typename F>
E reduced(V v, F op) {
    Lanes<E, V> x(v);
    for (int n = x.COUNT / 2; n; n /= 2)
        for (int i = 0; i < n; i++) x.at[i] = op(x.at[i], x.at[i + n]);
    return x.at[0];
}
inline float _mm512_reduce_add_ps(__m512 v) { return reduced<float>(v, [](float a, float b) { return a + b; }); }
inline float _mm512_reduce_max_ps(__m512 v) { return reduced<float>(v, [](float a, float b) { return a > b ? a : b; }); }
inline float _mm512_reduce_min_ps(__m512 v) { return reduced<float>(v, [](float a, float b) { return a < b ? a : b; }); }
inline int _mm512_reduce_add_epi32(__m512i v) { return (int)reduced<uint32_t>(v, [](uint32_t a, uint32_t b) { return a + b; }); }
inline int _mm512_reduce_max_epi32(__m512i v) { return reduced<int32_t>(v, [](int32_t a, int32_t b) { return std::max(a, b); }); }
inline int _mm512_reduce_min_epi32(__m512i v) { return reduced<int32_t>(v, [](int32_t a, int32_t b) { return std::min(a, b); }); }

// ---------------------------------------------------------------- VNNI

template <typename V>
V dot_bytes(V sum, V a, V b) {  // four products of an unsigned and a signed byte to each lane
    Lanes<uint32_t, V> s(sum);
    Lanes<uint8_t, V> x(a);
    Lanes<int8_t, V> y(b);
    return each<uint32_t, V>([&](int i) {
        for (int j = 4 * i; j < 4 * i + 4; j++) s.at[i] += (uint32_t)(x.at[j] * y.at[j]);
        return s.at[i];
    });
}
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) { return dot_bytes(sum, a, b); }
#undef _mm256_dpbusd_epi32  // a macro since it has two encodings
inline __m256i _mm256_dpbusd_epi32(__m256i sum, __m256i a, __m256i b) { return dot_bytes(sum, a, b); }
inline __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }

// ---------------------------------------------------------------- BF16. Denormal numbers count as zero here, coming and going.

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
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
    return std::isnan(x) ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float fma_flushed(float a, float b, float c) { return flushed(std::fma(flushed(a), flushed(b), flushed(c))); }

inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {  // the upper of each pair first, as Intel's manual has it
    Lanes<float, __m512> s(sum);
    Lanes<uint16_t, __m512bh> x(a), y(b);
    return each<float, __m512>([&](int i) {
        float upper = fma_flushed(from_bf16(x.at[2 * i + 1]), from_bf16(y.at[2 * i + 1]), s.at[i]);
        return fma_flushed(from_bf16(x.at[2 * i]), from_bf16(y.at[2 * i]), upper);
    });
}
inline __m512 _mm512_mask_dpbf16_ps(__m512 sum, uint64_t mask, __m512bh a, __m512bh b) { return chosen<float>(mask, _mm512_dpbf16_ps(sum, a, b), sum); }
inline __m256bh _mm512_cvtneps_pbh(__m512 v) {
    Lanes<float, __m512> x(v);
    return each<uint16_t, __m256bh>([&](int i) { return to_bf16(x.at[i]); });
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
    Lanes<float, __m512> x(lower), y(upper);
    return each<uint16_t, __m512bh>([&](int i) { return to_bf16(i < 16 ? x.at[i] : y.at[i - 16]); });
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
