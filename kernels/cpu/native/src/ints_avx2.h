// Vectors of 32 bytes of integers, AVX2, for quantized weights. ints_avx512.h has the same names
// with 64 bytes. Include after vec_avx2.h.
#pragma once

constexpr int MAX_EXACT_SUMS = 10;  // of 16 registers

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

    // For GGUF's blocks: add_fours in two steps; the first one depends on the weights alone
    Ints for_add_bytes() const { return v; }
    static Ints add_bytes(Ints sum, Ints w, Ints x) { return add_fours(sum, w, x); }
    // add_nibbles sums in 16 bits, so many times at most for numbers up to `most`.
    static constexpr bool SUMS_OF_HALVES = true;
    static constexpr int run_of(int most, int lines) {
        return 128 / (most + 1) < lines ? 128 / (most + 1) : lines;
    }
    // Words without their lowest bytes, as numbers in fp32
    Vec upper_as_floats() const {
        return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_set1_epi32(255), v));
    }
    // Bytes in 32 bits: byte i of each
    Ints byte(int i) const {
        return _mm256_and_si256(_mm256_srli_epi32(v, 8 * i), _mm256_set1_epi32(255));
    }
    Ints signed_byte(int i) const {
        return _mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * i), 24);
    }
    // BYTES / 4 bytes in 32 bits; 2**(x - 128) of such, as their bits: the least two are subnormal
    static Ints load_bytes(const void* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    }
    Vec halved_powers() const {
        const __m256i one = _mm256_set1_epi32(1),
                      least =
                          _mm256_slli_epi32(_mm256_add_epi32(_mm256_min_epi32(v, one), one), 21);
        return _mm256_castsi256_ps(
            _mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(v, one), 23), least));
    }
    // table [16], at an address divisible by 16, of nibbles
    Ints look_up(const int8_t* table) const {
        return _mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), v);
    }
    // Bits `shift` and shift + 1 of each byte
    Ints two_bits(int shift) const {
        return _mm256_and_si256(_mm256_srli_epi16(v, shift), _mm256_set1_epi8(3));
    }
    // Bits 0 to 5 of each byte; four bits with the upper two of another byte above them
    Ints low_six() const { return _mm256_and_si256(v, _mm256_set1_epi8(63)); }
    static Ints joined_six(Ints nibbles, Ints top) {
        return _mm256_or_si256(nibbles.v,
                               _mm256_and_si256(_mm256_srli_epi16(top.v, 2), _mm256_set1_epi8(48)));
    }
    // nibble | (high >> shift & 3) << 4 in bytes; shift is even
    static Ints with_upper_bits(Ints nibbles, Ints high, int shift) {
        const __m256i bits =
            shift < 4 ? _mm256_slli_epi16(high.v, 4 - shift) : _mm256_srli_epi16(high.v, shift - 4);
        return _mm256_or_si256(nibbles.v, _mm256_and_si256(bits, _mm256_set1_epi8(48)));
    }
    // Byte i of each word, four times; nibble + 16 in bytes where `high` has the one bit of `bits`
    Ints byte_in_all(int i) const {
        const __m256i words = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0,
                                                0x04040404, 0x08080808, 0x0c0c0c0c);
        return _mm256_shuffle_epi8(v, _mm256_add_epi8(words, _mm256_set1_epi8((char)i)));
    }
    static Ints with_fifth_bits(Ints nibbles, Ints high, Ints bits) {
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(high.v, bits.v), bits.v);
        return _mm256_or_si256(nibbles.v, _mm256_and_si256(set, _mm256_set1_epi8(16)));
    }

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
