// Vectors of 8 fp32 numbers, AVX2 with FMA. vec_avx512.h has the same names with 16. Kernels are
// written once in terms of these names.
#pragma once
#include <immintrin.h>

struct Vec {
    static constexpr int LANES = 8;
    __m256 v;
    Vec() : v(_mm256_setzero_ps()) {}
    Vec(__m256 x) : v(x) {}
    explicit Vec(float x) : v(_mm256_set1_ps(x)) {}

    static Vec load(const float* p) { return _mm256_loadu_ps(p); }
    void store(float* p) const { _mm256_storeu_ps(p, v); }

    static Vec load(const uint16_t* p) {  // bf16: the upper half of an fp32 number
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
    }
    static Vec load_halves(const void* p) {  // fp16
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
    }
    void store(uint16_t* p) const {
        __m256i rounded = _mm256_srli_epi32(rounded_bits(), 16);
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
        _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
    }
    // Conversion to bf16 and back: nearest, ties to even; NaN stays NaN.
    Vec rounded() const {
        return _mm256_castsi256_ps(
            _mm256_and_si256(rounded_bits(), _mm256_set1_epi32((int)0xffff0000)));
    }

    // LANES pairs of bf16: the first number of each pair, the second of each pair; and the inverse.
    static Vec first_of_pairs(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
    }
    static Vec second_of_pairs(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p),
                                                    _mm256_set1_epi32((int)0xffff0000)));
    }
    static void store_pairs(Vec first, Vec second, uint16_t* p) {
        __m256i low = _mm256_srli_epi32(first.rounded_bits(), 16),
                high = _mm256_castps_si256(second.rounded().v);
        _mm256_storeu_si256((__m256i*)p, _mm256_or_si256(low, high));
    }

    static Vec max(Vec a, Vec b) { return _mm256_max_ps(a.v, b.v); }
    static Vec min(Vec a, Vec b) { return _mm256_min_ps(a.v, b.v); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }  // a * b + c
    static Vec round(Vec a) {
        return _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    // a * 2**n for integers n in [-126, 127]
    static Vec scale_by_power(Vec a, Vec n) {
        __m256i exponent = _mm256_slli_epi32(
            _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
        return _mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent));
    }
    // value where x >= least, 0 where it is less, NaN where x is NaN
    static Vec keep_where_at_least(Vec value, Vec x, float least) {
        __m256 kept = _mm256_and_ps(value.v, _mm256_cmp_ps(x.v, _mm256_set1_ps(least), _CMP_GE_OQ));
        return _mm256_blendv_ps(kept, x.v, _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
    }
    // value where x >= least or x is NaN, 0 where it is less
    static Vec clear_where_less(Vec value, Vec x, float least) {
        return _mm256_and_ps(value.v, _mm256_cmp_ps(x.v, _mm256_set1_ps(least), _CMP_NLT_UQ));
    }

    // The sums of four vectors' lanes.
    static void sum4(const Vec* x, float* out) {
        __m256 sums =
            _mm256_hadd_ps(_mm256_hadd_ps(x[0].v, x[1].v), _mm256_hadd_ps(x[2].v, x[3].v));
        _mm_storeu_ps(out,
                      _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
    }
    bool has_nan() const { return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0; }
    float sum() const {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    float largest() const {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }

private:
    __m256i rounded_bits() const {  // the upper 16 bits of each lane are the bf16 number
        __m256i bits = _mm256_castps_si256(v);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
        __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        return _mm256_blendv_epi8(up, quiet, is_nan);
    }
};

// Not friends defined within the class: GCC 12 does not apply the target pragma to those.
inline Vec operator+(Vec a, Vec b) { return _mm256_add_ps(a.v, b.v); }
inline Vec operator-(Vec a, Vec b) { return _mm256_sub_ps(a.v, b.v); }
inline Vec operator*(Vec a, Vec b) { return _mm256_mul_ps(a.v, b.v); }
inline Vec operator/(Vec a, Vec b) { return _mm256_div_ps(a.v, b.v); }

// Forces x to be computed here: GCC would otherwise spill sums although registers are free.
inline Vec settled(Vec x) {
    asm("" : "+x"(x.v));
    return x;
}

// 32-bit words in 64-bit lanes, which leaves room for products: only the lower half of a lane is
// significant.
struct Words {
    static constexpr int LANES = 4;
    __m256i v;
    Words(__m256i x) : v(x) {}
    explicit Words(uint32_t x) : v(_mm256_set1_epi64x(x)) {}

    static Words iota(uint32_t first) {
        return _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_setr_epi64x(0, 1, 2, 3));
    }
    static Words product(Words a, Words b) { return _mm256_mul_epu32(a.v, b.v); }  // all 64 bits
    Words high() const { return _mm256_srli_epi64(v, 32); }
    // Pairs of words, low and high, in sequence.
    static void store_pairs(Words low, Words high, uint64_t* p) {
        _mm256_storeu_si256((__m256i*)p,
                            _mm256_blend_epi32(low.v, _mm256_slli_epi64(high.v, 32), 0xaa));
    }
};
inline Words operator^(Words a, Words b) { return _mm256_xor_si256(a.v, b.v); }

// How a sum of products is extended, for a linear layer's packed weights (abi.h:
// quire_pack_linear): LANES columns at one k, STEPS values of k per line of the panel. x points to
// the row's activations, as X, at that k.
struct DotF32 {
    using Weight = float;
    using X = float;
    static constexpr int STEPS = 1, X_PER_STEP = 1;
    static Vec weights(const float* p, int) { return Vec::load(p); }
    static Vec add(Vec sum, Vec weights, const float* x) { return Vec::fma(Vec(*x), weights, sum); }
};
struct DotBf16 {
    using Weight = uint16_t;
    using X = float;  // expanded once, as the weights are in registers; both conversions are exact
    static constexpr int STEPS = 2, X_PER_STEP = 1;
    static Vec weights(const uint16_t* p, int step) {
        __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
        return _mm256_castsi256_ps(
            step == 0 ? _mm256_slli_epi32(pairs, 16)
                      : _mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
    }
    static Vec add(Vec sum, Vec weights, const float* x) { return Vec::fma(Vec(*x), weights, sum); }
};
// with 12 sums GCC 12 spills some, and a block of 6 rows is a third slower
constexpr int REGISTERS = 16, MAX_SUMS = 10;
