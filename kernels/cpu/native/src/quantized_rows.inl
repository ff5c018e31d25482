// Quantizes rows of x to integers in +-127 with a scale per group. Included by quantized.inl.

// The largest magnitude of values [size], a multiple of 16; NaN or infinity if one of them is
// either, because their bits as integers are in this order.
inline float largest_magnitude(const uint16_t* values, int64_t size) {
    return Number<uint16_t>::get(largest_of_15_bits(values, size));
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

// The sum of `size` numbers, a multiple of 32
inline int32_t sum_of(const int8_t* numbers, int64_t size) {
    return sum_of_32(numbers) + (size > 32 ? sum_of(numbers + 32, size - 32) : 0);
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
