// Vectors of 64 bytes of integers, AVX-512 with VNNI. The names are those of ints_avx2.h. Include
// after vec_avx512.h.
#pragma once

constexpr int MAX_EXACT_SUMS = 16;  // of 32 registers

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
    static Ints add_fours(Ints sum, Ints w, Ints x) { return add_bytes(sum, w.for_add_bytes(), x); }
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

    // For GGUF's blocks: add_fours in two steps; the first one depends on the weights alone
    Ints for_add_bytes() const { return _mm512_xor_si512(v, _mm512_set1_epi8((char)0x80)); }
    Ints minus_bytes(int n) const { return _mm512_sub_epi8(v, _mm512_set1_epi8((char)n)); }
    static Ints add_bytes(Ints sum, Ints w, Ints x) { return _mm512_dpbusd_epi32(sum.v, w.v, x.v); }
    static constexpr bool SUMS_OF_HALVES = false;
    static constexpr int run_of(int, int lines) { return lines; }
    Vec upper_as_floats() const {
        return _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(255), v));
    }
    Ints byte(int i) const {
        return _mm512_and_si512(_mm512_srli_epi32(v, 8 * i), _mm512_set1_epi32(255));
    }
    Ints signed_byte(int i) const {
        return _mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * i), 24);
    }
    static Ints load_bytes(const void* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    }
    Vec halved_powers() const {
        const __m512i one = _mm512_set1_epi32(1),
                      least =
                          _mm512_slli_epi32(_mm512_add_epi32(_mm512_min_epi32(v, one), one), 21);
        return _mm512_castsi512_ps(
            _mm512_max_epi32(_mm512_slli_epi32(_mm512_sub_epi32(v, one), 23), least));
    }
    Ints look_up(const int8_t* table) const {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)),
                                   v);
    }
    Ints two_bits(int shift) const {
        return _mm512_and_si512(_mm512_srli_epi16(v, shift), _mm512_set1_epi8(3));
    }
    Ints low_six() const { return _mm512_and_si512(v, _mm512_set1_epi8(63)); }
    static Ints joined_six(Ints nibbles, Ints top) {
        return _mm512_or_si512(nibbles.v,
                               _mm512_and_si512(_mm512_srli_epi16(top.v, 2), _mm512_set1_epi8(48)));
    }
    static Ints with_upper_bits(Ints nibbles, Ints high, int shift) {
        const __m512i bits =
            shift < 4 ? _mm512_slli_epi16(high.v, 4 - shift) : _mm512_srli_epi16(high.v, shift - 4);
        return _mm512_or_si512(nibbles.v, _mm512_and_si512(bits, _mm512_set1_epi8(48)));
    }
    Ints byte_in_all(int i) const {
        const __m512i words =
            _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
        return _mm512_shuffle_epi8(v, _mm512_add_epi8(words, _mm512_set1_epi8((char)i)));
    }
    static Ints with_fifth_bits(Ints nibbles, Ints high, Ints bits) {
        return _mm512_mask_add_epi8(nibbles.v, _mm512_test_epi8_mask(high.v, bits.v), nibbles.v,
                                    _mm512_set1_epi8(16));
    }

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
