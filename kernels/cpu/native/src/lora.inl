// LoRA adapters (abi.h: AddLora). Rows with the same adapter are computed together, so that its
// numbers are read from memory once:
//
//   low = scale * A x    item: some rows of one adapter x some ranks of one slice
//   barrier
//   y += B low           item: some rows of one adapter x some columns of one slice
//
// Every sum is in fp32 and takes its numbers in an order that depends on the sizes alone, so a
// row's bits depend neither on other rows nor on threads.

// Rows of x and of A that are multiplied at once.
constexpr int LORA_ROWS = 4, LORA_RANKS = REGISTERS == 32 ? 4 : 2;
// Columns of y that lie together in B, and those whose sums are in registers: pairs of vectors.
constexpr int LORA_BLOCK = 64;
constexpr int LORA_PAIRS = 2, LORA_COLUMNS = 2 * LORA_PAIRS * Vec::LANES;
static_assert(LORA_BLOCK % LORA_COLUMNS == 0);
constexpr int LORA_ROWS_BESIDE = REGISTERS == 32 ? 4 : 2;
constexpr int64_t LORA_ROWS_OF_ITEM = 16, LORA_BLOCKS_OF_ITEM = 8, LORA_RANKS_OF_ITEM = 8;

// Sums of products of two rows of numbers, lane by lane.
template <typename T>
struct LoraDot {
    // ranks of one row at once: sums that need not wait for each other
    static constexpr int STEP = Vec::LANES, RANKS_OF_ONE_ROW = 8;
    using Numbers = Vec;
    static Numbers load(const T* p) { return Vec::load(p); }
    static Vec add(Vec sum, Numbers a, Numbers x) { return Vec::fma(a, x, sum); }
};
#ifdef QUIRE_BF16
template <>
struct LoraDot<uint16_t> {
    // one rank is so short that the next ones begin before it ends, and A is one stream, which the
    // processor prefetches
    static constexpr int STEP = 2 * Vec::LANES, RANKS_OF_ONE_ROW = 1;
    using Numbers = DotBf16::Pairs;
    static Numbers load(const uint16_t* p) { return DotBf16::weights(p, 0); }
    static Vec add(Vec sum, Numbers a, Numbers x) { return DotBf16::add(sum, a, x); }
};
#endif

// to[row][rank] = scale * (a[rank] . x[row]); rows of `a` are `size` apart.
template <typename T, int ROWS, int RANKS>
inline void lora_dots(const T* const* x, const T* a, int64_t size, float scale, float* const* to) {
    using Dot = LoraDot<T>;
    Vec sums[ROWS][RANKS];
    auto add = [&](const T* const* of_x, const T* of_a, int64_t k, int64_t a_row) ALWAYS_INLINE {
        typename Dot::Numbers numbers[ROWS];
        for (int row = 0; row < ROWS; row++) numbers[row] = Dot::load(of_x[row] + k);
        for (int rank = 0; rank < RANKS; rank++) {
            const typename Dot::Numbers weights = Dot::load(of_a + rank * a_row + k);
            for (int row = 0; row < ROWS; row++)
                sums[row][rank] = Dot::add(sums[row][rank], weights, numbers[row]);
        }
    };
    int64_t k = 0;
    for (; k + Dot::STEP <= size; k += Dot::STEP) {
        // of the next ranks; behind the last one lie those of the next slice or adapter
        for (int rank = 0; RANKS > 1 && rank < RANKS; rank++)
            __builtin_prefetch(a + (RANKS + rank) * size + k, 0, 2);
        add(x, a, k, size);
    }
    if (k < size) {  // the rest, and zeros
        T last_x[ROWS][Dot::STEP] = {}, last_a[RANKS][Dot::STEP] = {};
        const T* rows[ROWS];
        for (int row = 0; row < ROWS; row++) {
            std::copy(x[row] + k, x[row] + size, last_x[row]);
            rows[row] = last_x[row];
        }
        for (int rank = 0; rank < RANKS; rank++)
            std::copy(a + rank * size + k, a + (rank + 1) * size, last_a[rank]);
        add(rows, last_a[0], 0, Dot::STEP);
    }
    for (int row = 0; row < ROWS; row++)
        for (int rank = 0; rank < RANKS; rank++) to[row][rank] = scale * sums[row][rank].sum();
}

template <typename T, int ROWS, int RANKS>
void lora_ranks(const T* const* x, const T* a, int64_t ranks, int64_t size, float scale,
                float* const* low) {
    float* to[ROWS];
    int64_t rank = 0;
    for (; rank + RANKS <= ranks; rank += RANKS) {
        for (int row = 0; row < ROWS; row++) to[row] = low[row] + rank;
        lora_dots<T, ROWS, RANKS>(x, a + rank * size, size, scale, to);
    }
    for (; rank < ranks; rank++) {
        for (int row = 0; row < ROWS; row++) to[row] = low[row] + rank;
        lora_dots<T, ROWS, 1>(x, a + rank * size, size, scale, to);
    }
}

// y[row] += low[row] B for LORA_COLUMNS columns of a block.
template <typename T, typename Y, int ROWS>
inline void lora_columns(const float* const* low, const T* b, int64_t rank, Y* const* y) {
    // bf16 numbers are used in pairs, which needs no instruction to move them
    constexpr bool IN_PAIRS = std::is_same<T, uint16_t>::value && std::is_same<Y, uint16_t>::value;
    constexpr int WIDTH = 2 * Vec::LANES;
    Vec sums[ROWS][2 * LORA_PAIRS];
    for (int64_t k = 0; k < rank; k++, b += LORA_BLOCK) {
        Vec weights[2 * LORA_PAIRS];
        for (int i = 0; i < LORA_PAIRS; i++) {
            const T* p = b + i * WIDTH;
            if constexpr (IN_PAIRS) {
                weights[2 * i] = Vec::first_of_pairs(p);
                weights[2 * i + 1] = Vec::second_of_pairs(p);
            } else {
                weights[2 * i] = Vec::load(p);
                weights[2 * i + 1] = Vec::load(p + Vec::LANES);
            }
        }
        for (int row = 0; row < ROWS; row++) {
            const Vec factor(low[row][k]);
            for (int i = 0; i < 2 * LORA_PAIRS; i++)
                sums[row][i] = Vec::fma(factor, weights[i], sums[row][i]);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < LORA_PAIRS; i++) {
            Y* p = y[row] + i * WIDTH;
            const Vec first = sums[row][2 * i], second = sums[row][2 * i + 1];
            if constexpr (IN_PAIRS) {
                Vec::store_pairs(Vec::first_of_pairs(p) + first, Vec::second_of_pairs(p) + second,
                                 p);
            } else {
                (Vec::load(p) + first).store(p);
                (Vec::load(p + Vec::LANES) + second).store(p + Vec::LANES);
            }
        }
}

// The same for any number of columns, the first of which begins a block; blocks of b are b_block
// apart.
template <typename T, typename Y, int ROWS>
void lora_slice(const float* const* low, const T* b, int64_t b_block, int64_t rank, int64_t columns,
                Y* const* y) {
    Y* to[ROWS];
    int64_t column = 0;
    for (; column + LORA_COLUMNS <= columns; column += LORA_COLUMNS) {
        for (int row = 0; row < ROWS; row++) to[row] = y[row] + column;
        lora_columns<T, Y, ROWS>(low, b + column / LORA_BLOCK * b_block + column % LORA_BLOCK, rank,
                                 to);
    }
    for (; column < columns; column++) {
        const T* weights = b + column / LORA_BLOCK * b_block + column % LORA_BLOCK;
        for (int row = 0; row < ROWS; row++) {
            float sum = 0;
            for (int64_t k = 0; k < rank; k++)
                sum = __builtin_fmaf(low[row][k], Number<T>::get(weights[k * LORA_BLOCK]), sum);
            put(y[row] + column, Number<Y>::get(y[row][column]) + sum);
        }
    }
}

// The rows that have an adapter, ordered by place; ascending within one.
struct LoraRows {
    int32_t* rows;    // [all rows]
    int32_t* starts;  // [places + 1]
    int64_t num_places;

    static size_t bytes(const AddLora& a, int64_t rows) {
        return (rows + a.num_places + 1) * sizeof(int32_t);
    }
    LoraRows(const AddLora& a, const Step& step, int64_t num_rows, void* memory)
        : rows((int32_t*)memory), starts(rows + num_rows), num_places(a.num_places) {
        const auto place_of = [&](int64_t row) {
            return step.adapters[a.by_logits ? step.logits_indices[row] : row];
        };
        std::fill_n(starts, num_places + 1, 0);
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t place = place_of(row);
            if (place >= 0 && place < num_places) starts[place + 1]++;
        }
        for (int64_t place = 0; place < num_places; place++) starts[place + 1] += starts[place];
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t place = place_of(row);
            if (place >= 0 && place < num_places) rows[starts[place]++] = (int32_t)row;
        }
        for (int64_t place = num_places; place > 0; place--) starts[place] = starts[place - 1];
        starts[0] = 0;
    }
    int64_t count() const { return starts[num_places]; }
    int64_t groups() const {  // of rows that an item computes together
        int64_t groups = 0;
        for (int64_t place = 0; place < num_places; place++) groups += groups_of(place);
        return groups;
    }
    int64_t groups_of(int64_t place) const {
        return ceil_div(starts[place + 1] - starts[place], LORA_ROWS_OF_ITEM);
    }
    // Place, and the first row and the end of a group.
    int64_t find(int64_t group, int64_t& first, int64_t& end) const {
        int64_t place = 0;
        for (; group >= groups_of(place); place++) group -= groups_of(place);
        first = starts[place] + group * LORA_ROWS_OF_ITEM;
        end = std::min<int64_t>(first + LORA_ROWS_OF_ITEM, starts[place + 1]);
        return place;
    }
};

// Calls function<ROWS>(first) for all rows, MAX at a time, then one at a time.
template <int MAX, typename Function>
void lora_by_rows(int64_t first, int64_t end, Function function) {
    for (; first + MAX <= end; first += MAX) function(first, std::integral_constant<int, MAX>());
    for (; first < end; first++) function(first, std::integral_constant<int, 1>());
}

template <typename T>
void lora_low(const AddLora& a, const LoraRows& all, const Worker& worker) {
    const int64_t groups = all.groups(), width = a.num_slices * a.max_rank;
    // whole slices, unless these are too few for the threads
    const int64_t parts =
        groups * a.num_slices >= 3 * worker.count ? 1 : ceil_div(a.max_rank, LORA_RANKS_OF_ITEM);
    const int64_t part = ceil_div(a.max_rank, parts), count = groups * a.num_slices * parts;
    for (int64_t item; (item = worker.next(count)) < count;) {
        int64_t first, end;
        const int64_t place = all.find(item / (a.num_slices * parts), first, end),
                      slice = item / parts % a.num_slices, rank = item % parts * part;
        const int64_t pair = place * a.num_slices + slice,
                      ranks = std::min<int64_t>(part, a.ranks[pair] - rank);
        if (ranks <= 0) continue;
        const T* of_a = (const T*)a.a + (pair * a.max_rank + rank) * a.in_features;
        lora_by_rows<LORA_ROWS>(first, end, [&](int64_t row, auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            const T* x[ROWS];
            float* low[ROWS];
            for (int i = 0; i < ROWS; i++) {
                x[i] = (const T*)a.x + all.rows[row + i] * a.x_row;
                low[i] = a.low + all.rows[row + i] * width + slice * a.max_rank + rank;
            }
            lora_ranks<T, ROWS, ROWS == 1 ? LoraDot<T>::RANKS_OF_ONE_ROW : LORA_RANKS>(
                x, of_a, ranks, a.in_features, a.scales[pair], low);
        });
    }
}

template <typename T>
void lora_low_of_tokens(const AddLora& a, const Step& step, const LoraRows& all,
                        const Worker& worker) {
    const int64_t groups = all.groups();
    for (int64_t group; (group = worker.next(groups)) < groups;) {
        int64_t first, end;
        const int64_t place = all.find(group, first, end);
        for (; first < end; first++) {
            const int64_t row = all.rows[first], id = step.token_ids[row];
            const bool is_token = id >= 0 && id < a.in_features;  // else its row is NaN already
            const T* of_a = (const T*)a.a + (place * a.in_features + is_token * id) * a.max_rank;
            for (int64_t k = 0; k < a.ranks[place]; k++)
                a.low[row * a.max_rank + k] =
                    is_token ? a.scales[place] * Number<T>::get(of_a[k]) : 0;
        }
    }
}

template <typename T, typename Y>
void lora_add(const AddLora& a, const LoraRows& all, const Worker& worker) {
    const int64_t groups = all.groups(), width = a.num_slices * a.max_rank;
    // of each slice: its first item in a group, and its first block
    int64_t starts[MAX_LORA_SLICES + 1] = {}, first_blocks[MAX_LORA_SLICES + 1] = {};
    for (int64_t s = 0; s < a.num_slices; s++) {
        const int64_t blocks = ceil_div(a.begin[s + 1] - a.begin[s], LORA_BLOCK);
        first_blocks[s + 1] = first_blocks[s] + blocks;
        starts[s + 1] = starts[s] + ceil_div(blocks, LORA_BLOCKS_OF_ITEM);
    }
    const int64_t items = starts[a.num_slices], count = groups * items;
    const int64_t block_size = a.max_rank * LORA_BLOCK;
    for (int64_t item; (item = worker.next(count)) < count;) {
        int64_t first, end, slice = 0;
        const int64_t place = all.find(item / items, first, end), index = item % items;
        while (index >= starts[slice + 1]) slice++;
        const int64_t rank = a.ranks[place * a.num_slices + slice];
        if (rank <= 0) continue;
        const int64_t block = (index - starts[slice]) * LORA_BLOCKS_OF_ITEM,
                      column = a.begin[slice] + block * LORA_BLOCK,
                      columns =
                          std::min(LORA_BLOCKS_OF_ITEM * LORA_BLOCK, a.begin[slice + 1] - column);
        const int64_t of_place = place * first_blocks[a.num_slices] + first_blocks[slice] + block;
        const T* b = (const T*)a.b + of_place * block_size;
        lora_by_rows<LORA_ROWS_BESIDE>(first, end, [&](int64_t row, auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            const float* low[ROWS];
            Y* y[ROWS];
            for (int i = 0; i < ROWS; i++) {
                low[i] = a.low + all.rows[row + i] * width + slice * a.max_rank;
                y[i] = (Y*)a.y + all.rows[row + i] * a.y_row + column;
            }
            lora_slice<T, Y, ROWS>(low, b, block_size, rank, columns, y);
        });
    }
}

template <typename T>
void lora_rows(const AddLora& a, const Step& step, const Worker& worker) {
    const int64_t rows = rows_of(a, step);
    const LoraRows all(a, step, rows, worker.scratch(LoraRows::bytes(a, rows)));
    if (all.count() == 0) return;
    if (a.op == OP_ADD_LORA) lora_low<T>(a, all, worker);
    else lora_low_of_tokens<T>(a, step, all, worker);
    worker.barrier();
    if (a.y_dtype == F32) lora_add<T, float>(a, all, worker);
    else lora_add<T, uint16_t>(a, all, worker);
}

inline void add_lora(const Call& call, const Step& step, const Worker& worker) {
    FOR_OWN_DTYPE(call, step, worker, lora_rows<T>((const AddLora&)call, step, worker));
}

inline void add_lora_embedding(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, lora_rows<T>((const AddLora&)call, step, worker));
}
