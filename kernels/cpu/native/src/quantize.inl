// Quantizes and packs a linear layer's weight (abi.h: Quantize). Symmetric, in groups along k; each
// group of an output has a scale in bf16. Panels of 16 outputs are laid out as the kernels of
// quantized.inl read them: [panel][group], with blocks of numbers in one array and their scales in
// another.
//
// int8  Groups of 256; the last may have 64, 128 or 192. Block [64][16 outputs][4]: k / 4, k % 4.
//       Scales [16] bf16. The scale maps the group's largest weight to 127.
// int4  Groups of 64. Block [8][16 outputs][4]: byte (k / 4, k % 4) of the group's first half in
//       the lower nibble, of its second half in the upper one, each plus 8. Scales [2][16] int8,
//       then [16] bf16: weight = number * its half's factor * its group's scale. A factor is an
//       integer in +-15, so number * factor is an int8, and the sum of 64 of those is exact.
//       (Lin et al. 2024, QServe; llama.cpp's K-quants.)
//
// Each lane handles one output, one k after the other, so all instruction sets give the same
// numbers.

constexpr int64_t GROUP_INT8 = 256, GROUP_INT4 = 64, HALF_GROUP = GROUP_INT4 / 2;
constexpr int PARTS = PANEL / Vec::LANES;  // vectors of a panel's outputs
// bytes of a block's scales
constexpr int64_t SCALES_INT8 = PANEL * 2, FACTORS = 2 * PANEL, SCALES_INT4 = FACTORS + PANEL * 2;

// numbers of a panel along k, padded with zeros
inline int64_t depth_of(int64_t in_features) { return round_up(in_features, 64); }

// One block's weights, zeros where there are none
template <int64_t GROUP>
struct GroupOfWeights {
    alignas(64) float at[GROUP][PANEL];

    template <typename T>
    void load(const Quantize& a, int64_t panel, int64_t group) {
        alignas(64) float rows[PANEL][GROUP];
        const int64_t size = std::min(GROUP, a.in_features - group * GROUP);
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t out = panel * PANEL + i, filled = out < a.out_features ? size : 0;
            if (filled < GROUP) std::fill(rows[i], rows[i] + GROUP, 0.0f);
            if (filled > 0)
                copy_numbers((const T*)a.weight + out * a.weight_row + group * GROUP, rows[i],
                             size);
        }
        for (int64_t i = 0; i < PANEL; i += 4)
            for (int64_t k = 0; k < GROUP; k += 4)
                transpose_4(rows[i] + k, GROUP, at[k] + i, PANEL);
    }
    Vec lanes(int64_t k, int part) const { return Vec::load(&at[k][part * Vec::LANES]); }
};

inline Vec magnitude(Vec x) { return Vec::max(x, Vec() - x); }
// 1 / x; 0 where x counts as 0
inline Vec inverse(Vec x) { return Vec::keep_where_at_least(Vec(1.0f) / x, x, LEAST); }

template <typename T>
void quantize_int8_block(const Quantize& a, int64_t panel, int64_t group, int8_t* numbers,
                         uint16_t* scales) {
    GroupOfWeights<GROUP_INT8> weights;
    weights.load<T>(a, panel, group);
    const int64_t size = std::min(GROUP_INT8, depth_of(a.in_features) - group * GROUP_INT8);
    for (int part = 0; part < PARTS; part++) {
        Vec largest, spoilt;
        for (int64_t k = 0; k < size; k++) {
            Vec w = weights.lanes(k, part);
            largest = Vec::max(largest, magnitude(w));
            spoilt = Vec::fma(w, Vec(), spoilt);  // NaN once a weight is not finite
        }
        Vec scale = (largest / Vec(127) + spoilt).rounded(), factor = inverse(scale);
        scale.store(scales + part * Vec::LANES);
        for (int64_t k = 0; k < size; k += 4) {
            uint32_t fours[Vec::LANES] = {};
            for (int byte = 0; byte < 4; byte++) {
                float whole[Vec::LANES];
                whole_within(weights.lanes(k + byte, part) * factor, 127).store(whole);
                for (int i = 0; i < Vec::LANES; i++)
                    fours[i] |= ((uint32_t)(int32_t)whole[i] & 255) << 8 * byte;
            }
            std::memcpy(numbers + k * PANEL + 4 * part * Vec::LANES, fours, sizeof fours);
        }
    }
}

constexpr int NEIGHBOURS = 3;

// The squared errors of the nearest numbers of half a group, by lane, for several steps between
// numbers. Their sums are independent of each other, which hides the latency of each.
inline void squared_errors(const GroupOfWeights<GROUP_INT4>& weights, int64_t begin, int part,
                           const Vec (&steps)[NEIGHBOURS],
                           float (&errors)[NEIGHBOURS][Vec::LANES]) {
    const Vec one(1.0f), first = one / steps[0], second = one / steps[1], third = one / steps[2];
    const Vec minus_first = Vec() - steps[0], minus_second = Vec() - steps[1],
              minus_third = Vec() - steps[2];
    auto rest = [](Vec w, Vec factor, Vec negated) {
        return Vec::fma(within(Vec::round(w * factor), -8, 7), negated, w);
    };
    Vec of_first, of_second, of_third;
    for (int64_t k = begin; k < begin + HALF_GROUP; k++) {
        const Vec w = weights.lanes(k, part), a = rest(w, first, minus_first),
                  b = rest(w, second, minus_second), c = rest(w, third, minus_third);
        of_first = Vec::fma(a, a, of_first);
        of_second = Vec::fma(b, b, of_second);
        of_third = Vec::fma(c, c, of_third);
    }
    of_first.store(errors[0]), of_second.store(errors[1]), of_third.store(errors[2]);
}

// The best factor of half a group for a group's scale, by lane: the one that maps the weight of
// largest magnitude to -8, or a neighbour of it.
inline void find_factors(const GroupOfWeights<GROUP_INT4>& weights, int64_t begin, int part,
                         const float* wanted, const float* scales, float* factors, float* errors) {
    float tried[NEIGHBOURS][Vec::LANES], error[NEIGHBOURS][Vec::LANES];
    Vec steps[NEIGHBOURS];
    const Vec nearest = Vec::round(Vec::load(wanted) / Vec::load(scales));
    for (int beside = 0; beside < NEIGHBOURS; beside++) {
        within(nearest + Vec((float)(beside - 1)), -15, 15).store(tried[beside]);
        for (int i = 0; i < Vec::LANES; i++)
            tried[beside][i] = tried[beside][i] == 0 ? 1 : tried[beside][i];
        steps[beside] = Vec::load(tried[beside]) * Vec::load(scales);
    }
    squared_errors(weights, begin, part, steps, error);
    std::fill(errors, errors + Vec::LANES, INFINITY);
    for (int beside = 0; beside < NEIGHBOURS; beside++)
        for (int i = 0; i < Vec::LANES; i++) {
            const bool better = error[beside][i] < errors[i];
            factors[i] = better ? tried[beside][i] : factors[i];
            errors[i] = better ? error[beside][i] : errors[i];
        }
}

struct Int4Scales {
    float scale[Vec::LANES], factors[2][Vec::LANES];
};

// The scale is searched as well: the largest step of both halves is 15, 13.5 or 12 times as large.
// More candidates did not improve the measured error.
inline Int4Scales find_int4_scales(const GroupOfWeights<GROUP_INT4>& weights, int part) {
    Int4Scales best;
    float wanted[2][Vec::LANES], error[Vec::LANES], largest[Vec::LANES], spoilt[Vec::LANES];
    Vec nan;
    for (int half = 0; half < 2; half++) {
        Vec high, low;
        for (int64_t k = half * HALF_GROUP; k < (half + 1) * HALF_GROUP; k++) {
            Vec w = weights.lanes(k, part);
            high = Vec::max(high, w), low = Vec::min(low, w), nan = Vec::fma(w, Vec(), nan);
        }
        float highest[Vec::LANES], lowest[Vec::LANES];
        high.store(highest), low.store(lowest);
        for (int i = 0; i < Vec::LANES; i++)
            wanted[half][i] = (highest[i] > -lowest[i] ? highest[i] : lowest[i]) / -8;
    }
    nan.store(spoilt);
    for (int i = 0; i < Vec::LANES; i++) {
        largest[i] = std::max(std::fabs(wanted[0][i]), std::fabs(wanted[1][i]));
        best.scale[i] = spoilt[i] + 0.0f, best.factors[0][i] = best.factors[1][i] = 1,
        error[i] = INFINITY;
    }
    for (float steps : {15.0f, 13.5f, 12.0f}) {
        float scale[Vec::LANES], factors[2][Vec::LANES], errors[2][Vec::LANES];
        for (int i = 0; i < Vec::LANES; i++)
            scale[i] = largest[i] > LEAST ? Number<uint16_t>::round(largest[i] / steps) : 1;
        for (int half = 0; half < 2; half++)
            find_factors(weights, half * HALF_GROUP, part, wanted[half], scale, factors[half],
                         errors[half]);
        for (int i = 0; i < Vec::LANES; i++)
            if (errors[0][i] + errors[1][i] < error[i] && largest[i] > LEAST) {
                error[i] = errors[0][i] + errors[1][i], best.scale[i] = scale[i];
                for (int half = 0; half < 2; half++) best.factors[half][i] = factors[half][i];
            }
    }
    return best;
}

// The numbers plus 8
inline Vec nearest_int4(Vec weights, const float* inverses) {
    return within(Vec::round(weights * Vec::load(inverses)), -8, 7) + Vec(8.0f);
}

template <typename T>
void quantize_int4_block(const Quantize& a, int64_t panel, int64_t group, uint8_t* numbers,
                         int8_t* factors, uint16_t* scales) {
    GroupOfWeights<GROUP_INT4> weights;
    weights.load<T>(a, panel, group);
    for (int part = 0; part < PARTS; part++) {
        Int4Scales found = find_int4_scales(weights, part);
        Vec::load(found.scale).store(scales + part * Vec::LANES);
        float inverses[2][Vec::LANES];
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < Vec::LANES; i++) {
                float step = found.scale[i] * found.factors[half][i];
                inverses[half][i] = step == 0 ? 0 : 1 / step;
                factors[half * PANEL + part * Vec::LANES + i] = (int8_t)found.factors[half][i];
            }
        // 4 k of an output at a time: a byte of each, the first half's number in the lower nibble
        for (int64_t k = 0; k < HALF_GROUP; k += 4) {
            uint32_t fours[Vec::LANES] = {};
            for (int byte = 0; byte < 4; byte++) {
                float pairs[Vec::LANES];
                Vec low = nearest_int4(weights.lanes(k + byte, part), inverses[0]),
                    high = nearest_int4(weights.lanes(HALF_GROUP + k + byte, part), inverses[1]);
                Vec::fma(high, Vec(16.0f), low).store(pairs);
                for (int i = 0; i < Vec::LANES; i++)
                    fours[i] |= (uint32_t)(int32_t)pairs[i] << 8 * byte;
            }
            std::memcpy(numbers + (k * PANEL + 4 * part * Vec::LANES), fours, sizeof fours);
        }
    }
}

inline void quantize_int8(const Call& call, const Step&, const Worker& worker) {
    const Quantize& a = (const Quantize&)call;
    const int64_t depth = depth_of(a.in_features), groups = ceil_div(depth, GROUP_INT8),
                  panels = ceil_div(a.out_features, PANEL);
    for (int64_t panel; (panel = worker.next(panels)) < panels;)
        for (int64_t group = 0; group < groups; group++)
            FOR_DTYPE(call.dtype,
                      quantize_int8_block<T>(
                          a, panel, group,
                          (int8_t*)a.packed + (panel * depth + group * GROUP_INT8) * PANEL,
                          (uint16_t*)((char*)a.scales + (panel * groups + group) * SCALES_INT8)));
}

inline void quantize_int4(const Call& call, const Step&, const Worker& worker) {
    const Quantize& a = (const Quantize&)call;
    const int64_t groups = ceil_div(a.in_features, GROUP_INT4),
                  panels = ceil_div(a.out_features, PANEL);
    for (int64_t panel; (panel = worker.next(panels)) < panels;)
        for (int64_t i = panel * groups; i < (panel + 1) * groups; i++) {
            char* scales = (char*)a.scales + i * SCALES_INT4;
            FOR_DTYPE(call.dtype,
                      quantize_int4_block<T>(a, panel, i % groups,
                                             (uint8_t*)a.packed + i * GROUP_INT4 * PANEL / 2,
                                             (int8_t*)scales, (uint16_t*)(scales + FACTORS)));
        }
}

// out [rows, size] = the rows of an int8 table for the step's token ids, dequantized
template <typename T>
void embedding_int8_rows(const EmbeddingInt8& a, int64_t rows, const Step& step,
                         const Worker& worker) {
    const int64_t piece = piece_of_rows(a.size), depth = depth_of(a.size),
                  groups = ceil_div(depth, GROUP_INT8);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            int64_t id = id_of(a, step, row), panel = id / PANEL, lane = id % PANEL;
            T* out = (T*)a.out + row * a.out_row;
            if (id < 0 || id >= a.num_ids) {
                set_absent(a, out, a.size * sizeof(T));
                continue;
            }
            const int8_t* numbers = (const int8_t*)a.table + panel * depth * PANEL + lane * 4;
            const uint16_t* scales = (const uint16_t*)a.scales + panel * groups * PANEL + lane;
            for (int64_t k = 0; k < a.size; k++)
                put(out + k, (float)numbers[k / 4 * PANEL * 4 + k % 4] *
                                 Number<uint16_t>::get(scales[k / GROUP_INT8 * PANEL]));
        }
}

inline void embedding_int8(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, embedding_int8_rows<T>((const EmbeddingInt8&)call, rows_of(call, step),
                                                 step, worker));
}
