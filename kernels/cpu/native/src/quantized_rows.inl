// Quantizes rows of x to integers in +-127 with a scale per group. Included by quantized.inl.

// The largest magnitude of values [size], a multiple of 16; NaN or infinity if one of them is
// either, because their bits as integers are in this order.
inline float largest_magnitude(const uint16_t* values, int64_t size) {
    __m256i most = _mm256_setzero_si256();
    for (int64_t i = 0; i < size; i += 16)
        most = _mm256_max_epu16(most,
                                _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(values + i)),
                                                 _mm256_set1_epi16(0x7fff)));
    const __m128i of_8 =
        _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    // of the complements
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(of_8, _mm_set1_epi16(-1)));
    return Number<uint16_t>::get((uint16_t)~_mm_extract_epi16(least, 0));
}
inline float largest_magnitude(const float* values, int64_t size) {
    Vec largest, spoilt;
    for (int64_t i = 0; i < size; i += Vec::LANES) {
        Vec v = Vec::load(values + i);
        largest = Vec::max(largest, magnitude(v));
        spoilt = Vec::fma(v, Vec(), spoilt);  // NaN once a number is not finite
    }
    return spoilt.has_nan() ? NAN : largest.largest();
}

// Quantization to integers in +-127 of values [size], a multiple of 16: numbers = values * factor,
// values = numbers * scale. If a value is not finite, the scale is NaN and so are the row's
// results, whatever the numbers are.
struct Scaling {
    float scale;
    Vec factor;

    template <typename T>
    ALWAYS_INLINE Scaling(const T* values, int64_t size) {
        const float most = largest_magnitude(values, size);
        const bool counts = most > LEAST;
        scale = !std::isfinite(most) ? NAN : counts ? most / 127 : 0;
        factor = Vec(counts ? 127 / most : 0);
    }
    template <typename T>
    void store(const T* values, int64_t size, int8_t* to) const {
        for (int64_t i = 0; i < size; i += Vec::LANES)
            store_whole(Vec::load(values + i) * factor, to + i);
    }
};

// The sum of `size` numbers, a multiple of 32, with instructions of every processor that has AVX2
inline int32_t sum_of(const int8_t* numbers, int64_t size) {
    if (size > 32) return sum_of(numbers, 32) + sum_of(numbers + 32, size - 32);
    // each plus 128
    __m256i from_0 =
        _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)numbers), _mm256_set1_epi8((char)0x80));
    __m256i of_8 = _mm256_sad_epu8(from_0, _mm256_setzero_si256());
    __m128i of_16 = _mm_add_epi64(_mm256_castsi256_si128(of_8), _mm256_extracti128_si256(of_8, 1));
    return _mm_cvtsi128_si32(_mm_add_epi64(of_16, _mm_unpackhi_epi64(of_16, of_16))) - 128 * 32;
}

// x in the layout of a Dot: rows [groups][GROUP] padded with zeros, a scale per UNDER_SCALE of
// them, and the terms that its numbers' sums give: they remove the offsets of the weights' numbers.
template <typename Dot>
struct QuantizedRows {
    static constexpr int64_t GROUP = Dot::GROUP, UNDER_SCALE = Dot::UNDER_SCALE,
                             SCALES = GROUP / UNDER_SCALE, TERMS = Dot::TERMS;  // per group

    int64_t groups;
    int8_t* numbers;
    float* scales;
    int32_t* all_terms;

    QuantizedRows(int8_t* numbers, float* scales, int32_t* terms, int64_t groups)
        : groups(groups), numbers(numbers), scales(scales), all_terms(terms) {}
    QuantizedRows(void* memory, int64_t rows, int64_t groups)
        : groups(groups),
          numbers((int8_t*)memory),
          scales((float*)(numbers + rows * groups * GROUP)),
          all_terms((int32_t*)(scales + rows * groups * SCALES)) {}
    static int64_t bytes(int64_t rows, int64_t groups) {
        return rows * groups * (GROUP + SCALES * sizeof(float) + TERMS * sizeof(int32_t));
    }

    QuantizedRows from(int64_t row) const {
        QuantizedRows rest = *this;
        rest.numbers += row * groups * GROUP, rest.scales += row * groups * SCALES,
            rest.all_terms += row * groups * TERMS;
        return rest;
    }

    template <typename Other>
    QuantizedRows<Other> as() const {
        static_assert(Other::GROUP == GROUP && Other::TERMS == TERMS);
        return {numbers, scales, all_terms, groups};
    }

    int32_t term(int64_t row, int64_t group, int64_t i) const {
        return all_terms[(row * groups + group) * TERMS + i];
    }

    template <typename T>
    __attribute__((noinline)) void quantize(int64_t row, const T* x, int64_t size) {
        const int64_t begin = row * groups, end = begin + groups;
        for (int64_t group = begin; group < end; group++, x += GROUP, size -= GROUP) {
            if (size >= GROUP) {
                quantize_group(group, x);
            } else {
                float padded[GROUP] = {};
                copy_numbers(x, padded, size);
                quantize_group(group, padded);
            }
        }
        // after all stores: a load of data just written by smaller stores waits for them
        for (int64_t group = begin; group < end; group++)
            Dot::terms(numbers + group * GROUP, scales + group * SCALES, all_terms + group * TERMS);
    }

private:
    template <typename T>
    void quantize_group(int64_t group, const T* x) {
        for (int64_t i = 0; i < SCALES; i++) {
            const Scaling scaling(x + i * UNDER_SCALE, UNDER_SCALE);
            scaling.store(x + i * UNDER_SCALE, UNDER_SCALE,
                          numbers + group * GROUP + i * UNDER_SCALE);
            scales[group * SCALES + i] = scaling.scale;
        }
    }
};
