// Vectors of 64 bytes of integers, AVX-512 with VNNI. The names are those of ints_avx2.h. Include
// after vec_avx512.h.
#pragma once

struct Ints {
    static constexpr int BYTES = 64;
    __m512i v;
    Ints() : v(_mm512_setzero_si512()) {}
    Ints(__m512i x) : v(x) {}

    static Ints load(const void* p) { return _mm512_loadu_si512(p); }
    void store(void* p) const { _mm512_storeu_si512(p, v); }
    static Ints repeat32(int32_t x) { return _mm512_set1_epi32(x); }
    Ints low_nibbles() const { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
    Ints high_nibbles() const {
        return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
    }

    // The instruction multiplies by an unsigned byte, w + 128, so sums start at -128 * the sum of
    // x.
    static Ints start_of_fours(int32_t offset) { return repeat32(offset); }
    static Ints add_fours(Ints sum, Ints w, Ints x) {
        return _mm512_dpbusd_epi32(sum.v, _mm512_xor_si512(w.v, _mm512_set1_epi8((char)0x80)), x.v);
    }
    static Ints add_nibbles(Ints sum, Ints nibbles, Ints x) {
        return _mm512_dpbusd_epi32(sum.v, nibbles.v, x.v);
    }
    static Ints factors(const int8_t* p) {
        return _mm512_and_si512(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)),
                                _mm512_set1_epi32(0xffff));
    }
    static Ints add_halves(Ints sum, Ints halves, Ints factors) {
        return _mm512_dpwssd_epi32(sum.v, halves.v, factors.v);
    }
    Ints whole() const { return v; }

    Ints even_bytes() const { return _mm512_and_si512(v, _mm512_set1_epi16(255)); }
    Ints odd_bytes() const { return _mm512_srli_epi16(v, 8); }
    Ints even_signed_bytes() const { return _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8); }
    Ints odd_signed_bytes() const { return _mm512_srai_epi16(v, 8); }
    Ints low_factors() const { return _mm512_and_si512(v, _mm512_set1_epi32(0xffff)); }
    Ints high_factors() const { return _mm512_srli_epi32(v, 16); }
    static Ints add_products(Ints sum, Ints a, Ints b) {
        return _mm512_dpwssd_epi32(sum.v, a.v, b.v);
    }
    Ints nibbles(int shift) const {
        return _mm512_and_si512(_mm512_srl_epi16(v, _mm_cvtsi32_si128(shift)),
                                _mm512_set1_epi8(15));
    }
    Ints low_six() const { return _mm512_and_si512(v, _mm512_set1_epi8(63)); }
    static Ints joined_six(Ints nibbles, Ints top) {
        return _mm512_or_si512(nibbles.v,
                               _mm512_and_si512(_mm512_srli_epi16(top.v, 2), _mm512_set1_epi8(48)));
    }
    static Ints with_bits_above(Ints nibbles, Ints high, int shift, int mask) {
        __m512i bits = _mm512_and_si512(_mm512_srl_epi16(high.v, _mm_cvtsi32_si128(shift)),
                                        _mm512_set1_epi8((char)mask));
        return _mm512_or_si512(nibbles.v, _mm512_slli_epi16(bits, 4));
    }
    Ints times(int32_t x) const { return _mm512_mullo_epi32(v, _mm512_set1_epi32(x)); }

    static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a.v, b.v); }  // 32 bits
    Vec to_floats() const { return _mm512_cvtepi32_ps(v); }
};

inline Ints settled(Ints x) {
#ifndef QUIRE_EMULATED
    asm("" : "+v"(x.v));
#endif
    return x;
}
inline void store_whole(Vec x, int8_t* p) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
