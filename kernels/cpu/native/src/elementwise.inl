// Operations without sums: activations, scaling, adding, the embedding's look-up, the transition
// from one step's tokens to the next step.

template <typename T, typename Activation>
void gate_rows(const SiluAndMul& a, int64_t rows, const Worker& worker, Activation activation) {
    int64_t piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            const T* gate = (const T*)a.x + row * a.x_row;
            const T* up = gate + a.size;
            T* out = (T*)a.out + row * a.out_row;
            int64_t i = 0;
            for (; i + Vec::LANES <= a.size; i += Vec::LANES) {
                Vec x = Vec::load(gate + i);
                (Number<T>::round(activation(x)) * Vec::load(up + i)).store(out + i);
            }
            // the same function on one lane, so that an element does not depend on its place
            for (; i < a.size; i++) {
                float lanes[Vec::LANES] = {Number<T>::get(gate[i])};
                activation(Vec::load(lanes)).store(lanes);
                put(out + i, Number<T>::round(lanes[0]) * Number<T>::get(up[i]));
            }
        }
}

inline void silu_and_mul(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, gate_rows<T>((const SiluAndMul&)call, rows_of(call, step), worker,
                                       [](Vec x) { return silu(x); }));
}

inline void gelu_tanh_and_mul(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, gate_rows<T>((const SiluAndMul&)call, rows_of(call, step), worker,
                                       [](Vec x) { return gelu_tanh(x); }));
}

inline void gelu_and_mul(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, gate_rows<T>((const SiluAndMul&)call, rows_of(call, step), worker,
                                       [](Vec x) { return gelu(x); }));
}

template <typename T, typename Of, typename Activation>
void activate_rows(const Of& a, int64_t rows, const Worker& worker, Activation activation) {
    int64_t piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            const T* x = (const T*)a.x + row * a.x_row;
            T* out = (T*)a.out + row * a.out_row;
            int64_t i = 0;
            for (; i + Vec::LANES <= a.size; i += Vec::LANES)
                activation(Vec::load(x + i)).store(out + i);
            for (; i < a.size; i++) {  // as in gate_rows
                float lanes[Vec::LANES] = {Number<T>::get(x[i])};
                activation(Vec::load(lanes)).store(lanes);
                put(out + i, lanes[0]);
            }
        }
}

inline void gelu(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, activate_rows<T>((const Activate&)call, rows_of(call, step), worker,
                                           [](Vec x) { return gelu(x); }));
}

inline void gelu_tanh(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, activate_rows<T>((const Activate&)call, rows_of(call, step), worker,
                                           [](Vec x) { return gelu_tanh(x); }));
}

inline void silu(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, activate_rows<T>((const Activate&)call, rows_of(call, step), worker,
                                           [](Vec x) { return silu(x); }));
}

inline void relu(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, activate_rows<T>((const Activate&)call, rows_of(call, step), worker,
                                           [](Vec x) { return relu(x); }));
}

inline void relu_squared(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, activate_rows<T>((const Activate&)call, rows_of(call, step), worker,
                                           [](Vec x) { return relu_squared(x); }));
}

template <typename T>
void clamp_rows(const Clamp& a, int64_t rows, const Worker& worker) {
    const Vec low(Number<T>::round(a.bounds[0])), high(Number<T>::round(a.bounds[1]));
    // operand order: the second one if one is NaN
    activate_rows<T>(a, rows, worker, [=](Vec x) { return Vec::min(high, Vec::max(low, x)); });
}

inline void clamp(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, clamp_rows<T>((const Clamp&)call, rows_of(call, step), worker));
}

inline void soft_cap(const Call& call, const Step& step, const Worker& worker) {
    const SoftCap& a = (const SoftCap&)call;
    const Vec cap((float)a.cap);
    // a piece is a part of a row, since there are few rows of many logits
    constexpr int64_t PIECE = 4096;
    const int64_t parts = ceil_div(a.size, PIECE), count = rows_of(call, step) * parts;
    for (int64_t item; (item = worker.next(count)) < count;) {
        float* x = a.x + item / parts * a.x_row;
        const int64_t begin = item % parts * PIECE, end = std::min(begin + PIECE, a.size);
        for (int64_t i = begin; i < end; i += Vec::LANES)
            store_some(cap * tanh(load_some(x + i, end - i) / cap), x + i, end - i);
    }
}

template <typename T>
void scale_rows(const Scale& a, int64_t rows, const Worker& worker) {
    int64_t piece = piece_of_rows(a.size);
    const float factor = (float)a.factor;
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            T* x = (T*)a.x + row * a.x_row;
            int64_t i = 0;
            for (; i + Vec::LANES <= a.size; i += Vec::LANES)
                (Vec::load(x + i) * Vec(factor)).store(x + i);
            for (; i < a.size; i++) put(x + i, Number<T>::get(x[i]) * factor);
        }
}

inline void scale(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, scale_rows<T>((const Scale&)call, rows_of(call, step), worker));
}

template <typename T>
void add_rows(const Add& a, int64_t rows, const Worker& worker) {
    int64_t piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++)
            add_row((const T*)a.x + row * a.x_row, (T*)a.residual + row * a.residual_row, a.size);
}

inline void add(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, add_rows<T>((const Add&)call, rows_of(call, step), worker));
}

inline int64_t id_of(const Embedding& a, const Step& step, int64_t row) {
    const int64_t id = a.ids == TOKEN_IDS   ? step.token_ids[row]
                       : a.ids == POSITIONS ? step.positions[row]
                                            : step.token_types[row];
    return id - a.first_id;
}

// The row of an id that the table does not have. A NaN in both types has all bits set.
inline void set_absent(const Embedding& a, void* row, size_t bytes) {
    std::memset(row, a.absent == ABSENT_ZEROS ? 0 : 0xff, bytes);
}

inline void embedding(const Call& call, const Step& step, const Worker& worker) {
    const Embedding& a = (const Embedding&)call;
    int64_t rows = rows_of(call, step), piece = piece_of_rows(a.size);
    size_t width = call.dtype == BF16 ? 2 : 4;
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            int64_t id = id_of(a, step, row);
            char* out = (char*)a.out + row * a.out_row * width;
            bool is_absent = id < 0 || id >= a.num_ids;
            if (is_absent && a.absent == ABSENT_FIRST) is_absent = false, id = 0;
            if (is_absent) {
                set_absent(a, out, a.size * width);
            } else {
                std::memcpy(out, (const char*)a.table + id * a.size * width, a.size * width);
            }
        }
}

// Calls act(x, row of the table) for the tokens whose places images take.
template <typename T, typename Act>
void for_image_rows(const TableRows& a, const Step& step, const Worker& worker, Act act) {
    int64_t rows = rows_of(a, step), piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++)
            if (step.image_rows[row] >= 0)
                act((T*)a.x + row * a.x_row,
                    (const T*)a.table + step.image_rows[row] * a.table_row);
}

inline void replace_rows(const Call& call, const Step& step, const Worker& worker) {
    const TableRows& a = (const TableRows&)call;
    FOR_DTYPE(call.dtype, for_image_rows<T>(a, step, worker, [&](T* x, const T* from) {
                  std::memcpy(x, from, a.size * sizeof(T));
              }));
}

inline void add_table_rows(const Call& call, const Step& step, const Worker& worker) {
    const TableRows& a = (const TableRows&)call;
    FOR_DTYPE(call.dtype, for_image_rows<T>(a, step, worker, [&](T* x, const T* from) {
                  add_row(from, x, a.size);
              }));
}

inline void gather_rows(const Call& call, const Step& step, const Worker& worker) {
    const GatherRows& a = (const GatherRows&)call;
    int64_t rows = rows_of(call, step), piece = piece_of_rows(a.size);
    size_t width = call.dtype == BF16 ? 2 : 4;
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++)
            std::memcpy((char*)a.out + row * a.out_row * width,
                        (const char*)a.x + step.logits_indices[row] * a.x_row * width,
                        a.size * width);
}

inline void external(const Call& call, const Step& step, const Worker& worker) {
    const External& a = (const External&)call;
    const auto* arguments = (const quire_arguments*)&a.data0;
    static_assert(sizeof(quire_arguments) ==
                  offsetof(External, function) - offsetof(External, data0));
    const auto function = (quire_function)a.function;
    const int64_t rows = rows_of(call, step),
                  piece = piece_of_rows(*std::max_element(a.size, a.size + QUIRE_MAX_TENSORS));
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        function(arguments, start, std::min(piece, rows - start));
}

inline void next_tokens(const Call& call, const Step& step, const Worker& worker) {
    const NextTokens& a = (const NextTokens&)call;
    if (worker.next(1) != 0) return;
    int64_t rows = rows_of(call, step);
    std::copy_n(a.token_ids, rows, a.kept);
    std::copy_n(a.is_finite, rows, a.kept_finite);
    if (a.is_last) return;
    for (int64_t row = 0; row < rows; row++) {
        int64_t position = ++step.positions[row];
        step.token_ids[row] = (int32_t)a.token_ids[row];
        step.seq_lens[row]++;
        const int32_t* blocks = step.block_tables + row * step.block_table_row;
        for (int64_t group = 0; group < step.num_groups; group++)
            step.slot_mapping[group * step.slot_mapping_group + row] =
                blocks[group * step.block_table_group + position / a.block_size] * a.block_size +
                position % a.block_size;
        if (a.draw_positions) a.draw_positions[row]++;
    }
}
