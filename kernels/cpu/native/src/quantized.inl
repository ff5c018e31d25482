// Linear layers over int8 and int4 weights (abi.h: QuantizedLinear; the layout: quantize.inl).
//
//   rows of x are quantized, a group at a time as weights are: whole numbers in +-127, and a scale
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

// f(0) to f(N - 1), written out while the compiler still sees single variables in arrays: a loop that it unrolls later keeps them in memory.
template <int N, typename F>
inline ALWAYS_INLINE void written_out(F f) {
    if constexpr (N > 0) {
        written_out<N - 1>(f);
        f(N - 1);
    }
}

// The largest magnitude of values [size], a multiple of 16; NaN or infinity where one of them is either: as whole numbers, their bits are in this order.
inline float largest_magnitude(const uint16_t* values, int64_t size) {
    __m256i most = _mm256_setzero_si256();
    for (int64_t i = 0; i < size; i += 16)
        most = _mm256_max_epu16(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(values + i)), _mm256_set1_epi16(0x7fff)));
    const __m128i of_8 = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(of_8, _mm_set1_epi16(-1)));  // of the complements
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

// What makes whole numbers in +-127 of values [size], a multiple of 16: numbers = values * factor, values = numbers * scale. A NaN is the scale
// where one of them is not finite, and with it the row's results: whatever the numbers are then.
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
        for (int64_t i = 0; i < size; i += Vec::LANES) store_whole(Vec::load(values + i) * factor, to + i);
    }
};

// The sum of `size` numbers, a multiple of 32, by instructions that every processor with AVX2 has
inline int32_t sum_of(const int8_t* numbers, int64_t size) {
    if (size > 32) return sum_of(numbers, 32) + sum_of(numbers + 32, size - 32);
    __m256i from_0 = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)numbers), _mm256_set1_epi8((char)0x80));  // each plus 128
    __m256i of_8 = _mm256_sad_epu8(from_0, _mm256_setzero_si256());
    __m128i of_16 = _mm_add_epi64(_mm256_castsi256_si128(of_8), _mm256_extracti128_si256(of_8, 1));
    return _mm_cvtsi128_si32(_mm_add_epi64(of_16, _mm_unpackhi_epi64(of_16, of_16))) - 128 * 32;
}

// x as a Dot reads it: rows [groups][GROUP], zeros behind the last, their scales, and what takes the offsets of weights' numbers out of sums
template <typename Dot>
struct QuantizedRows {
    static constexpr int64_t GROUP = Dot::GROUP, OFFSETS = Dot::OFFSETS;  // the latter of each group, for as many parts of it

    int64_t groups;
    int8_t* numbers;
    float* scales;
    int32_t* offsets;

    QuantizedRows(void* memory, int64_t rows, int64_t groups)
        : groups(groups), numbers((int8_t*)memory), scales((float*)(numbers + rows * groups * GROUP)), offsets((int32_t*)(scales + rows * groups)) {}
    static int64_t bytes(int64_t rows, int64_t groups) { return rows * groups * (GROUP + sizeof(float) + OFFSETS * sizeof(int32_t)); }

    QuantizedRows from(int64_t row) const {
        QuantizedRows rest = *this;
        rest.numbers += row * groups * GROUP, rest.scales += row * groups, rest.offsets += row * groups * OFFSETS;
        return rest;
    }

    int32_t offset(int64_t row, int64_t group, int part) const { return offsets[(row * groups + group) * OFFSETS + part]; }

    template <typename T>
    void quantize(int64_t row, const T* x, int64_t size) {
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
        for (int64_t i = begin * OFFSETS; i < end * OFFSETS; i++)  // when all are stored: a load of what smaller stores just wrote waits for them
            offsets[i] = Dot::offset(sum_of(numbers + i * GROUP / OFFSETS, GROUP / OFFSETS));
    }

private:
    template <typename T>
    void quantize_group(int64_t group, const T* x) {
        const Scaling scaling(x, GROUP);
        scaling.store(x, GROUP, numbers + group * GROUP);
        scales[group] = scaling.scale;
    }
};

inline int32_t four_at(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return four;
}

constexpr int MAX_EXACT_SUMS = Vec::LANES == 16 ? 16 : 10;  // of 32 or 16 registers
constexpr int MAX_PANELS = 4;
using Sums = float[MAX_PANELS][2][PANEL];  // a row's results; [1] is of the up half

// So far ahead of their use weights and scales are asked for. Weights for the second cache: the first waits for few lines at a time.
constexpr int64_t AHEAD_BYTES = 8192, AHEAD_GROUPS = 4;
constexpr int64_t SEAM_BYTES = 1024;  // where a stream goes on elsewhere: of what comes there

// Panels multiplied side by side: first, first + apart, ... The next have the panels behind these: as many streams of weights, each without a gap.
// Or, as one stream, one after the other.
struct Panels {
    int64_t first, count, apart;
};

// A product asks for the first weights of the next before it ends. Where it is done in tiles of rows, only the first of these reads weights
// from memory: so each asks for its share of all of the next product's.
struct Next {
    Panels panels;  // of the next product
    int64_t share, shares;
};

// About `wanted` bytes, and such that those at the end of a panel, whose last block may be short, are asked for before a block, not within one.
inline int64_t ahead_of(int64_t panel_bytes, int64_t wanted, int64_t block) {
    const int64_t rest = panel_bytes % block, ahead = rest + (wanted - rest + block / 2) / block * block;
    return ahead > 0 ? ahead : block;
}

// A block of each panel, `apart` bytes apart
struct Blocks {
    const char* first;
    int64_t apart;

    template <int PANELS>
    ALWAYS_INLINE void ask_for(int64_t at) const {
        written_out<PANELS>([&](int panel) ALWAYS_INLINE { __builtin_prefetch(first + panel * apart + at, 0, 2); });
    }
};

// Vector i of the outputs of panels whose data are `apart` bytes apart
inline const char* vector_at(const char* data, int64_t apart, int i, int64_t bytes) { return data + i / PARTS * apart + i % PARTS * bytes; }

// A group's exact sums for ROWS rows and PANELS panels, whose blocks are `apart` bytes apart; the group has `size` numbers.
struct Int8Dot {
    static constexpr int64_t GROUP = GROUP_INT8, LINE_OF_K = PANEL, BLOCK = GROUP * LINE_OF_K, SCALES = SCALES_INT8, SCALES_AT = 0, OFFSETS = 1;
    static constexpr int ONE_STREAM = ROWS_OF_ONE_STREAM;  // rows
    static int32_t offset(int32_t sum) { return -128 * sum; }

    // In 16 bits a pair's products are within 2 * 127 * 127.
    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void dot(const char* block, int64_t apart, const char*, int64_t, const QuantizedRows<Int8Dot>& x, int64_t group, int64_t size,
                                  const Blocks& soon, Ints* sums) {
        constexpr int VECTORS = PANELS * PARTS, SUMS = ROWS * VECTORS, SHARES = SUMS < 4 ? 4 / SUMS : 1;  // of k: sums to add to in turns
        const int64_t stride = x.groups * GROUP;
        const int8_t* numbers = x.numbers + group * GROUP;
        Ints sum[SHARES][SUMS];
        written_out<ROWS>([&](int row) ALWAYS_INLINE {
            Ints start = Ints::start_of_fours(x.offset(row, group, 0));
            written_out<VECTORS>([&](int i) ALWAYS_INLINE { sum[0][row * VECTORS + i] = start; });
        });
#pragma GCC unroll 1
        for (int64_t k = 0; k < size; k += 4 * SHARES) {
            written_out<SHARES>([&](int share) ALWAYS_INLINE {
                if (ROWS > ONE_STREAM) soon.ask_for<PANELS>((k + 4 * share) * LINE_OF_K);
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    Ints four = Ints::repeat32(four_at(numbers + row * stride));
                    written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                        Ints w = Ints::load(vector_at(block, apart, i, Ints::BYTES)), &s = sum[share][row * VECTORS + i];
                        s = settled(Ints::add_fours(s, w, four));
                    });
                });
                block += 4 * PANEL, numbers += 4;
            });
        }
        written_out<SUMS>([&](int i) ALWAYS_INLINE {
            sums[i] = sum[0][i];
            written_out<SHARES - 1>([&](int share) ALWAYS_INLINE { sums[i] = Ints::add(sums[i], sum[share + 1][i]); });
        });
    }
};

// Half a group after the other where sums of both find no room in registers.
struct Int4Dot {
    static constexpr int64_t GROUP = GROUP_INT4, LINE_OF_K = PANEL / 2, BLOCK = GROUP * LINE_OF_K, SCALES = SCALES_INT4, SCALES_AT = FACTORS, OFFSETS = 2;
    static constexpr int ONE_STREAM = 0;  // measured: one row is a tenth slower as one stream
    static int32_t offset(int32_t sum) { return -8 * sum & 0xffff; }

    // In 16 bits: a pair's products are within 2 * 15 * 127, sums over half a group and all of its offset within 32 * 8 * 127.
    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void dot(const char* block, int64_t apart, const char* factors, int64_t factors_apart, const QuantizedRows<Int4Dot>& x,
                                  int64_t group, int64_t, const Blocks& soon, Ints* sums) {
        constexpr int VECTORS = PANELS * PARTS, SUMS = ROWS * VECTORS, HALVES = 2 * SUMS > MAX_EXACT_SUMS ? 1 : 2, SHARES = HALVES * SUMS < 4 ? 2 : 1;
        const int64_t stride = x.groups * GROUP;
        written_out<2 / HALVES>([&](int pass) ALWAYS_INLINE {
            const int8_t* numbers = x.numbers + group * GROUP + pass * HALF_GROUP;
            Ints sum[HALVES][SHARES][SUMS];
            written_out<HALVES>([&](int half) ALWAYS_INLINE {
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    Ints offset = Ints::repeat32(x.offset(row, group, pass + half));
                    written_out<VECTORS>([&](int i) ALWAYS_INLINE { sum[half][0][row * VECTORS + i] = offset; });
                });
            });
            const char* weights = block;
#pragma GCC unroll 1
            for (int64_t k = 0; k < HALF_GROUP; k += 4 * SHARES) {
                written_out<SHARES>([&](int share) ALWAYS_INLINE {
                    if (ROWS > ONE_STREAM && pass == 0) soon.ask_for<PANELS>((k + 4 * share) * PANEL);
                    written_out<HALVES>([&](int half) ALWAYS_INLINE {
                        written_out<ROWS>([&](int row) ALWAYS_INLINE {
                            Ints four = Ints::repeat32(four_at(numbers + row * stride + half * HALF_GROUP));
                            written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                                Ints both = Ints::load(vector_at(weights, apart, i, Ints::BYTES)), &s = sum[half][share][row * VECTORS + i];
                                s = settled(Ints::add_nibbles(s, pass + half ? both.high_nibbles() : both.low_nibbles(), four));
                            });
                        });
                    });
                    weights += 4 * PANEL, numbers += 4;
                });
            }
            written_out<HALVES>([&](int half) ALWAYS_INLINE {
                written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                    Ints factor = Ints::factors((const int8_t*)vector_at(factors, factors_apart, i, Vec::LANES) + (pass + half) * PANEL);
                    written_out<SHARES>([&](int share) ALWAYS_INLINE {
                        written_out<ROWS>([&](int row) ALWAYS_INLINE {
                            Ints& s = sums[row * VECTORS + i];
                            s = Ints::add_halves(pass + half + share ? s : Ints(), sum[half][share][row * VECTORS + i], factor);
                        });
                    });
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
    static constexpr bool one_stream(int64_t rows) { return rows <= Dot::ONE_STREAM; }

    void multiply(int64_t rows, const Panels& panels, const Next& next, int up, const QuantizedRows<Dot>& x, Sums* sums) const {
        multiply_exactly<MAX_ROWS>(rows, panels, next, up, x, sums);
    }

private:
    template <int ROWS>
    void multiply_exactly(int64_t rows, const Panels& panels, const Next& next, int up, const QuantizedRows<Dot>& x, Sums* sums) const {
        if constexpr (ROWS > 1)
            if (rows != ROWS) return multiply_exactly<ROWS - 1>(rows, panels, next, up, x, sums);
        constexpr int AT_ONCE = panels_at_once(ROWS);
        if constexpr (!one_stream(ROWS))
            if (panels.count == AT_ONCE) return multiply_panels<ROWS, AT_ONCE>(panels.first, panels.apart, next, 0, up, x, sums);
        for (int64_t i = 0; i < panels.count; i++) {
            const int64_t panel = panels.first + i * panels.apart, behind = panel + panels.apart;
            const bool goes_on = one_stream(ROWS) && i + 1 < panels.count;
            multiply_panels<ROWS, 1>(panel, 0, goes_on ? Next{{behind, 1, 0}, 0, 1} : next, i, up, x, sums);
        }
    }

    template <int ROWS, int PANELS>
    void multiply_panels(int64_t first, int64_t apart, const Next& next, int64_t place, int up, const QuantizedRows<Dot>& x, Sums* sums) const {
        constexpr int VECTORS = PANELS * PARTS;
        const int64_t depth = depth_of(call.in_features), panel_bytes = depth * Dot::LINE_OF_K, panel_scales = x.groups * Dot::SCALES;
        const int64_t ahead = ahead_of(panel_bytes, AHEAD_BYTES / PANELS, Dot::BLOCK);
        const char *weights = (const char*)call.weight, *scales = (const char*)call.scales + first * panel_scales;
        const Blocks here{weights + first * panel_bytes, apart * panel_bytes};
        const Blocks there{weights + next.panels.first * panel_bytes, next.panels.apart * panel_bytes};
        const int64_t scales_apart = apart * panel_scales, share = next.shares > 1 ? Dot::BLOCK / next.shares : 0;
        const char* soon_scales = share ? (const char*)call.scales + next.panels.first * panel_scales : scales + AHEAD_GROUPS * Dot::SCALES;
        const int64_t soon_scales_apart = share ? next.panels.apart * panel_scales : scales_apart;
        decltype(Vec::v) total[ROWS * VECTORS];
        const Vec zero = settled(Vec());  // a known zero, and GCC clears all by one instruction for memory, which takes its time
        for (auto& sum : total) sum = zero.v;
        for (int64_t group = 0; group < x.groups; group++, scales += Dot::SCALES, soon_scales += Dot::SCALES) {
            const char* block = here.first + group * Dot::BLOCK;
            const int64_t left = panel_bytes - group * Dot::BLOCK - ahead;
            const Blocks soon = left > 0 ? Blocks{block + ahead, here.apart} : Blocks{there.first - left, there.apart};
            if (one_stream(ROWS) && group + 1 == x.groups && there.first != here.first + panel_bytes)
                for (int64_t i = 0; i < SEAM_BYTES; i += 64) there.ask_for<PANELS>(i);
            for (int64_t i = 0; i < share; i += 64) there.ask_for<PANELS>((x.groups * next.share + group) * share + i);
            written_out<PANELS>([&](int panel) ALWAYS_INLINE { __builtin_prefetch(soon_scales + panel * soon_scales_apart); });
            Ints exact[ROWS * VECTORS];
            const int64_t size = std::min(Dot::GROUP, depth - group * Dot::GROUP);
            Dot::template dot<ROWS, PANELS>(block, here.apart, scales, scales_apart, x, group, size, soon, exact);
            written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                Vec scale = Vec::load((const uint16_t*)(vector_at(scales, scales_apart, i, Vec::LANES * 2) + Dot::SCALES_AT));
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    auto& sum = total[row * VECTORS + i];
                    sum = Vec::fma(exact[row * VECTORS + i].to_floats(), scale * Vec(x.scales[row * x.groups + group]), sum).v;
                });
            });
        }
        written_out<ROWS>([&](int row) ALWAYS_INLINE {
            written_out<VECTORS>([&](int i) ALWAYS_INLINE { Vec(total[row * VECTORS + i]).store(sums[row][place + i / PARTS][up] + i % PARTS * Vec::LANES); });
        });
    }
};

#ifdef QUIRE_AMX
#include "quantized_amx.inl"
#endif

constexpr int64_t ROWS_AT_ONCE = 512;          // quantized together, in memory that the threads share
constexpr int64_t ROWS_APART = 2;              // so few each thread quantizes for itself: cheaper than waiting for another
constexpr int64_t ITEM_BYTES = 128 * 1024;     // of weights: worth being taken
constexpr int64_t STREAMS_BYTES = 512 * 1024;  // the same where rows are few: long streams are what memory is fast at
constexpr int64_t CACHED_BYTES = 128 * 1024;   // of x, which stay in the second cache while panels come

// Bias, activation and rounding of `rows` rows of one panel, place `place` of their sums; the first result is out[first].
template <typename T>
void finish_panel(const QuantizedLinear& a, Sums* sums, int64_t place, int64_t first, int64_t rows, int64_t panel, int64_t all_columns) {
    const bool gated = a.epilogue == GATED;
    const int64_t column = panel * PANEL, columns = std::min(PANEL, all_columns - column);
    float bias[2][PANEL];
    for (int up = 0; a.bias && up <= gated; up++) copy_numbers((const T*)a.bias + up * all_columns + column, bias[up], columns);
    auto finish = [&](auto* out, int64_t columns, bool gated) ALWAYS_INLINE {
        for (int64_t row = 0; row < rows; row++)
            finish_row<T>(sums[row][place][0], a.bias ? bias[0] : nullptr, columns, PANEL, gated, out + (first + row) * a.out_row + column);
    };
    auto finish_all = [&](auto* out) ALWAYS_INLINE {  // that a panel is whole, as nearly all are, shall be known to the compiler
        if (columns < PANEL) finish(out, columns, gated);
        else if (gated) finish(out, PANEL, true);
        else finish(out, PANEL, false);
    };
    if (a.out_dtype == F32) finish_all((float*)a.out);
    else finish_all((uint16_t*)a.out);
}

// Memory for what finish_panel writes: a store that misses the caches holds up all later ones.
inline void ask_for_results(const QuantizedLinear& a, int64_t first, int64_t rows, int64_t panel) {
    const int64_t width = a.out_dtype == F32 ? 4 : 2;
    for (int64_t row = 0; row < rows; row++) __builtin_prefetch((char*)a.out + ((first + row) * a.out_row + panel * PANEL) * width, 1);
}

// All panels for `rows` quantized rows, whose first result is out[first].
template <typename T, typename Form, typename X>
void multiply_quantized(Form& form, const QuantizedLinear& a, int64_t first, int64_t rows, const X& x, int64_t panel_bytes, const Worker& worker) {
    const bool gated = a.epilogue == GATED;
    const int64_t all_columns = gated ? a.out_features / 2 : a.out_features, panels = (all_columns + PANEL - 1) / PANEL;
    const int64_t chunk = std::min(rows, std::max<int64_t>(1, CACHED_BYTES / (x.groups * X::GROUP) / Form::MAX_ROWS) * Form::MAX_ROWS);
    const int64_t beside = std::max<int64_t>(1, std::min<int64_t>(Form::panels_at_once(std::min<int64_t>(chunk, Form::MAX_ROWS)), panels / worker.count));
    const int64_t sets = (panels + beside - 1) / beside, worth = rows <= Form::MAX_ROWS ? STREAMS_BYTES : ITEM_BYTES;
    const int64_t items = std::min(sets, std::max<int64_t>(8 * worker.count, panels * panel_bytes / worth));
    Sums sums[Form::MAX_ROWS];
    const auto start_of = [=](int64_t item) { return std::min(item * sets / items * beside, panels); };
    const bool one_stream = Form::one_stream(chunk);
    const auto side_of = [=](int64_t item, int64_t set) {  // what is no whole set comes one by one
        const int64_t start = start_of(item), end = start_of(item + 1), whole = (end - start) / beside;
        if (one_stream) return Panels{start + set * beside, std::min(beside, end - start - set * beside), 1};
        return set < whole ? Panels{start + set, beside, whole} : Panels{start + whole * beside + set - whole, 1, 0};
    };
    for (int64_t i; (i = worker.next(items)) < items;) {
        const int64_t following = worker.following(i, items);
        for (int64_t begin = 0; begin < rows; begin += chunk) {
            const int64_t here = std::min(chunk, rows - begin), tiles = (here + Form::MAX_ROWS - 1) / Form::MAX_ROWS;
            const int64_t size = start_of(i + 1) - start_of(i), count_of_sets = one_stream ? ceil_div(size, beside) : size / beside + size % beside;
            for (int64_t set = 0; set < count_of_sets; set++) {
                const Panels side = side_of(i, set), next = set + 1 < count_of_sets ? side_of(i, set + 1) : side_of(following, 0);
                for (int64_t tile = 0; tile < tiles; tile++) {
                    const int64_t row = begin + tile * here / tiles, count = begin + (tile + 1) * here / tiles - row;
                    for (int64_t p = 0; p < side.count; p++) ask_for_results(a, first + row, count, side.first + p * side.apart);
                    for (int up = 0; up <= gated; up++)
                        form.multiply(count, Panels{up * panels + side.first, side.count, side.apart},
                                      Next{{up * panels + next.first, next.count, next.apart}, tile, tiles}, up, x.from(row), sums);
                    for (int64_t p = 0; p < side.count; p++)
                        finish_panel<T>(a, sums, p, first + row, count, side.first + p * side.apart, all_columns);
                }
            }
        }
    }
}

template <typename T, typename Dot, typename Form>
void multiply_rows(const QuantizedLinear& a, int64_t rows, const Worker& worker) {
    using X = QuantizedRows<Dot>;
    const int64_t groups = ceil_div(a.in_features, Dot::GROUP), most = std::min(rows, ROWS_AT_ONCE);
    Form form(a, worker);
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = std::min(most, rows - first);
        const T* from = (const T*)a.x + first * a.x_row;
        X x(rows <= ROWS_APART ? worker.scratch(X::bytes(most, groups)) : worker.shared(X::bytes(most, groups)), most, groups);
        if (rows <= ROWS_APART) {
            for (int64_t row = 0; row < count; row++) x.quantize(row, from + row * a.x_row, a.in_features);
        } else {
            for (int64_t row; (row = worker.next(count)) < count;) x.quantize(row, from + row * a.x_row, a.in_features);
            worker.barrier();
        }
        multiply_quantized<T>(form, a, first, count, x, depth_of(a.in_features) * Dot::LINE_OF_K, worker);
        if (first + most < rows) worker.barrier();
    }
}

template <typename Dot>
void quantized_linear(const Call& call, const Step& step, const Worker& worker) {
    const QuantizedLinear& a = (const QuantizedLinear&)call;
    const int64_t rows = rows_of(call, step);
#ifdef QUIRE_AMX
    if (rows >= TILES_FROM_ROWS) {
        FOR_DTYPE(call.dtype, (multiply_rows<T, Dot, TileForm<Dot>>(a, rows, worker)));
        return;
    }
#endif
    FOR_DTYPE(call.dtype, (multiply_rows<T, Dot, VectorForm<Dot>>(a, rows, worker)));
}

constexpr Kernel linear_int8 = quantized_linear<Int8Dot>, linear_int4 = quantized_linear<Int4Dot>;

}  // namespace quantized
