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

// x in the block's layout: [piece of k][row][STRIDE], zeros after the last k.
template <typename Block, typename T>
void lay_out(const T* x, int64_t x_row, int64_t rows, int64_t in_features, typename Block::X* to) {
    for (int64_t begin = 0; begin < in_features; begin += Block::DEPTH)
        for (int64_t row = 0; row < rows; row++, to += Block::STRIDE) {
            int64_t size = std::min(Block::DEPTH, in_features - begin);
            copy_numbers(x + row * x_row + begin, to, size);
            for (int64_t i = size; i < round_up(size, 32); i++) to[i] = 0;
        }
}

// The order of pieces and panels is free, since each sum takes its pieces in ascending order either
// way. If x fits the L2 cache, a panel's pieces follow each other and its weights are one stream;
// otherwise the whole group of panels uses a piece of x before the next piece.
constexpr int64_t SMALL_X = 1 << 17;

template <typename Block>
void multiply_chunk(Block& block, const typename Block::X* x, int64_t rows, int64_t in_features,
                    int64_t panel, int64_t panels, int64_t next_panel, float* sums,
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
                               : block.at(next_panel, 0);
        for (int64_t j = 0; j < blocks; j++) {
            const int64_t row = j * rows / blocks, end = (j + 1) * rows / blocks;
            block.multiply(end - row, std::min(at_once, panels - first),
                           x + (piece * rows + row) * Block::STRIDE, panel + first, begin, size,
                           sums + row * sums_row + first * PANEL, sums_row, next, j, blocks);
        }
    }
}

// Computes one row's columns from their sums; those of the up half are `half` further on. bias
// (same layout as sums) may be null. Sums and bias extend to a multiple of PANEL.
template <typename T, typename Out>
inline ALWAYS_INLINE void finish_row(const float* sums, const float* bias, int64_t columns,
                                     int64_t half, int32_t epilogue, Out* out) {
    const bool gated = epilogue != PLAIN;
    for (int64_t i = 0; i < columns; i += Vec::LANES) {
        Vec value = Vec::load(sums + i), up = gated ? Vec::load(sums + half + i) : Vec();
        if (bias) value = value + Vec::load(bias + i);
        if (bias && gated) up = up + Vec::load(bias + half + i);
        if (gated) {
            value = Number<T>::round(value);
            value = Number<T>::round(epilogue == GATED_GELU ? gelu_tanh(value) : silu(value)) *
                    Number<T>::round(up);
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

template <typename T, typename Block>
void linear_items(const Linear& a, int64_t rows, const Worker& worker) {
    const bool gated = a.epilogue != PLAIN;
    const int64_t all_columns = gated ? a.out_features / 2 : a.out_features,
                  panels = (all_columns + PANEL - 1) / PANEL;
    const int64_t chunks = (rows + Block::CHUNK_ROWS - 1) / Block::CHUNK_ROWS;
    if (chunks == 0) return;
    const int64_t group = Block::group(rows, panels, worker.count),
                  groups = (panels + group - 1) / group;
    // chunks consist of complete blocks
    const int64_t blocks = (rows + Block::MAX_ROWS - 1) / Block::MAX_ROWS;
    const int64_t most_rows = std::min(rows, (blocks + chunks - 1) / chunks * Block::MAX_ROWS),
                  half = group * PANEL, width = gated ? 2 * half : half;
    const int64_t x_size =
        (a.in_features + Block::DEPTH - 1) / Block::DEPTH * most_rows * Block::STRIDE;
    float* sums = (float*)worker.scratch((most_rows + 1) * width * sizeof(float) +
                                         x_size * sizeof(typename Block::X));
    float* bias = sums + most_rows * width;
    auto* x = (typename Block::X*)(bias + width);
    Block block(a);

    int64_t laid_out = -1;  // the chunk that x holds
    for (int64_t item; (item = worker.next(chunks * groups)) < chunks * groups;) {
        const int64_t chunk = item / groups, first = chunk * blocks / chunks * Block::MAX_ROWS;
        const int64_t num_rows =
            std::min((chunk + 1) * blocks / chunks * Block::MAX_ROWS, rows) - first;
        const int64_t panel = item % groups * group, num_panels = std::min(group, panels - panel);
        const int64_t column = panel * PANEL, columns = std::min(half, all_columns - column);
        // probably that of the next item
        const int64_t next_panel = worker.following(item, chunks * groups) % groups * group;
        if (chunk != laid_out)
            lay_out<Block>((const T*)a.x + first * a.x_row, a.x_row, num_rows, a.in_features, x);
        laid_out = chunk;
        for (int64_t up = 0; up <= gated; up++) {
            const int64_t then = up < gated ? panels + panel : next_panel;
            multiply_chunk(block, x, num_rows, a.in_features, up * panels + panel, num_panels, then,
                           sums + up * half, width);
            if (a.bias)
                copy_numbers((const T*)a.bias + up * all_columns + column, bias + up * half,
                             columns);
        }
        for (int64_t row = 0; row < num_rows; row++) {
            const float* values = sums + row * width;
            int64_t place = (first + row) * a.out_row + column;
            if (a.out_dtype == F32)
                finish_row<T>(values, a.bias ? bias : nullptr, columns, half, a.epilogue,
                              (float*)a.out + place);
            else
                finish_row<T>(values, a.bias ? bias : nullptr, columns, half, a.epilogue,
                              (uint16_t*)a.out + place);
        }
    }
}

void linear(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, (linear_items<T, typename BlockOf<T>::type>(
                              (const Linear&)call, rows_of(call, step), worker)));
}

// A tied table's row, read from the head's packed weight: one number or pair of each line of a
// panel.
void embedding_packed(const Call& call, const Step& step, const Worker& worker) {
    const Embedding& a = (const Embedding&)call;
    int64_t rows = rows_of(call, step), piece = piece_of_rows(a.size);
    int64_t width = call.dtype == BF16 ? 2 : 4, bytes = a.size * width,
            panel_bytes = round_up(bytes, 4) * PANEL;
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            int64_t id = step.token_ids[row];
            char* out = (char*)a.out + row * a.out_row * width;
            if (id < 0 || id >= a.num_ids) {
                set_nan(out, bytes);
                continue;
            }
            const char* from = (const char*)a.table + id / PANEL * panel_bytes + id % PANEL * 4;
            int64_t i = 0;
            for (; i + 4 <= bytes; i += 4) std::memcpy(out + i, from + i * PANEL, 4);
            if (i < bytes) std::memcpy(out + i, from + i * PANEL, 2);
        }
}
