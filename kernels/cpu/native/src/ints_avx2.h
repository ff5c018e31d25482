// Vectors of 32 bytes of whole numbers, AVX2, for quantized weights. ints_avx512.h has the same names with 64 bytes. After vec_avx2.h.
#pragma once

struct Ints {
    static constexpr int BYTES = 32;
    __m256i v;
    Ints() : v(_mm256_setzero_si256()) {}
    Ints(__m256i x) : v(x) {}

    static Ints load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
    void store(void* p) const { _mm256_storeu_si256((__m256i*)p, v); }
    static Ints repeat32(int32_t x) { return _mm256_set1_epi32(x); }
    // BYTES / 4 numbers, each twice, as 16 bits
    static Ints widened_twice(const int8_t* p) {
        __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
        return _mm256_or_si256(_mm256_slli_epi32(x, 16), _mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    }
    Ints low_nibbles() const { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
    Ints high_nibbles() const { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }

    static Ints add16(Ints a, Ints b) { return _mm256_add_epi16(a.v, b.v); }
    // Bytes: u0 * s0 + u1 * s1 as 16 bits, where u is unsigned; it must fit.
    static Ints pairs(Ints u, Ints s) { return _mm256_maddubs_epi16(u.v, s.v); }
    // 16 bits: sum + a0 * b0 + a1 * b1, as 32 bits
    static Ints add_pairs(Ints sum, Ints a, Ints b) { return _mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v)); }
    // Bytes: sum + u0 * s0 + ... + u3 * s3, as 32 bits, where u is within 127
    static Ints add_fours(Ints sum, Ints u, Ints s) { return add_pairs(sum, pairs(u, s), _mm256_set1_epi16(1)); }
    static Ints magnitude(Ints x) { return _mm256_abs_epi8(x.v); }
    static Ints signed_as(Ints x, Ints y) { return _mm256_sign_epi8(x.v, y.v); }  // -x where y < 0, x where y > 0
    Vec to_floats() const { return _mm256_cvtepi32_ps(v); }
};

// x, now and not later: GCC would take many products first, and keep them in memory
inline Ints settled(Ints x) {
    asm("" : "+x"(x.v));
    return x;
}

// Whole numbers within 127, Vec::LANES of them
inline void store_whole(Vec x, int8_t* p) {
    __m256i wide = _mm256_cvtps_epi32(x.v);
    __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
}
