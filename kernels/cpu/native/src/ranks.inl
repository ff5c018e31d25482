// Sums and joins of what ranks have computed (abi_ranks.h). One thread waits for the other ranks;
// all threads write this rank's part and read those of all.

// A rank's part of its exchange `number`. Only for a thread that has a piece: `sequence` changes
// between two phases.
inline float* part_of(const Exchange& a, int64_t number, int64_t rank) {
    return (float*)((char*)a.memory + header_bytes(a.num_ranks)) +
           ((number & 1) * a.num_ranks + rank) * a.part_floats;
}

// Calls f(row, begin, end) for all rows and columns, in pieces of about 4096 numbers.
template <typename F>
void for_pieces(int64_t rows, int64_t size, const Worker& worker, F f) {
    constexpr int64_t WIDTH = 4096;
    const int64_t height = piece_of_rows(size), across = ceil_div(size, WIDTH),
                  pieces = ceil_div(rows, height) * across;
    for (int64_t i; (i = worker.next(pieces)) < pieces;) {
        const int64_t first = i / across * height, begin = i % across * WIDTH;
        for (int64_t row = first; row < std::min(first + height, rows); row++)
            f(row, begin, std::min(begin + WIDTH, size));
    }
}

// Calls give(row, count), a phase, then the exchange, then join(row, count) for the rows from `row`
// on of each exchange.
template <typename Give, typename Join>
void exchange_rows(const Exchange& a, int64_t rows, int64_t row_floats, const Worker& worker,
                   Give give, Join join) {
    const int64_t most = a.part_floats / row_floats;
    for (int64_t row = 0; row < rows; row += most) {
        const int64_t count = std::min(most, rows - row);
        if (row) worker.barrier();
        give(row, count);
        worker.barrier();
        if (worker.next(1) == 0)
            if (int32_t problem = meet(a)) worker.fail(problem);
        worker.barrier();
        join(row, count);
    }
}

// out[begin to end) = x, in another dtype or the same.
template <typename From, typename To>
void copy_numbers(const From* x, To* out, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + Vec::LANES <= end; i += Vec::LANES) Vec::load(x + i).store(out + i);
    for (; i < end; i++) put(out + i, Number<From>::get(x[i]));
}

template <typename T>
void give_rows(const AllReduce& a, int64_t first, int64_t rows, const Worker& worker) {
    for_pieces(rows, a.size, worker, [&](int64_t row, int64_t begin, int64_t end) {
        const T* x = (const T*)a.x + (first + row) * a.x_row;
        float* part = part_of(a, *a.sequence + 1, a.rank) + row * a.size;
        copy_numbers(x, part, begin, end);
    });
}

template <typename T>
void add_parts(const AllReduce& a, int64_t first, int64_t rows, const Worker& worker) {
    for_pieces(rows, a.size, worker, [&](int64_t row, int64_t begin, int64_t end) {
        const float* parts = part_of(a, *a.sequence, 0) + row * a.size;
        T* out = (T*)a.out + (first + row) * a.out_row;
        int64_t i = begin;
        for (; i + Vec::LANES <= end; i += Vec::LANES) {
            Vec total = Vec::load(parts + i);
            for (int64_t rank = 1; rank < a.num_ranks; rank++)
                total = total + Vec::load(parts + rank * a.part_floats + i);
            total.store(out + i);
        }
        for (; i < end; i++) {
            float total = parts[i];
            for (int64_t rank = 1; rank < a.num_ranks; rank++)
                total += parts[rank * a.part_floats + i];
            put(out + i, total);
        }
    });
}

void all_reduce(const Call& call, const Step& step, const Worker& worker) {
    const AllReduce& a = (const AllReduce&)call;
    exchange_rows(
        a, rows_of(call, step), a.size, worker,
        [&](int64_t row, int64_t count) {
            FOR_DTYPE(a.x_dtype, give_rows<T>(a, row, count, worker));
        },
        [&](int64_t row, int64_t count) {
            FOR_DTYPE(a.dtype, add_parts<T>(a, row, count, worker));
        });
}

template <typename T>
void gather_rows(const AllGather& a, int64_t num_rows, const Worker& worker) {
    int64_t widest = 0;
    for (int64_t rank = 0; rank < a.num_ranks; rank++)
        widest = std::max(widest, a.starts[rank + 1] - a.starts[rank]);
    const auto give = [&](int64_t first, int64_t rows) {
        const int64_t width = a.starts[a.rank + 1] - a.starts[a.rank];
        for_pieces(rows, width, worker, [&](int64_t row, int64_t begin, int64_t end) {
            float* part = part_of(a, *a.sequence + 1, a.rank) + row * widest;
            copy_numbers((const T*)a.x + (first + row) * a.x_row, part, begin, end);
        });
    };
    const auto join = [&](int64_t first, int64_t rows) {
        for_pieces(rows, a.size, worker, [&](int64_t row, int64_t begin, int64_t end) {
            T* out = (T*)a.out + (first + row) * a.out_row;
            for (int64_t rank = 0; rank < a.num_ranks; rank++) {
                const int64_t start = a.starts[rank], from = std::max(begin, start),
                              to = std::min(end, a.starts[rank + 1]);
                const float* part = part_of(a, *a.sequence, rank) + row * widest - start;
                if (from < to) copy_numbers(part, out, from, to);
            }
        });
    };
    exchange_rows(a, num_rows, widest, worker, give, join);
}

void all_gather(const Call& call, const Step& step, const Worker& worker) {
    const AllGather& a = (const AllGather&)call;
    FOR_DTYPE(a.dtype, gather_rows<T>(a, rows_of(call, step), worker));
}
