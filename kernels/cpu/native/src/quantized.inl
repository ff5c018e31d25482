// Linear layers over int8 and int4 weights (abi.h: QuantizedLinear; the layout: quantize.inl).
//
//   rows of x are quantized, a group of 64 at a time: whole numbers in +-127, and a scale
//   item = a few panels, computed by one thread
//       for a few rows, for a panel: for each group the sum of products of whole numbers, exactly; times both scales; added in fp32
//       then bias, activation, rounding
//
// A group's sum is exact, whichever instructions find it, and groups are added in ascending order, each by one fused multiply-add. So a
// result's bits depend on its row of x and on the weights alone: not on rows beside it, on threads, nor on the instruction set.

namespace quantized {

constexpr float LEAST = 1e-30f;  // a group with nothing larger counts as zeros, so that no scale's inverse overflows

inline Vec within(Vec x, float low, float high) { return Vec::max(Vec::min(x, Vec(high)), Vec(low)); }  // a NaN becomes `high`
inline Vec whole_within(Vec x, float most) { return within(Vec::round(x), -most, most); }

#include "quantize.inl"

// x as the kernels read it: rows [groups][64], their scales, and for int4 what its numbers' offset of 8 adds to the sums of each half group
template <typename X>
struct QuantizedRows {
    int64_t groups;
    X* numbers;
    float* scales;
    int32_t* offsets;  // [groups][2], pairs of 16 bits: minus 8 times the sums of the numbers at k % 4 < 2 and at the others

    QuantizedRows(void* memory, int64_t rows, int64_t groups)
        : groups(groups), numbers((X*)memory), scales((float*)(numbers + rows * groups * GROUP)), offsets((int32_t*)(scales + rows * groups)) {}
    static int64_t bytes(int64_t rows, int64_t groups) { return rows * groups * (GROUP * sizeof(X) + sizeof(float) + 2 * sizeof(int32_t)); }

    QuantizedRows from(int64_t row) const {
        QuantizedRows rest = *this;
        rest.numbers += row * groups * GROUP, rest.scales += row * groups, rest.offsets += row * groups * 2;
        return rest;
    }

    template <typename T>
    void quantize(int64_t row, const T* x, int64_t size) {
        for (int64_t group = row * groups; group < (row + 1) * groups; group++, x += GROUP, size -= GROUP) {
            alignas(64) float values[GROUP] = {};
            copy_numbers(x, values, std::min(GROUP, size));
            Vec largest, spoilt;
            for (int64_t i = 0; i < GROUP; i += Vec::LANES) {
                Vec v = Vec::load(values + i);
                largest = Vec::max(largest, magnitude(v));
                spoilt = Vec::fma(v, Vec(), spoilt);  // NaN once a number is not finite: then the scale is, and with it the row's results
            }
            float most = largest.largest();
            bool counts = most > LEAST;
            scales[group] = (counts ? most / 127 : 0) + spoilt.sum();
            Vec factor(counts ? 127 / most : 0);
            X* to = numbers + group * GROUP;
            for (int64_t i = 0; i < GROUP; i += Vec::LANES) store_whole(whole_within(Vec::load(values + i) * factor, 127), to + i);
            for (int half = 0; half < 2; half++) offsets[group * 2 + half] = offset(to + half * HALF_GROUP);
        }
    }

private:
    static int32_t offset(const X* numbers) {
        int32_t first = 0, second = 0;
        for (int64_t i = 0; i < HALF_GROUP; i += 4) first += numbers[i] + numbers[i + 1], second += numbers[i + 2] + numbers[i + 3];
        return (int32_t)((uint32_t)(-8 * first) & 0xffff) | (int32_t)((uint32_t)(-8 * second) << 16);
    }
};

template <typename N>
inline N bits_at(const void* p) {
    N bits;
    std::memcpy(&bits, p, sizeof bits);
    return bits;
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

constexpr int64_t QUANTIZED_PREFETCH = 2048;  // bytes ahead of their use weights are asked for

// A group's exact sums for ROWS rows and VECTORS vectors of outputs, from the panel's vector `first` on
struct Int8Dot {
    using X = int16_t;
    static constexpr int MAX_ROWS = Vec::LANES == 16 ? 8 : 6;
    static constexpr int64_t BLOCK = GROUP * PANEL, SCALES = SCALES_INT8, SCALES_AT = 0;

    template <int ROWS, int VECTORS>
    static ALWAYS_INLINE void dot(const char* block, const char*, int first, const QuantizedRows<X>& x, int64_t group, Ints* sums) {
        Ints sum[ROWS][VECTORS][2];
        const int8_t* weights = (const int8_t*)block + first * Ints::BYTES;
        const X* numbers = x.numbers + group * GROUP;
        const int64_t stride = x.groups * GROUP;
#pragma GCC unroll 1
        for (int64_t k = 0; k < GROUP; k += 4, weights += 4 * PANEL) {
            if (first == 0) __builtin_prefetch(weights + QUANTIZED_PREFETCH);
            Ints w[VECTORS][2];
            written_out<2 * VECTORS>([&](int i) ALWAYS_INLINE { w[i / 2][i % 2] = Ints::widened(weights + i * (Ints::BYTES / 2)); });
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                Ints four = Ints::repeat64(bits_at<int64_t>(numbers + row * stride + k));
                written_out<2 * VECTORS>([&](int i) ALWAYS_INLINE {
                    sum[row][i / 2][i % 2] = settled(Ints::add_pairs(sum[row][i / 2][i % 2], w[i / 2][i % 2], four));
                });
            });
        }
        written_out<ROWS * VECTORS>([&](int i) ALWAYS_INLINE {
            sums[i] = Ints::neighbours(sum[i / VECTORS][i % VECTORS][0], sum[i / VECTORS][i % VECTORS][1]);
        });
    }
};

struct Int4Dot {
    using X = int8_t;
    static constexpr int MAX_ROWS = Vec::LANES == 16 ? 8 : 4;
    static constexpr int64_t BLOCK = GROUP * PANEL / 2, SCALES = SCALES_INT4, SCALES_AT = FACTORS;

    // In 16 bits: a pair's products are within 2 * 15 * 127, the sum over half a group without its offset within 16 * 8 * 127.
    template <int ROWS, int VECTORS>
    static ALWAYS_INLINE void dot(const char* block, const char* factors, int first, const QuantizedRows<X>& x, int64_t group, Ints* sums) {
        Ints sum[ROWS][VECTORS][2];
        const char* weights = block + first * Ints::BYTES;
        const X* numbers = x.numbers + group * GROUP;
        const int64_t stride = x.groups * GROUP;
        written_out<2 * ROWS>([&](int i) ALWAYS_INLINE {
            Ints offset = Ints::repeat32(x.offsets[(i / 2 * x.groups + group) * 2 + i % 2]);
            written_out<VECTORS>([&](int v) ALWAYS_INLINE { sum[i / 2][v][i % 2] = offset; });
        });
#pragma GCC unroll 1
        for (int64_t k = 0; k < HALF_GROUP; k += 4, weights += 4 * PANEL) {
            if (first == 0) __builtin_prefetch(weights + QUANTIZED_PREFETCH);
            Ints w[VECTORS][2];
            written_out<VECTORS>([&](int v) ALWAYS_INLINE {
                Ints both = Ints::load(weights + v * Ints::BYTES);
                w[v][0] = both.low_nibbles(), w[v][1] = both.high_nibbles();
            });
            written_out<2 * ROWS>([&](int i) ALWAYS_INLINE {
                Ints four = Ints::repeat32(bits_at<int32_t>(numbers + i / 2 * stride + i % 2 * HALF_GROUP + k));
                written_out<VECTORS>([&](int v) ALWAYS_INLINE {
                    sum[i / 2][v][i % 2] = settled(Ints::add16(sum[i / 2][v][i % 2], Ints::pairs(w[v][i % 2], four)));
                });
            });
        }
        written_out<VECTORS>([&](int v) ALWAYS_INLINE {
            Ints lower = Ints::widened_twice((const int8_t*)factors + (first + v) * Vec::LANES);
            Ints upper = Ints::widened_twice((const int8_t*)factors + PANEL + (first + v) * Vec::LANES);
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                sums[row * VECTORS + v] = Ints::add_pairs(Ints::add_pairs(Ints(), sum[row][v][0], lower), sum[row][v][1], upper);
            });
        });
    }
};

// A panel times a few rows of x: sums [rows, 16]
template <typename Dot>
struct VectorForm {
    using X = typename Dot::X;
    static constexpr int MAX_ROWS = Dot::MAX_ROWS;

    const QuantizedLinear& call;
    explicit VectorForm(const QuantizedLinear& call, const Worker&) : call(call) {}

    void multiply(int64_t rows, int64_t panel, int, const QuantizedRows<X>& x, float* sums, int64_t sums_row) const {
        multiply_exactly<MAX_ROWS>(rows, panel, x, sums, sums_row);
    }

private:
    template <int ROWS>
    void multiply_exactly(int64_t rows, int64_t panel, const QuantizedRows<X>& x, float* sums, int64_t sums_row) const {
        if constexpr (ROWS > 1)
            if (rows != ROWS) return multiply_exactly<ROWS - 1>(rows, panel, x, sums, sums_row);
        constexpr int VECTORS = 2 * ROWS <= MAX_ROWS ? PARTS : 1;  // a whole panel at once where the registers suffice
        const char* block = (const char*)call.weight + panel * x.groups * Dot::BLOCK;
        const char* scales = (const char*)call.scales + panel * x.groups * Dot::SCALES;
        Vec total[ROWS][PARTS];
        for (int64_t group = 0; group < x.groups; group++, block += Dot::BLOCK, scales += Dot::SCALES)
#pragma GCC unroll 2
            for (int first = 0; first < PARTS; first += VECTORS) {
                Ints exact[ROWS * VECTORS];
                Dot::template dot<ROWS, VECTORS>(block, scales, first, x, group, exact);
                written_out<ROWS * VECTORS>([&](int i) ALWAYS_INLINE {
                    Vec scale = Vec::load((const uint16_t*)(scales + Dot::SCALES_AT) + (first + i % VECTORS) * Vec::LANES);
                    Vec& sum = total[i / VECTORS][first + i % VECTORS];
                    sum = Vec::fma(exact[i].to_floats(), scale * Vec(x.scales[i / VECTORS * x.groups + group]), sum);
                });
            }
        for (int row = 0; row < ROWS; row++)
            for (int part = 0; part < PARTS; part++) total[row][part].store(sums + row * sums_row + part * Vec::LANES);
    }
};

#ifdef QUIRE_AMX
#include "quantized_amx.inl"
#endif

constexpr int64_t ROWS_AT_ONCE = 512;         // quantized together, in memory that the threads share
constexpr int64_t ROWS_APART = 2;             // so few each thread quantizes for itself: cheaper than waiting for another
constexpr int64_t ITEM_BYTES = 32 * 1024;     // of weights: worth a ticket
constexpr int64_t CACHED_BYTES = 128 * 1024;  // of x, which stay in the second cache while panels come

// All panels for `rows` quantized rows, whose first result is out[first].
template <typename T, typename Form>
void multiply_quantized(Form& form, const QuantizedLinear& a, int64_t first, int64_t rows, const QuantizedRows<typename Form::X>& x,
                        int64_t panel_bytes, const Worker& worker) {
    const bool gated = a.epilogue == GATED;
    const int64_t all_columns = gated ? a.out_features / 2 : a.out_features, panels = (all_columns + PANEL - 1) / PANEL;
    const int64_t fair = std::max<int64_t>(1, panels / (8 * worker.count));
    const int64_t item = std::max<int64_t>(1, std::min(fair, ITEM_BYTES / panel_bytes)), items = (panels + item - 1) / item;
    const int64_t chunk = std::max<int64_t>(Form::MAX_ROWS, CACHED_BYTES / (x.groups * GROUP * (int64_t)sizeof(typename Form::X)));
    float sums[Form::MAX_ROWS][2 * PANEL], bias[2 * PANEL];
    for (int64_t i; (i = worker.next()) < items;)
        for (int64_t begin = 0; begin < rows; begin += chunk)
            for (int64_t panel = i * item; panel < std::min((i + 1) * item, panels); panel++) {
                const int64_t column = panel * PANEL, columns = std::min(PANEL, all_columns - column);
                if (a.bias) copy_numbers((const T*)a.bias + column, bias, columns);
                if (a.bias && gated) copy_numbers((const T*)a.bias + all_columns + column, bias + PANEL, columns);
                const int64_t here = std::min(chunk, rows - begin), tiles = (here + Form::MAX_ROWS - 1) / Form::MAX_ROWS;
                for (int64_t tile = 0; tile < tiles; tile++) {
                    const int64_t row = begin + tile * here / tiles, count = begin + (tile + 1) * here / tiles - row;
                    for (int up = 0; up <= gated; up++) form.multiply(count, up * panels + panel, up, x.from(row), sums[0] + up * PANEL, 2 * PANEL);
                    for (int64_t j = 0; j < count; j++) {
                        int64_t place = (first + row + j) * a.out_row + column;
                        finish_row<T>(sums[j], a.bias ? bias : nullptr, columns, PANEL, gated);
                        if (a.out_dtype == F32) store_columns(sums[j], columns, (float*)a.out + place);
                        else store_columns(sums[j], columns, (uint16_t*)a.out + place);
                    }
                }
            }
}

template <typename T, typename Form>
void quantized_linear(const QuantizedLinear& a, int64_t rows, int64_t block_bytes, const Worker& worker) {
    using Rows = QuantizedRows<typename Form::X>;
    const int64_t groups = groups_of(a.in_features), most = std::min(rows, ROWS_AT_ONCE);
    Form form(a, worker);
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = std::min(most, rows - first);
        const T* from = (const T*)a.x + first * a.x_row;
        Rows x(rows <= ROWS_APART ? worker.scratch(Rows::bytes(most, groups)) : worker.shared(Rows::bytes(most, groups)), most, groups);
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

void linear_int8(const Call& call, const Step& step, const Worker& worker) {
    const QuantizedLinear& a = (const QuantizedLinear&)call;
    const int64_t rows = rows_of(call, step);
#ifdef QUIRE_AMX
    if (rows >= TILES_FROM_ROWS) {
        FOR_DTYPE(call.dtype, (quantized_linear<T, TileForm<false>>(a, rows, Int8Dot::BLOCK, worker)));
        return;
    }
#endif
    FOR_DTYPE(call.dtype, (quantized_linear<T, VectorForm<Int8Dot>>(a, rows, Int8Dot::BLOCK, worker)));
}

void linear_int4(const Call& call, const Step& step, const Worker& worker) {
    const QuantizedLinear& a = (const QuantizedLinear&)call;
    const int64_t rows = rows_of(call, step);
#ifdef QUIRE_AMX
    if (rows >= TILES_FROM_ROWS) {
        FOR_DTYPE(call.dtype, (quantized_linear<T, TileForm<true>>(a, rows, Int4Dot::BLOCK, worker)));
        return;
    }
#endif
    FOR_DTYPE(call.dtype, (quantized_linear<T, VectorForm<Int4Dot>>(a, rows, Int4Dot::BLOCK, worker)));
}

}  // namespace quantized
