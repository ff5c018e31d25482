// Linear layers over int8 and int4 weights (abi.h: QuantizedLinear; layout: quantize.inl) and over
// GGUF's blocks (gguf_types.inl, gguf_dot.inl).
//
//   rows of x are quantized in the same groups as weights: integers in +-127, and a scale
//   item = a few panels, computed by one thread
//       for adjacent panels, for a few rows: for each group the exact sum of products of integers,
//       times both scales, added in fp32
//       then bias, activation, rounding
//
// A group's sum is exact with all instructions, and groups are added in ascending order with one
// fused multiply-add each. A result's bits therefore depend on its row of x and on the weights
// alone: not on other rows, on threads, or on the instruction set.

namespace quantized {

// a group with nothing larger counts as zeros, so that no scale's inverse overflows
constexpr float LEAST = 1e-30f;

// a NaN becomes `high`
inline Vec within(Vec x, float low, float high) {
    return Vec::max(Vec::min(x, Vec(high)), Vec(low));
}
inline Vec whole_within(Vec x, float most) { return within(Vec::round(x), -most, most); }

#include "quantize.inl"

// f(0) to f(N - 1), unrolled before the compiler decides where arrays live: it keeps the arrays of
// a loop that it unrolls later in memory.
template <int N, typename F>
inline ALWAYS_INLINE void written_out(F f) {
    if constexpr (N > 0) {
        written_out<N - 1>(f);
        f(N - 1);
    }
}

#include "quantized_rows.inl"

#include "quantized_dot.inl"

// Bytes of a panel's scales: SCALES per complete group, a part of them per SCALED numbers of k
template <typename Dot>
inline int64_t scales_of_panel(int64_t in_features) {
    return ceil_div(in_features, Dot::SCALED) * (Dot::SCALES * Dot::SCALED / Dot::GROUP);
}

#include "gguf_types.inl"

constexpr int MAX_PANELS = 4;
using Sums = float[MAX_PANELS][2][PANEL];  // a row's results; [1] is of the up half

// How far ahead weights and scales are prefetched. Weights go to the L2 cache: L1 allows few
// outstanding lines.
constexpr int64_t AHEAD_BYTES = 8192, AHEAD_GROUPS = 4;
constexpr int64_t SEAM_BYTES = 1024;  // prefetched where a stream continues at another address

// Panels multiplied side by side: first, first + apart, ... The next ones are the panels after
// these, so that there are as many gapless streams of weights. Or, as one stream, one after the
// other.
struct Panels {
    int64_t first, count, apart;
};

// A product prefetches the first weights of the next one before it ends. If it is computed in tiles
// of rows, only the first tile reads weights from memory, so each tile prefetches a share of all
// weights of the next product.
struct Next {
    Panels panels;  // of the next product
    int64_t share, shares;
    const QuantizedLinear* layer;  // whose panels these are, of the same size

    template <typename Dot>
    const char* scales() const {
        return (const char*)layer->scales + panels.first * scales_of_panel<Dot>(layer->in_features);
    }
};

#include "gguf_dot.inl"

// About `wanted` bytes, adjusted so that the weights at the end of a panel, whose last block may be
// short, are prefetched before a block and not within one.
inline int64_t ahead_of(int64_t panel_bytes, int64_t wanted, int64_t block) {
    const int64_t rest = panel_bytes % block,
                  ahead = rest + (wanted - rest + block / 2) / block * block;
    return ahead > 0 ? ahead : block;
}

// A few panels times a few rows of x
template <typename Dot>
struct VectorForm {
    static constexpr int MAX_ROWS = Dot::MAX_DIRECT_ROWS;

    const QuantizedLinear& call;
    explicit VectorForm(const QuantizedLinear& call, const Worker&) : call(call) {}

    static constexpr int panels_at_once(int64_t rows) {
        if constexpr (Dot::OWN_SCALES) {
            // of blocks, a row also has sums in fp32
            const int most = rows > 2 ? MAX_EXACT_SUMS / 2 : MAX_EXACT_SUMS;
            return std::min(Dot::MOST_PANELS, panels_beside((int)rows, most));
        }
        return panels_beside((int)rows, MAX_EXACT_SUMS);
    }
    static constexpr bool one_stream(int64_t rows) { return rows <= Dot::ONE_STREAM; }

    void multiply(int64_t rows, const Panels& panels, const Next& next, int up,
                  const QuantizedRows<Dot>& x, Sums* sums) const {
        multiply_exactly<MAX_ROWS>(rows, panels, next, up, x, sums);
    }

private:
    template <int ROWS>
    void multiply_exactly(int64_t rows, const Panels& panels, const Next& next, int up,
                          const QuantizedRows<Dot>& x, Sums* sums) const {
        if constexpr (ROWS > 1)
            if (rows != ROWS) return multiply_exactly<ROWS - 1>(rows, panels, next, up, x, sums);
        constexpr int AT_ONCE = panels_at_once(ROWS);
        if constexpr (!one_stream(ROWS))
            if (panels.count == AT_ONCE)
                return multiply_panels<ROWS, AT_ONCE>(panels.first, panels.apart, next, 0, up, x,
                                                      sums);
        for (int64_t i = 0; i < panels.count; i++) {
            const int64_t panel = panels.first + i * panels.apart, behind = panel + panels.apart;
            const bool goes_on = one_stream(ROWS) && i + 1 < panels.count;
            multiply_panels<ROWS, 1>(panel, 0, goes_on ? Next{{behind, 1, 0}, 0, 1, &call} : next,
                                     i, up, x, sums);
        }
    }

    template <int ROWS, int PANELS>
    __attribute__((noinline)) void multiply_panels(int64_t first, int64_t apart, const Next& next,
                                                   int64_t place, int up,
                                                   const QuantizedRows<Dot>& x, Sums* sums) const {
        constexpr int VECTORS = PANELS * PARTS;
        const int64_t depth = round_up(call.in_features, Dot::DEPTH),
                      panel_bytes = depth * Dot::LINE_OF_K,
                      panel_scales = scales_of_panel<Dot>(call.in_features);
        const int64_t ahead = ahead_of(panel_bytes, AHEAD_BYTES / PANELS, Dot::BLOCK);
        const char* scales = (const char*)call.scales + first * panel_scales;
        const Blocks here{(const char*)call.weight + first * panel_bytes, apart * panel_bytes};
        const Blocks there{(const char*)next.layer->weight + next.panels.first * panel_bytes,
                           next.panels.apart * panel_bytes};
        const int64_t scales_apart = apart * panel_scales,
                      share = next.shares > 1 ? Dot::BLOCK / next.shares : 0,
                      scales_ahead = share ? x.groups : std::min(AHEAD_GROUPS, x.groups);
        decltype(Vec::v) total[ROWS * VECTORS];
        // An opaque zero: GCC would clear all sums with one instruction for memory, which is slow.
        const Vec zero = settled(Vec());
        for (auto& sum : total) sum = zero.v;
        for (int64_t group = 0; group < x.groups; group++, scales += Dot::SCALES) {
            const char* block = here.first + group * Dot::BLOCK;
            const int64_t left = panel_bytes - group * Dot::BLOCK - ahead;
            const Blocks soon = left > 0 ? Blocks{block + ahead, here.apart}
                                         : Blocks{there.first - left, there.apart};
            if (one_stream(ROWS) && group + 1 == x.groups &&
                there.first != here.first + panel_bytes)
                for (int64_t i = 0; i < SEAM_BYTES; i += 64) there.ask_for<PANELS>(i);
            for (int64_t i = 0; i < share; i += 64)
                there.ask_for<PANELS>((x.groups * next.share + group) * share + i);
            const int64_t over = group + scales_ahead - x.groups;
            const Blocks soon_scales =
                over < 0 ? Blocks{scales + scales_ahead * Dot::SCALES, scales_apart}
                         : Blocks{next.scales<Dot>() + over * Dot::SCALES,
                                  next.panels.apart * panel_scales};
            written_out<PANELS>([&](int panel) ALWAYS_INLINE {
                for (int64_t i = 0; i < Dot::SCALES; i += 64)
                    __builtin_prefetch(soon_scales.first + panel * soon_scales.apart + i);
            });
            const int64_t size = std::min(Dot::GROUP, depth - group * Dot::GROUP);
            if constexpr (Dot::OWN_SCALES)
                add_blocks<Dot, ROWS, PANELS>(block, here.apart, scales, scales_apart, x, group,
                                              size, soon, total);
            else
                add_group<ROWS, PANELS>(block, here.apart, scales, scales_apart, x, group, size,
                                        soon, total);
        }
        written_out<ROWS>([&](int row) ALWAYS_INLINE {
            written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                Vec(total[row * VECTORS + i])
                    .store(sums[row][place + i / PARTS][up] + i % PARTS * Vec::LANES);
            });
        });
    }

    // A group of int8 or int4: one scale in bf16
    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void add_group(const char* block, int64_t apart, const char* scales,
                                        int64_t scales_apart, const QuantizedRows<Dot>& x,
                                        int64_t group, int64_t size, const Blocks& soon,
                                        decltype(Vec::v)* total) {
        constexpr int VECTORS = PANELS * PARTS;
        Ints exact[ROWS * VECTORS];
        Dot::template dot<ROWS, PANELS>(block, apart, scales, scales_apart, x, group, size, soon,
                                        exact);
        written_out<VECTORS>([&](int i) ALWAYS_INLINE {
            Vec scale =
                Vec::load((const uint16_t*)(vector_at(scales, scales_apart, i, Vec::LANES * 2) +
                                            Dot::SCALES_AT));
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                auto& sum = total[row * VECTORS + i];
                sum = Vec::fma(exact[row * VECTORS + i].to_floats(),
                               scale * Vec(x.scales[row * x.groups + group]), sum)
                          .v;
            });
        });
    }
};

#ifdef QUIRE_AMX
#include "gguf_amx.inl"
#include "quantized_amx.inl"
#endif

constexpr int64_t ROWS_AT_ONCE = 512;  // quantized together, in memory that the threads share
// up to this many, each thread quantizes for itself: cheaper than waiting for another
constexpr int64_t ROWS_APART = 2;
constexpr int64_t ITEM_BYTES = 128 * 1024;  // of weights: enough work for an item
// the same if there are few rows: memory is fastest with long streams
constexpr int64_t STREAMS_BYTES = 512 * 1024;
// of x, which stay in the L2 cache while panels pass; processors with AMX have 2 MB of it
#ifdef QUIRE_AMX
constexpr int64_t CACHED_BYTES = 1024 * 1024;
#else
constexpr int64_t CACHED_BYTES = 128 * 1024;
#endif

// Bias, activation and rounding of `rows` rows of one panel, which has index `place` in their sums;
// the first result is out[first].
template <typename T>
void finish_panel(const QuantizedLinear& a, Sums* sums, int64_t place, int64_t first, int64_t rows,
                  int64_t panel, int64_t all_columns) {
    const bool gated = is_gated(a.epilogue);
    const int64_t column = panel * PANEL, columns = std::min(PANEL, all_columns - column);
    float bias[2][PANEL];
    for (int up = 0; a.bias && up <= gated; up++)
        copy_numbers((const T*)a.bias + up * all_columns + column, bias[up], columns);
    auto finish = [&](auto* out, int64_t columns, int32_t epilogue) ALWAYS_INLINE {
        for (int64_t row = 0; row < rows; row++)
            finish_row<T>(a, sums[row][place][0], a.bias ? bias[0] : nullptr, columns, PANEL,
                          epilogue, out + (first + row) * a.out_row + column);
    };
    // tells the compiler that a panel is complete, as nearly all are
    auto finish_all = [&](auto* out) ALWAYS_INLINE {
        if (columns < PANEL) finish(out, columns, a.epilogue);
        else if (a.epilogue == GATED) finish(out, PANEL, GATED);
        else if (a.epilogue == PLAIN) finish(out, PANEL, PLAIN);
        else finish(out, PANEL, a.epilogue);
    };
    if (a.out_dtype == F32) finish_all((float*)a.out);
    else finish_all((uint16_t*)a.out);
}

// Prefetches the memory that finish_panel writes: a store that misses the caches delays all later
// ones.
inline void ask_for_results(const QuantizedLinear& a, int64_t first, int64_t rows, int64_t panel) {
    const int64_t width = a.out_dtype == F32 ? 4 : 2;
    for (int64_t row = 0; row < rows; row++)
        __builtin_prefetch((char*)a.out + ((first + row) * a.out_row + panel * PANEL) * width, 1);
}

// Products of quantized rows and panels, whatever the types of both: one loop serves all.
struct Products {
    static constexpr int MOST_ROWS = 16;
    const int max_rows;  // of one `multiply`
    const int64_t row_bytes, panel_bytes;

    Products(int max_rows, int64_t row_bytes, int64_t panel_bytes)
        : max_rows(max_rows), row_bytes(row_bytes), panel_bytes(panel_bytes) {}
    virtual int panels_at_once(int64_t rows) const = 0;
    virtual bool one_stream(int64_t rows) const = 0;
    // sums [rows] of rows `first` to `first + rows`
    virtual void multiply(int64_t first, int64_t rows, const Panels& panels, const Next& next,
                          int up, Sums* sums) = 0;
};

template <typename Form, typename Dot>
struct ProductsOf final : Products {
    static_assert(Form::MAX_ROWS <= MOST_ROWS);
    Form& form;
    const QuantizedRows<Dot> x;

    ProductsOf(Form& form, const QuantizedRows<Dot>& x, int64_t panel_bytes)
        : Products(Form::MAX_ROWS, x.groups * Dot::GROUP, panel_bytes), form(form), x(x) {}

    int panels_at_once(int64_t rows) const override { return Form::panels_at_once(rows); }
    bool one_stream(int64_t rows) const override { return Form::one_stream(rows); }
    void multiply(int64_t first, int64_t rows, const Panels& panels, const Next& next, int up,
                  Sums* sums) override {
        form.multiply(rows, panels, next, up, x.from(first), sums);
    }
};

// All panels for `rows` quantized rows, whose first result is out[first], in items that threads
// compute one by one.
template <typename T>
struct QuantizedItems {
    Products& products;
    const QuantizedLinear& a;
    const int64_t first, rows;
    int64_t panels, chunk, beside, sets, count;
    bool one_stream;

    // layers: that the threads share
    QuantizedItems(Products& products, const QuantizedLinear& a, int64_t first, int64_t rows,
                   int64_t threads, int64_t layers = 1)
        : products(products), a(a), first(first), rows(rows) {
        const int64_t max_rows = products.max_rows;
        panels = ceil_div(columns(), PANEL);
        chunk = std::min(
            rows, std::max<int64_t>(1, CACHED_BYTES / products.row_bytes / max_rows) * max_rows);
        beside = std::max<int64_t>(
            1, std::min<int64_t>(products.panels_at_once(std::min(chunk, max_rows)),
                                 panels * layers / threads));
        sets = ceil_div(panels, beside);
        const int64_t worth = rows <= max_rows ? STREAMS_BYTES : ITEM_BYTES;
        count = std::min(
            sets, std::max(ceil_div(8 * threads, layers), panels * products.panel_bytes / worth));
        one_stream = products.one_stream(chunk);
    }

    // following: the item that the thread probably computes next, of next_layer
    __attribute__((noinline)) void run(int64_t item, int64_t following,
                                       const QuantizedLinear& next_layer) const {
        const bool gated = is_gated(a.epilogue);
        const int64_t max_rows = products.max_rows;
        Sums sums[Products::MOST_ROWS];
        for (int64_t begin = 0; begin < rows; begin += chunk) {
            const int64_t here = std::min(chunk, rows - begin), tiles = ceil_div(here, max_rows);
            const int64_t size = start_of(item + 1) - start_of(item),
                          count_of_sets =
                              one_stream ? ceil_div(size, beside) : size / beside + size % beside;
            for (int64_t set = 0; set < count_of_sets; set++) {
                const bool goes_on = set + 1 < count_of_sets;
                const Panels side = side_of(item, set),
                             next = goes_on ? side_of(item, set + 1) : side_of(following, 0);
                const QuantizedLinear& layer = goes_on ? a : next_layer;
                for (int64_t tile = 0; tile < tiles; tile++) {
                    const int64_t row = begin + tile * here / tiles,
                                  num_rows = begin + (tile + 1) * here / tiles - row;
                    for (int64_t p = 0; p < side.count; p++)
                        ask_for_results(a, first + row, num_rows, side.first + p * side.apart);
                    for (int up = 0; up <= gated; up++)
                        products.multiply(row, num_rows,
                                          Panels{up * panels + side.first, side.count, side.apart},
                                          Next{{up * panels + next.first, next.count, next.apart},
                                               tile,
                                               tiles,
                                               &layer},
                                          up, sums);
                    for (int64_t p = 0; p < side.count; p++)
                        finish_panel<T>(a, sums, p, first + row, num_rows,
                                        side.first + p * side.apart, columns());
                }
            }
        }
    }

private:
    int64_t columns() const { return is_gated(a.epilogue) ? a.out_features / 2 : a.out_features; }
    int64_t start_of(int64_t item) const { return std::min(item * sets / count * beside, panels); }
    // the panels of an incomplete set come one by one
    Panels side_of(int64_t item, int64_t set) const {
        const int64_t start = start_of(item), end = start_of(item + 1),
                      whole = (end - start) / beside;
        if (one_stream)
            return Panels{start + set * beside, std::min(beside, end - start - set * beside), 1};
        return set < whole ? Panels{start + set, beside, whole}
                           : Panels{start + whole * beside + set - whole, 1, 0};
    }
};

template <typename T, typename Dot, typename Form>
void multiply_rows(const QuantizedLinear& a, int64_t rows, const Worker& worker) {
    using X = QuantizedRows<Dot>;
    const int64_t groups = ceil_div(a.in_features, Dot::GROUP), most = std::min(rows, ROWS_AT_ONCE);
    Form form(a, worker);
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = std::min(most, rows - first);
        const T* from = (const T*)a.x + first * a.x_row;
        X x(rows <= ROWS_APART ? worker.scratch(X::bytes(most, groups))
                               : worker.shared(X::bytes(most, groups)),
            most, groups);
        if (rows <= ROWS_APART) {
            for (int64_t row = 0; row < count; row++)
                x.quantize(row, from + row * a.x_row, a.in_features);
        } else {
            for (int64_t row; (row = worker.next(count)) < count;)
                x.quantize(row, from + row * a.x_row, a.in_features);
            worker.barrier();
        }
        ProductsOf<Form, Dot> products(form, x,
                                       round_up(a.in_features, Dot::DEPTH) * Dot::LINE_OF_K);
        const QuantizedItems<T> items(products, a, first, count, worker.count);
        for (int64_t i; (i = worker.next(items.count)) < items.count;)
            items.run(i, worker.following(i, items.count), a);
        if (first + most < rows) worker.barrier();
    }
}

// The form for at least FROM rows, and that for fewer.
template <typename Dot, bool OWN_SCALES = Dot::OWN_SCALES>
struct Forms {
#ifdef QUIRE_AMX
    using Many = TileForm<Dot>;
    static constexpr int64_t FROM = TILES_FROM_ROWS;
#else
    using Many = VectorForm<Dot>;
    static constexpr int64_t FROM = 1;
#endif
    using Few = VectorForm<Dot>;
};
template <typename Dot>
struct Forms<Dot, true> {
#ifdef QUIRE_AMX
    using Many = BlockTileForm<Dot>;
    using Few = Many;  // of experts; calls with few rows are AVX-512's (if_many)
    static constexpr int64_t FROM = 1;
#else
    using Many = UnpackedForm<Dot>;
    using Few = VectorForm<Dot>;
    static constexpr int64_t FROM = Dot::MOST_DIRECT_ROWS + 1;
#endif
};

template <typename Dot>
void quantized_linear(const Call& call, const Step& step, const Worker& worker) {
    using Form = Forms<Dot>;
    const QuantizedLinear& a = (const QuantizedLinear&)call;
    const int64_t rows = rows_of(call, step);
    if (rows >= Form::FROM)
        FOR_DTYPE(call.dtype, (multiply_rows<T, Dot, typename Form::Many>(a, rows, worker)));
    else FOR_DTYPE(call.dtype, (multiply_rows<T, Dot, typename Form::Few>(a, rows, worker)));
}

#include "quantized_experts.inl"

#ifdef QUIRE_AMX
// A kernel of blocks in tiles, or for few rows that of AVX-512: rows that it multiplies at once do
// not pay for unpacking.
template <Kernel IN_TILES>
void if_many(const Call& call, const Step& step, const Worker& worker) {
    const int64_t rows = call.op == OP_EXPERTS_LINEAR_BLOCKS
                             ? rows_of_expert((const ExpertsLinear&)call)
                             : rows_of(call, step);
    (rows > 8 ? IN_TILES : QUIRE_BASE.kernel(call.op))(call, step, worker);
}
#endif

}  // namespace quantized
