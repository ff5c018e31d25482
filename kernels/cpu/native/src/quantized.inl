// Linear layers over int8 and int4 weights (abi.h: QuantizedLinear; the layout: quantize.inl).
//
//   rows of x are quantized, a group of 64 at a time: whole numbers in +-127, and a scale
//   item = a few panels, computed by one thread
//       for panels side by side, for a few rows: for each group the sum of products of whole numbers, exactly; times both scales; added in fp32
//       then bias, activation, rounding
//
// A group's sum is exact, whichever instructions find it, and groups are added in ascending order, each by one fused multiply-add. So a
// result's bits depend on its row of x and on the weights alone: not on rows beside it, on threads, nor on the instruction set.

namespace quantized {

constexpr float LEAST = 1e-30f;  // a group with nothing larger counts as zeros, so that no scale's inverse overflows

inline Vec within(Vec x, float low, float high) { return Vec::max(Vec::min(x, Vec(high)), Vec(low)); }  // a NaN becomes `high`
inline Vec whole_within(Vec x, float most) { return within(Vec::round(x), -most, most); }

#include "quantize.inl"

// What makes whole numbers in +-127 of values [size], a multiple of LANES: numbers = values * factor, values = numbers * scale.
struct Scaling {
    float scale;
    Vec factor;

    Scaling(const float* values, int64_t size) {
        Vec largest, spoilt;
        for (int64_t i = 0; i < size; i += Vec::LANES) {
            Vec v = Vec::load(values + i);
            largest = Vec::max(largest, magnitude(v));
            spoilt = Vec::fma(v, Vec(), spoilt);  // NaN once a number is not finite: then the scale is, and with it the row's results
        }
        float most = largest.largest();
        bool counts = most > LEAST;
        scale = (counts ? most / 127 : 0) + spoilt.sum();
        factor = Vec(counts ? 127 / most : 0);
    }
    Vec whole(const float* values) const { return whole_within(Vec::load(values) * factor, 127); }
};

// x as the kernels read it: rows [groups][64], their scales, and what the offset of 8 of int4's numbers adds to the sums of each half group
struct QuantizedRows {
    int64_t groups;
    int8_t* numbers;
    float* scales;
    int32_t* offsets;  // [groups][2]: minus 8 times the sum of the half group's numbers, in 16 bits

    QuantizedRows(void* memory, int64_t rows, int64_t groups)
        : groups(groups), numbers((int8_t*)memory), scales((float*)(numbers + rows * groups * GROUP)), offsets((int32_t*)(scales + rows * groups)) {}
    static int64_t bytes(int64_t rows, int64_t groups) { return rows * groups * (GROUP + sizeof(float) + 2 * sizeof(int32_t)); }

    QuantizedRows from(int64_t row) const {
        QuantizedRows rest = *this;
        rest.numbers += row * groups * GROUP, rest.scales += row * groups, rest.offsets += row * groups * 2;
        return rest;
    }

    int32_t sum(int64_t row, int64_t group) const {
        const int32_t* halves = offsets + (row * groups + group) * 2;
        return ((int16_t)halves[0] + (int16_t)halves[1]) / -8;
    }

    template <typename T>
    void quantize(int64_t row, const T* x, int64_t size) {
        for (int64_t group = row * groups; group < (row + 1) * groups; group++, x += GROUP, size -= GROUP) {
            alignas(64) float values[GROUP] = {};
            copy_numbers(x, values, std::min(GROUP, size));
            Scaling scaling(values, GROUP);
            scales[group] = scaling.scale;
            int8_t* to = numbers + group * GROUP;
            for (int half = 0; half < 2; half++) {
                Vec sum;
                for (int64_t i = half * HALF_GROUP; i < (half + 1) * HALF_GROUP; i += Vec::LANES) {
                    Vec whole = scaling.whole(values + i);
                    store_whole(whole, to + i), sum = sum + whole;
                }
                offsets[group * 2 + half] = (int32_t)(-8 * sum.sum()) & 0xffff;
            }
        }
    }
};

inline int32_t four_at(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return four;
}

// f(0) to f(N - 1), written out while the compiler still sees single variables in arrays: a loop that it unrolls later keeps them in memory.
#define ALWAYS_INLINE __attribute__((always_inline))
template <int N, typename F>
inline ALWAYS_INLINE void written_out(F f) {
    if constexpr (N > 0) {
        written_out<N - 1>(f);
        f(N - 1);
    }
}

constexpr int MAX_EXACT_SUMS = Vec::LANES == 16 ? 16 : 10;  // of 32 or 16 registers
constexpr int MAX_PANELS = 4;
using Sums = float[MAX_PANELS][2][PANEL];  // a row's results; [1] is of the up half

// So far ahead of their use weights and scales are asked for
constexpr int64_t AHEAD_BYTES = 1024, AHEAD_GROUPS = 4;

// Panels multiplied side by side: first, first + apart, ... The next have the panels behind these: as many streams of weights, each without a gap.
struct Panels {
    int64_t first, count, apart;
};

// Vector i of the outputs of panels whose data are `apart` bytes apart
inline const char* vector_at(const char* data, int64_t apart, int i, int64_t bytes) { return data + i / PARTS * apart + i % PARTS * bytes; }

// A group's exact sums for ROWS rows and PANELS panels, whose blocks are `apart` bytes apart. In 16 bits a pair's products are within 2 * 127 * 127.
struct Int8Dot {
    static constexpr int64_t BLOCK = GROUP * PANEL, SCALES = SCALES_INT8, SCALES_AT = 0;

    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void dot(const char* block, int64_t apart, const char*, int64_t, const QuantizedRows& x, int64_t group, Ints* sums) {
        constexpr int VECTORS = PANELS * PARTS;
        const int64_t stride = x.groups * GROUP;
        const int8_t* numbers = x.numbers + group * GROUP;
        Ints sum[ROWS * VECTORS];
        written_out<ROWS>([&](int row) ALWAYS_INLINE {
            Ints start = Ints::start_of_fours(x.sum(row, group));
            written_out<VECTORS>([&](int i) ALWAYS_INLINE { sum[row * VECTORS + i] = start; });
        });
#pragma GCC unroll 1
        for (int64_t k = 0; k < GROUP; k += 4, block += 4 * PANEL, numbers += 4) {
            written_out<PANELS>([&](int panel) ALWAYS_INLINE { __builtin_prefetch(block + panel * apart + AHEAD_BYTES); });
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                Ints four = Ints::repeat32(four_at(numbers + row * stride));
                written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                    Ints w = Ints::load(vector_at(block, apart, i, Ints::BYTES)), &s = sum[row * VECTORS + i];
                    s = settled(Ints::add_fours(s, w, four));
                });
            });
        }
        written_out<ROWS * VECTORS>([&](int i) ALWAYS_INLINE { sums[i] = sum[i]; });
    }
};

// Half a group after the other, so that twice as many sums find room in registers.
struct Int4Dot {
    static constexpr int64_t BLOCK = GROUP * PANEL / 2, SCALES = SCALES_INT4, SCALES_AT = FACTORS;

    // In 16 bits: a pair's products are within 2 * 15 * 127, sums over half a group and all of its offset within 32 * 8 * 127.
    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void dot(const char* block, int64_t apart, const char* factors, int64_t factors_apart, const QuantizedRows& x, int64_t group,
                                  Ints* sums) {
        constexpr int VECTORS = PANELS * PARTS;
        const int64_t stride = x.groups * GROUP;
        written_out<2>([&](int half) ALWAYS_INLINE {
            const int8_t* numbers = x.numbers + group * GROUP + half * HALF_GROUP;
            const char* weights = block;
            Ints sum[ROWS * VECTORS];
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                Ints offset = Ints::repeat32(x.offsets[(row * x.groups + group) * 2 + half]);
                written_out<VECTORS>([&](int i) ALWAYS_INLINE { sum[row * VECTORS + i] = offset; });
            });
#pragma GCC unroll 1
            for (int64_t k = 0; k < HALF_GROUP; k += 4, weights += 4 * PANEL, numbers += 4) {
                if (half == 0) written_out<PANELS>([&](int panel) ALWAYS_INLINE { __builtin_prefetch(weights + panel * apart + AHEAD_BYTES); });
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    Ints four = Ints::repeat32(four_at(numbers + row * stride));
                    written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                        Ints both = Ints::load(vector_at(weights, apart, i, Ints::BYTES)), &s = sum[row * VECTORS + i];
                        s = settled(Ints::add_nibbles(s, half ? both.high_nibbles() : both.low_nibbles(), four));
                    });
                });
            }
            written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                Ints factor = Ints::factors((const int8_t*)vector_at(factors, factors_apart, i, Vec::LANES) + half * PANEL);
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    Ints& s = sums[row * VECTORS + i];
                    s = Ints::add_halves(half ? s : Ints(), sum[row * VECTORS + i], factor);
                });
            });
        });
    }
};

// A few panels times a few rows of x
template <typename Dot>
struct VectorForm {
    static constexpr int MAX_ROWS = MAX_EXACT_SUMS / 2;

    const QuantizedLinear& call;
    explicit VectorForm(const QuantizedLinear& call, const Worker&) : call(call) {}

    static constexpr int panels_at_once(int64_t rows) { return panels_beside((int)rows, MAX_EXACT_SUMS); }

    void multiply(int64_t rows, const Panels& panels, int up, const QuantizedRows& x, Sums* sums) const {
        multiply_exactly<MAX_ROWS>(rows, panels, up, x, sums);
    }

private:
    template <int ROWS>
    void multiply_exactly(int64_t rows, const Panels& panels, int up, const QuantizedRows& x, Sums* sums) const {
        if constexpr (ROWS > 1)
            if (rows != ROWS) return multiply_exactly<ROWS - 1>(rows, panels, up, x, sums);
        constexpr int AT_ONCE = panels_at_once(ROWS);
        if (panels.count == AT_ONCE) return multiply_panels<ROWS, AT_ONCE>(panels.first, panels.apart, 0, up, x, sums);
        for (int64_t i = 0; i < panels.count; i++) multiply_panels<ROWS, 1>(panels.first + i * panels.apart, 0, i, up, x, sums);
    }

    template <int ROWS, int PANELS>
    void multiply_panels(int64_t first, int64_t apart, int64_t place, int up, const QuantizedRows& x, Sums* sums) const {
        constexpr int VECTORS = PANELS * PARTS;
        const int64_t blocks_apart = apart * x.groups * Dot::BLOCK, scales_apart = apart * x.groups * Dot::SCALES;
        const char* block = (const char*)call.weight + first * x.groups * Dot::BLOCK;
        const char* scales = (const char*)call.scales + first * x.groups * Dot::SCALES;
        Vec total[ROWS * VECTORS];
        for (int64_t group = 0; group < x.groups; group++, block += Dot::BLOCK, scales += Dot::SCALES) {
            written_out<PANELS>([&](int panel) ALWAYS_INLINE { __builtin_prefetch(scales + panel * scales_apart + AHEAD_GROUPS * Dot::SCALES); });
            Ints exact[ROWS * VECTORS];
            Dot::template dot<ROWS, PANELS>(block, blocks_apart, scales, scales_apart, x, group, exact);
            written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                Vec scale = Vec::load((const uint16_t*)(vector_at(scales, scales_apart, i, Vec::LANES * 2) + Dot::SCALES_AT));
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    Vec& sum = total[row * VECTORS + i];
                    sum = Vec::fma(exact[row * VECTORS + i].to_floats(), scale * Vec(x.scales[row * x.groups + group]), sum);
                });
            });
        }
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < VECTORS; i++) total[row * VECTORS + i].store(sums[row][place + i / PARTS][up] + i % PARTS * Vec::LANES);
    }
};

#ifdef QUIRE_AMX
#include "quantized_amx.inl"
#endif

constexpr int64_t ROWS_AT_ONCE = 512;          // quantized together, in memory that the threads share
constexpr int64_t ROWS_APART = 2;              // so few each thread quantizes for itself: cheaper than waiting for another
constexpr int64_t ITEM_BYTES = 32 * 1024;      // of weights: worth a ticket
constexpr int64_t STREAMS_BYTES = 512 * 1024;  // the same where rows are few: long streams are what memory is fast at
constexpr int64_t CACHED_BYTES = 128 * 1024;   // of x, which stay in the second cache while panels come

// Bias, activation and rounding of `rows` rows of one panel, place `place` of their sums; the first result is out[first].
template <typename T>
void finish_panel(const QuantizedLinear& a, Sums* sums, int64_t place, int64_t first, int64_t rows, int64_t panel, int64_t all_columns) {
    const bool gated = a.epilogue == GATED;
    const int64_t column = panel * PANEL, columns = std::min(PANEL, all_columns - column);
    float bias[2][PANEL];
    for (int up = 0; a.bias && up <= gated; up++) copy_numbers((const T*)a.bias + up * all_columns + column, bias[up], columns);
    for (int64_t row = 0; row < rows; row++) {
        const float* values = sums[row][place][0];
        const int64_t to = (first + row) * a.out_row + column;
        if (a.out_dtype == F32) finish_row<T>(values, a.bias ? bias[0] : nullptr, columns, PANEL, gated, (float*)a.out + to);
        else finish_row<T>(values, a.bias ? bias[0] : nullptr, columns, PANEL, gated, (uint16_t*)a.out + to);
    }
}

// All panels for `rows` quantized rows, whose first result is out[first].
template <typename T, typename Form>
void multiply_quantized(Form& form, const QuantizedLinear& a, int64_t first, int64_t rows, const QuantizedRows& x, int64_t panel_bytes,
                        const Worker& worker) {
    const bool gated = a.epilogue == GATED;
    const int64_t all_columns = gated ? a.out_features / 2 : a.out_features, panels = (all_columns + PANEL - 1) / PANEL;
    const int64_t chunk = std::min(rows, std::max<int64_t>(Form::MAX_ROWS, CACHED_BYTES / (x.groups * GROUP)));
    const int64_t beside = std::max<int64_t>(1, std::min<int64_t>(Form::panels_at_once(std::min<int64_t>(chunk, Form::MAX_ROWS)), panels / worker.count));
    const int64_t sets = (panels + beside - 1) / beside, worth = rows <= Form::MAX_ROWS ? STREAMS_BYTES : ITEM_BYTES;
    const int64_t items = std::min(sets, std::max<int64_t>(8 * worker.count, panels * panel_bytes / worth));
    Sums sums[Form::MAX_ROWS];
    for (int64_t i; (i = worker.next()) < items;)
        for (int64_t begin = 0; begin < rows; begin += chunk) {
            const int64_t here = std::min(chunk, rows - begin), tiles = (here + Form::MAX_ROWS - 1) / Form::MAX_ROWS;
            const int64_t start = i * sets / items * beside, size = std::min((i + 1) * sets / items * beside, panels) - start, whole = size / beside;
            for (int64_t set = 0; set < whole + size % beside; set++) {  // what is no whole set comes one by one
                const Panels side = set < whole ? Panels{start + set, beside, whole} : Panels{start + whole * beside + set - whole, 1, 0};
                for (int64_t tile = 0; tile < tiles; tile++) {
                    const int64_t row = begin + tile * here / tiles, count = begin + (tile + 1) * here / tiles - row;
                    for (int up = 0; up <= gated; up++)
                        form.multiply(count, Panels{up * panels + side.first, side.count, side.apart}, up, x.from(row), sums);
                    for (int64_t p = 0; p < side.count; p++)
                        finish_panel<T>(a, sums, p, first + row, count, side.first + p * side.apart, all_columns);
                }
            }
        }
}

template <typename T, typename Form>
void multiply_rows(const QuantizedLinear& a, int64_t rows, int64_t block_bytes, const Worker& worker) {
    const int64_t groups = groups_of(a.in_features), most = std::min(rows, ROWS_AT_ONCE);
    Form form(a, worker);
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = std::min(most, rows - first);
        const T* from = (const T*)a.x + first * a.x_row;
        QuantizedRows x(rows <= ROWS_APART ? worker.scratch(QuantizedRows::bytes(most, groups)) : worker.shared(QuantizedRows::bytes(most, groups)), most, groups);
        if (rows <= ROWS_APART) {
            for (int64_t row = 0; row < count; row++) x.quantize(row, from + row * a.x_row, a.in_features);
        } else {
            for (int64_t row; (row = worker.next()) < count;) x.quantize(row, from + row * a.x_row, a.in_features);
            worker.barrier();
        }
        multiply_quantized<T>(form, a, first, count, x, groups * block_bytes, worker);
        if (first + most < rows) worker.barrier();
    }
}

template <typename Dot>
void quantized_linear(const Call& call, const Step& step, const Worker& worker) {
    const QuantizedLinear& a = (const QuantizedLinear&)call;
    const int64_t rows = rows_of(call, step);
#ifdef QUIRE_AMX
    if (rows >= TILES_FROM_ROWS) {
        FOR_DTYPE(call.dtype, (multiply_rows<T, TileForm<Dot>>(a, rows, Dot::BLOCK, worker)));
        return;
    }
#endif
    FOR_DTYPE(call.dtype, (multiply_rows<T, VectorForm<Dot>>(a, rows, Dot::BLOCK, worker)));
}

constexpr Kernel linear_int8 = quantized_linear<Int8Dot>, linear_int4 = quantized_linear<Int4Dot>;

}  // namespace quantized
