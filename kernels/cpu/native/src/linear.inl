// Linear layers over packed weights (abi.h: Linear): the loops around a Block. They order rows,
// panels and pieces of k so that weights are read from memory once if there are few rows, and
// everything comes from caches if there are many.
//
//   item = a chunk of rows x a group of panels, computed by one thread
//       for a piece of k (Block::DEPTH):
//           for panels whose piece fits the L1 cache:
//               for a few rows: Block::multiply into fp32 sums
//       then bias, activation, rounding
//
// An element's sum takes k in ascending order and is kept in fp32 between pieces, so it does not
// depend on rows, chunks, groups or threads.

constexpr int64_t PANEL = 16;  // columns of the result

#include "block_vec.inl"
#ifdef QUIRE_AMX
#include "block_amx.inl"
#elif defined(QUIRE_BFMMLA)
#include "block_matrix.inl"
using Bf16Block = MatrixBlock;
#else
using Bf16Block = VecBlock<DotBf16>;
#endif

template <typename T>
struct BlockOf;
template <>
struct BlockOf<float> {
    using type = VecBlock<DotF32>;
};
template <>
struct BlockOf<uint16_t> {
    using type = Bf16Block;
};

inline void copy_numbers(const uint16_t* from, uint16_t* to, int64_t size) {
    std::memcpy(to, from, size * 2);
}
template <typename T>
void copy_numbers(const T* from, float* to, int64_t size) {
    int64_t i = 0;
    for (; i + Vec::LANES <= size; i += Vec::LANES) Vec::load(from + i).store(to + i);
    for (; i < size; i++) to[i] = Number<T>::get(from[i]);
}

// Rows of x: row i of a call's x, or row of[i].
template <typename T>
struct InputRows {
    const T* x;
    int64_t x_row;
    const int32_t* of = nullptr;

    const T* operator[](int64_t i) const { return x + (of ? of[i] : i) * x_row; }
};

// Rows `first` to `first + rows` of x in the block's layout: [piece of k][row][STRIDE], zeros after
// the last k.
template <typename Block, typename T>
void lay_out(const InputRows<T>& x, int64_t first, int64_t rows, int64_t in_features,
             typename Block::X* to) {
    for (int64_t begin = 0; begin < in_features; begin += Block::DEPTH)
        for (int64_t row = 0; row < rows; row++, to += Block::STRIDE) {
            int64_t size = std::min(Block::DEPTH, in_features - begin);
            copy_numbers(x[first + row] + begin, to, size);
            for (int64_t i = size; i < round_up(size, 32); i++) to[i] = 0;
        }
}

// The order of pieces and panels is free, since each sum takes its pieces in ascending order either
// way. If x fits the L2 cache, a panel's pieces follow each other and its weights are one stream;
// otherwise the whole group of panels uses a piece of x before the next piece.
constexpr int64_t SMALL_X = 1 << 17;

template <typename Block>
void multiply_chunk(Block& block, const typename Block::X* x, int64_t rows, int64_t in_features,
                    int64_t panel, int64_t panels, const typename Block::Weight* after, float* sums,
                    int64_t sums_row) {
    const int64_t blocks = (rows + Block::MAX_ROWS - 1) / Block::MAX_ROWS,
                  at_once = Block::panels_at_once((rows + blocks - 1) / blocks);
    const int64_t pieces = (in_features + Block::DEPTH - 1) / Block::DEPTH,
                  groups = (panels + at_once - 1) / at_once;
    const bool by_panel = rows * in_features * (int64_t)sizeof(*x) <= SMALL_X;
    auto piece_of = [=](int64_t i) { return by_panel ? i % pieces : i / groups; };
    auto first_of = [=](int64_t i) { return (by_panel ? i / pieces : i % groups) * at_once; };
    const int64_t products = pieces * groups;
    for (int64_t i = 0; i < products; i++) {
        const int64_t piece = piece_of(i), first = first_of(i), begin = piece * Block::DEPTH,
                      size = std::min(Block::DEPTH, in_features - begin);
        const auto* next = i + 1 < products
                               ? block.at(panel + first_of(i + 1), piece_of(i + 1) * Block::DEPTH)
                               : after;
        for (int64_t j = 0; j < blocks; j++) {
            const int64_t row = j * rows / blocks, end = (j + 1) * rows / blocks;
            block.multiply(end - row, std::min(at_once, panels - first),
                           x + (piece * rows + row) * Block::STRIDE, panel + first, begin, size,
                           sums + row * sums_row + first * PANEL, sums_row, next, j, blocks);
        }
    }
}

// What an epilogue does to a number, or to a gate.
inline Vec activate(int32_t epilogue, Vec x) {
    switch (epilogue) {
        case GELU:
        case GATED_GELU:
            return gelu(x);
        case GELU_TANH:
        case GATED_GELU_TANH:
            return gelu_tanh(x);
        case RELU:
            return relu(x);
        case RELU_SQUARED:
            return relu_squared(x);
        default:
            return silu(x);
    }
}

// Computes one row's columns from their sums; those of the up half are `half` further on. bias
// (same layout as sums) may be null. Sums and bias extend to a multiple of PANEL.
template <typename T, typename Out>
inline ALWAYS_INLINE void finish_row(const Linear& a, const float* sums, const float* bias,
                                     int64_t columns, int64_t half, int32_t epilogue, Out* out) {
    const bool gated = is_gated(epilogue);
    for (int64_t i = 0; i < columns; i += Vec::LANES) {
        Vec value = Vec::load(sums + i), up = gated ? Vec::load(sums + half + i) : Vec();
        if (bias) value = value + Vec::load(bias + i);
        if (bias && gated) up = up + Vec::load(bias + half + i);
        if (epilogue == GATED_CLAMPED) {
            value = clamped_swiglu(Number<T>::round(value), Number<T>::round(up),
                                   Vec((float)a.gate_scale), Vec((float)a.gate_limit));
        } else if (gated) {
            value = Number<T>::round(activate(epilogue, Number<T>::round(value))) *
                    Number<T>::round(up);
        } else if (epilogue != PLAIN) {
            value = activate(epilogue, Number<T>::round(value));
        }
        if (i + Vec::LANES <= columns) {
            value.store(out + i);
        } else {
            float rest[Vec::LANES];
            value.store(rest);
            for (int64_t j = 0; i + j < columns; j++) put(out + i + j, rest[j]);
        }
    }
}

// A linear layer's product with some rows, in items that threads compute one by one.
template <typename T, typename Block>
struct LinearItems {
    Linear a;
    InputRows<T> x;
    int64_t rows, threads;
    int64_t all_columns = is_gated(a.epilogue) ? a.out_features / 2 : a.out_features,
            panels = ceil_div(all_columns, PANEL), chunks = ceil_div(rows, Block::CHUNK_ROWS),
            group = Block::group(rows, panels, threads), groups = ceil_div(panels, group),
            // chunks consist of complete blocks
        blocks = ceil_div(rows, Block::MAX_ROWS),
            most_rows =
                chunks ? std::min(rows, (blocks + chunks - 1) / chunks * Block::MAX_ROWS) : 0,
            half = group * PANEL, width = is_gated(a.epilogue) ? 2 * half : half;

    int64_t count() const { return chunks * groups; }
    // of `memory`, which has x of the chunk that was computed before
    size_t bytes() const {
        return (most_rows + 1) * width * sizeof(float) + ceil_div(a.in_features, Block::DEPTH) *
                                                             most_rows * Block::STRIDE *
                                                             sizeof(typename Block::X);
    }
    int64_t chunk_of(int64_t item) const { return item / groups; }
    // the first weights that an item reads
    const typename Block::Weight* start_of(int64_t item) const {
        return Block(a).at(item % groups * group, 0);
    }

    // is_laid_out: `memory` has x of this item's chunk. after: the next item's first weights,
    // probably.
    void run(Block& block, int64_t item, bool is_laid_out, const typename Block::Weight* after,
             void* memory) const {
        const bool gated = is_gated(a.epilogue);
        float *sums = (float*)memory, *bias = sums + most_rows * width;
        auto* here = (typename Block::X*)(bias + width);
        const int64_t chunk = chunk_of(item), first = chunk * blocks / chunks * Block::MAX_ROWS;
        const int64_t num_rows =
            std::min((chunk + 1) * blocks / chunks * Block::MAX_ROWS, rows) - first;
        const int64_t panel = item % groups * group, num_panels = std::min(group, panels - panel);
        const int64_t column = panel * PANEL, columns = std::min(half, all_columns - column);
        if (!is_laid_out) lay_out<Block>(x, first, num_rows, a.in_features, here);
        for (int64_t up = 0; up <= gated; up++) {
            multiply_chunk(block, here, num_rows, a.in_features, up * panels + panel, num_panels,
                           up < gated ? block.at(panels + panel, 0) : after, sums + up * half,
                           width);
            if (a.bias)
                copy_numbers((const T*)a.bias + up * all_columns + column, bias + up * half,
                             columns);
        }
        for (int64_t row = 0; row < num_rows; row++) {
            const float* values = sums + row * width;
            int64_t place = (first + row) * a.out_row + column;
            if (a.out_dtype == F32)
                finish_row<T>(a, values, a.bias ? bias : nullptr, columns, half, a.epilogue,
                              (float*)a.out + place);
            else
                finish_row<T>(a, values, a.bias ? bias : nullptr, columns, half, a.epilogue,
                              (uint16_t*)a.out + place);
        }
    }
};

template <typename T, typename Block>
void linear_items(const Linear& a, int64_t rows, const Worker& worker) {
    const LinearItems<T, Block> items{a, {(const T*)a.x, a.x_row}, rows, worker.count};
    const int64_t count = items.count();
    if (count == 0) return;
    void* memory = worker.scratch(items.bytes());
    Block block(a);
    int64_t laid_out = -1;  // the chunk whose x is in memory
    for (int64_t item; (item = worker.next(count)) < count;) {
        const int64_t chunk = items.chunk_of(item);
        items.run(block, item, chunk == laid_out, items.start_of(worker.following(item, count)),
                  memory);
        laid_out = chunk;
    }
}

inline void linear(const Call& call, const Step& step, const Worker& worker) {
    FOR_OWN_DTYPE(call, step, worker,
                  (linear_items<T, typename BlockOf<T>::type>((const Linear&)call,
                                                              rows_of(call, step), worker)));
}

// A call of one expert, whose first place is `place`.
template <typename Layer>
Layer layer_of(const ExpertsLinear& a, int64_t expert, int64_t place) {
    Layer layer = a;
    const int64_t width = a.dtype == F32 ? 4 : 2, out_width = a.out_dtype == F32 ? 4 : 2;
    layer.weight = (const void*)a.weights[expert];
    layer.bias = a.biases ? (const void*)a.biases[expert] : nullptr;
    if (!a.tokens) layer.x = (const char*)a.x + place * a.x_row * width;
    layer.out = (char*)a.out + place * a.out_row * out_width;
    return layer;
}

// The experts that have rows, and the items of their products, numbered through all of them.
struct ExpertItems {
    int64_t num_experts = 0, count = 0;
    int16_t experts[MAX_EXPERTS];
    int64_t ends[MAX_EXPERTS];  // of the items of each

    void add(int64_t expert, int64_t num_items) {
        experts[num_experts] = (int16_t)expert;
        ends[num_experts++] = count += num_items;
    }
    int64_t find(int64_t item) const {
        return std::upper_bound(ends, ends + num_experts, item) - ends;
    }
    int64_t begin_of(int64_t i) const { return i ? ends[i - 1] : 0; }
};

template <typename T, typename Block>
void experts_linear_items(const ExpertsLinear& a, const Worker& worker) {
    using Items = LinearItems<T, Block>;
    const auto items_of = [&](int64_t expert) {
        const int64_t place = a.starts[expert], rows = a.starts[expert + 1] - place;
        const Linear layer = layer_of<Linear>(a, expert, place);
        return Items{layer,
                     {(const T*)layer.x, a.x_row, a.tokens ? a.tokens + place : nullptr},
                     rows,
                     worker.count};
    };
    ExpertItems all;
    size_t bytes = 0;
    for (int64_t expert = 0; expert < a.count; expert++) {
        if (a.starts[expert] == a.starts[expert + 1]) continue;
        const Items items = items_of(expert);
        all.add(expert, items.count());
        bytes = std::max(bytes, items.bytes());
    }
    if (all.count == 0) return;
    void* memory = worker.scratch(bytes);
    int64_t laid_out = -1, laid_out_chunk = -1;  // expert and chunk whose x is in memory
    for (int64_t item; (item = worker.next(all.count)) < all.count;) {
        const int64_t i = all.find(item), expert = all.experts[i];
        const Items items = items_of(expert);
        const int64_t mine = item - all.begin_of(i), chunk = items.chunk_of(mine);
        const int64_t next = worker.following(item, all.count), j = all.find(next);
        Block block(items.a);
        items.run(block, mine, laid_out == expert && laid_out_chunk == chunk,
                  items_of(all.experts[j]).start_of(next - all.begin_of(j)), memory);
        laid_out = expert, laid_out_chunk = chunk;
    }
}

template <typename T, typename Block>
void heads_linear_items(const HeadsLinear& a, int64_t rows, const Worker& worker) {
    using Items = LinearItems<T, Block>;
    const auto items_of = [&](int64_t head) {
        Linear layer = a;
        layer.weight = (const char*)a.weight + head * a.head_bytes;
        layer.out = (T*)a.out + head * a.out_head;
        return Items{layer, {(const T*)a.x + head * a.x_head, a.x_row}, rows, 1};
    };
    const int64_t each = items_of(0).count(), count = each * a.heads;
    if (count == 0) return;
    void* memory = worker.scratch(items_of(0).bytes());
    for (int64_t item; (item = worker.next(count)) < count;) {
        const int64_t next = worker.following(item, count);
        const Items items = items_of(item / each);
        Block block(items.a);
        items.run(block, item % each, false, items_of(next / each).start_of(next % each), memory);
    }
}

inline void heads_linear(const Call& call, const Step& step, const Worker& worker) {
    FOR_OWN_DTYPE(call, step, worker,
                  (heads_linear_items<T, typename BlockOf<T>::type>((const HeadsLinear&)call,
                                                                    rows_of(call, step), worker)));
}

// A tied table's row, read from the head's packed weight: one number or pair of each line of a
// panel.
inline void embedding_packed(const Call& call, const Step& step, const Worker& worker) {
    const Embedding& a = (const Embedding&)call;
    int64_t rows = rows_of(call, step), piece = piece_of_rows(a.size);
    int64_t width = call.dtype == BF16 ? 2 : 4, bytes = a.size * width,
            panel_bytes = round_up(bytes, 4) * PANEL;
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            int64_t id = id_of(a, step, row);
            char* out = (char*)a.out + row * a.out_row * width;
            if (id < 0 || id >= a.num_ids) {
                set_absent(a, out, bytes);
                continue;
            }
            const char* from = (const char*)a.table + id / PANEL * panel_bytes + id % PANEL * 4;
            int64_t i = 0;
            for (; i + 4 <= bytes; i += 4) std::memcpy(out + i, from + i * PANEL, 4);
            if (i < bytes) std::memcpy(out + i, from + i * PANEL, 2);
        }
}
