// Eight 32-bit words, and steps on a few numbers of fixed count, which AVX2 and AVX-512 share.
// eight_neon.h has the same names.
#pragma once
#include <immintrin.h>

struct Eight {
    __m256i v;
    Eight() = default;
    Eight(__m256i x) : v(x) {}

    static Eight load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
    void store(void* p) const { _mm256_storeu_si256((__m256i*)p, v); }
    void store_four(void* p) const { _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(v)); }

    // Words `at` to at + 3 of eight rows: columns[i] has word at + i of each.
    static void transpose(const void* const* rows, int64_t at, Eight (&columns)[4]) {
        __m256i x[4];
        for (int j = 0; j < 4; j++) {
            __m128i low = _mm_loadu_si128((const __m128i*)((const uint32_t*)rows[j] + at));
            __m128i high = _mm_loadu_si128((const __m128i*)((const uint32_t*)rows[j + 4] + at));
            x[j] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
        }
        __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
        __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
        columns[0] = _mm256_unpacklo_epi64(a, c), columns[1] = _mm256_unpackhi_epi64(a, c);
        columns[2] = _mm256_unpacklo_epi64(b, d), columns[3] = _mm256_unpackhi_epi64(b, d);
    }

    // Of pairs of bf16: the first of each, or the second, in fp32; and the inverse.
    Eight first_of_pairs() const { return _mm256_slli_epi32(v, 16); }
    Eight second_of_pairs() const {
        return _mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000));
    }
    static Eight pairs(Eight first, Eight second) {  // exactly bf16
        return _mm256_or_si256(_mm256_srli_epi32(first.v, 16), second.v);
    }
    // Byte I of each word, signed, in fp32
    template <int I>
    Eight float_of_byte() const {
        return _mm256_castps_si256(
            _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * I), 24)));
    }
};

// Eight integers in fp32; sixteen in bf16
inline __m256 floats_of_8(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
inline void widen_8(const int8_t* from, float* out) { _mm256_storeu_ps(out, floats_of_8(from)); }
inline void widen_16(const int8_t* from, uint16_t* out) {
    __m256i low = _mm256_srli_epi32(_mm256_castps_si256(floats_of_8(from)), 16);
    __m256i high = _mm256_srli_epi32(_mm256_castps_si256(floats_of_8(from + 8)), 16);
    _mm256_storeu_si256((__m256i*)out,
                        _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}

// Eight pairs of numbers of two rows
inline void interleave_8(const uint16_t* first, const uint16_t* second, uint16_t* out) {
    __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)first));
    __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)second));
    _mm256_storeu_si256((__m256i*)out, _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
}

// Rows of four fp32 numbers become columns. Addresses are divisible by 16.
inline void transpose_4(const float* from, int64_t from_row, float* to, int64_t to_row) {
    __m128 x[4];
    for (int row = 0; row < 4; row++) x[row] = _mm_load_ps(from + row * from_row);
    _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
    for (int column = 0; column < 4; column++) _mm_store_ps(to + column * to_row, x[column]);
}

// a, b = a + b, a - b, eight of each
inline void add_and_subtract_8(float* a, float* b) {
    __m256 x = _mm256_loadu_ps(a), y = _mm256_loadu_ps(b);
    _mm256_storeu_ps(a, _mm256_add_ps(x, y));
    _mm256_storeu_ps(b, _mm256_sub_ps(x, y));
}
// The same for strides of 4, 2 and 1 within eight numbers: they change places, and the later ones
// their sign.
inline void hadamard_8(float* at) {
    const __m256 four = _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f),
                 two = _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f),
                 one = _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f);
    __m256 v = _mm256_loadu_ps(at);
    v = _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, four));
    v = _mm256_add_ps(_mm256_permute_ps(v, 0x4e), _mm256_xor_ps(v, two));
    v = _mm256_add_ps(_mm256_permute_ps(v, 0xb1), _mm256_xor_ps(v, one));
    _mm256_storeu_ps(at, v);
}

inline float float_of_half(uint16_t bits) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

// The largest of the lower 15 bits of numbers [size], a multiple of 16
inline uint16_t largest_of_15_bits(const uint16_t* numbers, int64_t size) {
    __m256i most = _mm256_setzero_si256();
    for (int64_t i = 0; i < size; i += 16)
        most = _mm256_max_epu16(most,
                                _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(numbers + i)),
                                                 _mm256_set1_epi16(0x7fff)));
    const __m128i of_8 =
        _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    // of the complements
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(of_8, _mm_set1_epi16(-1)));
    return (uint16_t)~_mm_extract_epi16(least, 0);
}

// The sums of 32 numbers: by eight, and of all
inline void sums_of_8(const int8_t* numbers, int32_t* sums) {
    alignas(32) int64_t four[4];  // of numbers plus 128
    __m256i from_0 =
        _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)numbers), _mm256_set1_epi8((char)0x80));
    _mm256_store_si256((__m256i*)four, _mm256_sad_epu8(from_0, _mm256_setzero_si256()));
    for (int64_t j = 0; j < 4; j++) sums[j] = (int32_t)four[j] - 128 * 8;
}
inline int32_t sum_of_32(const int8_t* numbers) {
    // each plus 128
    __m256i from_0 =
        _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)numbers), _mm256_set1_epi8((char)0x80));
    __m256i of_8 = _mm256_sad_epu8(from_0, _mm256_setzero_si256());
    __m128i of_16 = _mm_add_epi64(_mm256_castsi256_si128(of_8), _mm256_extracti128_si256(of_8, 1));
    return _mm_cvtsi128_si32(_mm_add_epi64(of_16, _mm_unpackhi_epi64(of_16, of_16))) - 128 * 32;
}
