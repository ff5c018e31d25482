// Vectors of 16 fp32 numbers, AVX-512. The names are those of vec_avx2.h.
#pragma once
#include <immintrin.h>

struct Vec {
    static constexpr int LANES = 16;
    __m512 v;
    Vec() : v(_mm512_setzero_ps()) {}
    Vec(__m512 x) : v(x) {}
    explicit Vec(float x) : v(_mm512_set1_ps(x)) {}

    static Vec load(const float* p) { return _mm512_loadu_ps(p); }
    void store(float* p) const { _mm512_storeu_ps(p, v); }

    static Vec load(const uint16_t* p) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
    }
    static Vec load_halves(const void* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    }
    void store(uint16_t* p) const {
        _mm256_storeu_si256((__m256i*)p,
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(), 16)));
    }
    Vec rounded() const {
        return _mm512_castsi512_ps(
            _mm512_and_si512(rounded_bits(), _mm512_set1_epi32((int)0xffff0000)));
    }

    static Vec first_of_pairs(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
    }
    static Vec second_of_pairs(const uint16_t* p) {
        return _mm512_castsi512_ps(
            _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)));
    }
#ifdef QUIRE_BF16
    // first, then second; the instruction turns denormal numbers into zeros.
    static void store_flushed(Vec first, Vec second, uint16_t* p) {
        _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v));
    }
    // The same in pairs, as store_pairs.
    static void store_pairs_flushed(Vec first, Vec second, uint16_t* p) {
        alignas(64) static constexpr uint16_t PLACES[] = {
            0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v);
        _mm512_storeu_si512(p, _mm512_permutexvar_epi16(_mm512_load_si512(PLACES), both));
    }
#endif
    static void store_pairs(Vec first, Vec second, uint16_t* p) {
        __m512i low = _mm512_srli_epi32(first.rounded_bits(), 16),
                high = _mm512_castps_si512(second.rounded().v);
        _mm512_storeu_si512(p, _mm512_or_si512(low, high));
    }

    static Vec max(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
    static Vec min(Vec a, Vec b) { return _mm512_min_ps(a.v, b.v); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
    static Vec round(Vec a) {
        return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    // a * 2**floor(n)
    static Vec scale_by_floor(Vec a, Vec n) { return _mm512_scalef_ps(a.v, n.v); }
    // x - floor(x), 0 where x is infinite
    Vec fraction() const { return _mm512_reduce_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
    static Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a.v, n.v); }
    static Vec keep_where_at_least(Vec value, Vec x, float least) {
        __m512 kept = _mm512_maskz_mov_ps(
            _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(least), _CMP_GE_OQ), value.v);
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), kept, x.v);
    }
    static Vec clear_where_less(Vec value, Vec x, float least) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(least), _CMP_NLT_UQ),
                                   value.v);
    }

    static void sum4(const Vec* x, float* out) {
        __m256 halves[4];
        for (int i = 0; i < 4; i++)
            halves[i] =
                _mm256_add_ps(_mm512_castps512_ps256(x[i].v), _mm512_extractf32x8_ps(x[i].v, 1));
        __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(halves[0], halves[1]),
                                     _mm256_hadd_ps(halves[2], halves[3]));
        _mm_storeu_ps(out,
                      _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
    }
    bool has_nan() const { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }
    float sum() const { return _mm512_reduce_add_ps(v); }
    float largest() const { return _mm512_reduce_max_ps(v); }

private:
    // Not vcvtneps2bf16, which flushes denormal numbers to zero.
    __m512i rounded_bits() const {
        __m512i bits = _mm512_castps_si512(v);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
        return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), up, quiet);
    }
};

// Not friends defined within the class: GCC 12 does not apply the target pragma to those.
inline Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.v, b.v); }
inline Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.v, b.v); }
inline Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.v, b.v); }
inline Vec operator/(Vec a, Vec b) { return _mm512_div_ps(a.v, b.v); }

inline Vec settled(Vec x) {
#ifndef QUIRE_EMULATED
    asm("" : "+v"(x.v));
#endif
    return x;
}

struct Words {
    static constexpr int LANES = 8;
    __m512i v;
    Words(__m512i x) : v(x) {}
    explicit Words(uint32_t x) : v(_mm512_set1_epi64(x)) {}

    static Words iota(uint32_t first) {
        constexpr int64_t ascending[LANES] = {0, 1, 2, 3, 4, 5, 6, 7};
        return _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_loadu_si512(ascending));
    }
    static Words product(Words a, Words b) { return _mm512_mul_epu32(a.v, b.v); }
    Words high() const { return _mm512_srli_epi64(v, 32); }
    static void store_pairs(Words low, Words high, uint64_t* p) {
        _mm512_storeu_si512(p, _mm512_mask_mov_epi32(low.v, 0xaaaa, _mm512_slli_epi64(high.v, 32)));
    }
};
inline Words operator^(Words a, Words b) { return _mm512_xor_si512(a.v, b.v); }

struct DotF32 {
    using Weight = float;
    using X = float;
    static constexpr int STEPS = 1, X_PER_STEP = 1;
    static Vec weights(const float* p, int) { return Vec::load(p); }
    static Vec add(Vec sum, Vec weights, const float* x) { return Vec::fma(Vec(*x), weights, sum); }
};
#ifdef QUIRE_BF16
struct DotBf16 {
    using Weight = uint16_t;
    using X = uint16_t;
    using Pairs = __m512i;
    static constexpr int STEPS = 1, X_PER_STEP = 2;  // a pair of k per instruction
    static Pairs weights(const uint16_t* p, int) { return _mm512_loadu_si512(p); }
    static Vec add(Vec sum, Pairs weights, const uint16_t* x) {
        int32_t pair;
        __builtin_memcpy(&pair, x, 4);
        return add(sum, _mm512_set1_epi32(pair), weights);
    }
    static Vec add(Vec sum, Pairs a, Pairs b) {
        return _mm512_dpbf16_ps(sum.v, (__m512bh)a, (__m512bh)b);
    }
};
#else
struct DotBf16 {
    using Weight = uint16_t;
    using X = float;
    static constexpr int STEPS = 2, X_PER_STEP = 1;
    static Vec weights(const uint16_t* p, int step) {
        return step == 0 ? Vec::first_of_pairs(p) : Vec::second_of_pairs(p);
    }
    static Vec add(Vec sum, Vec weights, const float* x) { return Vec::fma(Vec(*x), weights, sum); }
};
#endif
constexpr int REGISTERS = 32, MAX_SUMS = 28;
