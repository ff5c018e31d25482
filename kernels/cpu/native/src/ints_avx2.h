// Vectors of 32 bytes of integers, AVX2, for quantized weights. ints_avx512.h has the same names
// with 64 bytes. Include after vec_avx2.h.
#pragma once

struct Ints {
    static constexpr int BYTES = 32;
    __m256i v;
    Ints() : v(_mm256_setzero_si256()) {}
    Ints(__m256i x) : v(x) {}

    static Ints load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
    void store(void* p) const { _mm256_storeu_si256((__m256i*)p, v); }
    static Ints repeat32(int32_t x) { return _mm256_set1_epi32(x); }
    Ints low_nibbles() const { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
    Ints high_nibbles() const {
        return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
    }

    // Bytes within +-127, in 32 bits: sum + w0 * x0 + ... + w3 * x3; and the initial value that
    // makes such a sum correct once all of x is added.
    static Ints start_of_fours(int32_t) { return Ints(); }
    static Ints add_fours(Ints sum, Ints w, Ints x) {
        return add_pairs(sum.v,
                         _mm256_maddubs_epi16(_mm256_abs_epi8(w.v), _mm256_sign_epi8(x.v, w.v)),
                         _mm256_set1_epi16(1));
    }
    // The same for unsigned nibbles, as one sum of 16 bits or as two whose total it is; the result
    // must fit.
    static Ints add_nibbles(Ints sum, Ints nibbles, Ints x) {
        return _mm256_add_epi16(sum.v, _mm256_maddubs_epi16(nibbles.v, x.v));
    }
    // BYTES / 4 factors in the form that add_halves takes: sum + the sum of nibbles * factor, in 32
    // bits
    static Ints factors(const int8_t* p) {
        __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
        return _mm256_or_si256(_mm256_slli_epi32(x, 16),
                               _mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    }
    static Ints add_halves(Ints sum, Ints halves, Ints factors) {
        return add_pairs(sum.v, halves.v, factors.v);
    }
    // A sum of add_nibbles, in 32 bits
    Ints whole() const { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }

    // For GGUF's scales: bytes as numbers of 16 bits, of which add_halves takes one as factor and
    // add_products both.
    Ints even_bytes() const { return _mm256_and_si256(v, _mm256_set1_epi16(255)); }
    Ints odd_bytes() const { return _mm256_srli_epi16(v, 8); }
    Ints even_signed_bytes() const { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
    Ints odd_signed_bytes() const { return _mm256_srai_epi16(v, 8); }
    Ints low_factors() const {
        return _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi32(0xffff)),
                               _mm256_slli_epi32(v, 16));
    }
    Ints high_factors() const {
        return _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000)),
                               _mm256_srli_epi32(v, 16));
    }
    static Ints add_products(Ints sum, Ints a, Ints b) { return add_pairs(sum.v, a.v, b.v); }
    // The low nibbles after a shift to the right
    Ints nibbles(int shift) const {
        return _mm256_and_si256(_mm256_srl_epi16(v, _mm_cvtsi32_si128(shift)),
                                _mm256_set1_epi8(15));
    }
    // Bits 0 to 5 of each byte; four bits with the upper two of another byte above them
    Ints low_six() const { return _mm256_and_si256(v, _mm256_set1_epi8(63)); }
    static Ints joined_six(Ints nibbles, Ints top) {
        return _mm256_or_si256(nibbles.v,
                               _mm256_and_si256(_mm256_srli_epi16(top.v, 2), _mm256_set1_epi8(48)));
    }
    // nibbles | (high >> shift & mask) << 4, in bytes
    static Ints with_bits_above(Ints nibbles, Ints high, int shift, int mask) {
        __m256i bits = _mm256_and_si256(_mm256_srl_epi16(high.v, _mm_cvtsi32_si128(shift)),
                                        _mm256_set1_epi8((char)mask));
        return _mm256_or_si256(nibbles.v, _mm256_slli_epi16(bits, 4));
    }
    Ints times(int32_t x) const { return _mm256_mullo_epi32(v, _mm256_set1_epi32(x)); }

    static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a.v, b.v); }  // 32 bits
    Vec to_floats() const { return _mm256_cvtepi32_ps(v); }

private:
    // 16 bits: sum + a0 * b0 + a1 * b1, in 32 bits
    static Ints add_pairs(__m256i sum, __m256i a, __m256i b) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    }
};

// Forces x to be computed here: GCC would load many operands first and spill them.
inline Ints settled(Ints x) {
    asm("" : "+x"(x.v));
    return x;
}

// Integers within +-127, Vec::LANES of them
inline void store_whole(Vec x, int8_t* p) {
    __m256i wide = _mm256_cvtps_epi32(x.v);
    __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
}
