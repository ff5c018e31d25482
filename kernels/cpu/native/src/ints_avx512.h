// Vectors of 64 bytes of whole numbers, AVX-512 with VNNI. The names are those of ints_avx2.h. After vec_avx512.h.
#pragma once

struct Ints {
    static constexpr int BYTES = 64;
    __m512i v;
    Ints() : v(_mm512_setzero_si512()) {}
    Ints(__m512i x) : v(x) {}

    static Ints load(const void* p) { return _mm512_loadu_si512(p); }
    void store(void* p) const { _mm512_storeu_si512(p, v); }
    static Ints repeat32(int32_t x) { return _mm512_set1_epi32(x); }
    static Ints widened_twice(const int8_t* p) {
        __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
        return _mm512_or_si512(_mm512_slli_epi32(x, 16), _mm512_and_si512(x, _mm512_set1_epi32(0xffff)));
    }
    Ints low_nibbles() const { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
    Ints high_nibbles() const { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }

    static Ints add16(Ints a, Ints b) { return _mm512_add_epi16(a.v, b.v); }
    static Ints pairs(Ints u, Ints s) { return _mm512_maddubs_epi16(u.v, s.v); }
    static Ints add_pairs(Ints sum, Ints a, Ints b) { return _mm512_dpwssd_epi32(sum.v, a.v, b.v); }
    static Ints add_fours(Ints sum, Ints u, Ints s) { return _mm512_dpbusd_epi32(sum.v, u.v, s.v); }
    static Ints magnitude(Ints x) { return _mm512_abs_epi8(x.v); }
    static Ints signed_as(Ints x, Ints y) { return _mm512_mask_sub_epi8(x.v, _mm512_movepi8_mask(y.v), _mm512_setzero_si512(), x.v); }
    Vec to_floats() const { return _mm512_cvtepi32_ps(v); }
};

inline Ints settled(Ints x) {
#ifndef QUIRE_EMULATED
    asm("" : "+v"(x.v));
#endif
    return x;
}
inline void store_whole(Vec x, int8_t* p) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v))); }
