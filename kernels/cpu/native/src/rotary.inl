// Rotary position embedding and the writes of keys and values to the cache, in one pass over a
// token's heads.

// cosines and sines of one position, rounded to T
template <typename T>
void round_turn(const float* cos_sin, int64_t rotary_dim, float* turn) {
    for (int64_t i = 0; i < rotary_dim; i++) turn[i] = Number<T>::round(cos_sin[i]);
}

template <typename T>
void rotate_heads(T* row, int64_t heads, int64_t head, int64_t half, const float* turn) {
    for (int64_t h = 0; h < heads; h++) {
        T* first = row + h * head;
        T* second = first + half;
        const float *cosine = turn, *sine = turn + half;
        int64_t i = 0;
        for (; i + Vec::LANES <= half; i += Vec::LANES) {
            Vec a = Vec::load(first + i), b = Vec::load(second + i), c = Vec::load(cosine + i),
                s = Vec::load(sine + i);
            (a * c - b * s).store(first + i);
            (b * c + a * s).store(second + i);
        }
        for (; i < half; i++) {
            float a = Number<T>::get(first[i]), b = Number<T>::get(second[i]);
            put(first + i, a * cosine[i] - b * sine[i]);
            put(second + i, b * cosine[i] + a * sine[i]);
        }
    }
}

// The same for pairs of neighbours.
template <typename T>
void rotate_pairs(T* row, int64_t heads, int64_t head, int64_t half, const float* turn) {
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < half; i++) {
            T* pair = row + h * head + 2 * i;
            float a = Number<T>::get(pair[0]), b = Number<T>::get(pair[1]);
            put(pair, a * turn[i] - b * turn[half + i]);
            put(pair + 1, b * turn[i] + a * turn[half + i]);
        }
}

// The same where each pair turns by the component of the position that it belongs to.
template <typename T>
void round_turn_by_component(const Rotary& a, const Step& step, int64_t row, float* turn) {
    const int64_t half = a.rotary_dim / 2;
    const float* angles[3];
    for (int component = 0; component < 3; component++)
        angles[component] =
            a.cos_sin + (step.positions[row] +
                         step.position_offsets[component * step.position_offset_row + row]) *
                            a.rotary_dim;
    for (int64_t i = 0; i < half; i++) {
        const float* own = angles[a.components[i]];
        turn[i] = Number<T>::round(own[i]);
        turn[half + i] = Number<T>::round(own[half + i]);
    }
}

template <typename T>
void rotate_row(const Rotary& a, const Step& step, int64_t row, float* turn) {
    if (a.components) round_turn_by_component<T>(a, step, row, turn);
    else round_turn<T>(a.cos_sin + step.positions[row] * a.rotary_dim, a.rotary_dim, turn);
    const auto rotate = a.op == OP_ROTARY_INTERLEAVED ? rotate_pairs<T> : rotate_heads<T>;
    rotate((T*)a.query + row * a.query_row, a.heads, a.query_head, a.rotary_dim / 2, turn);
    rotate((T*)a.key + row * a.key_row, a.kv_heads, a.key_head, a.rotary_dim / 2, turn);
}

template <typename T>
void rotary_rows(const Rotary& a, const Step& step, int64_t rows, const Worker& worker) {
    float* turn = (float*)worker.scratch(a.rotary_dim * sizeof(float));
    int64_t piece = piece_of_rows((a.heads + a.kv_heads) * a.rotary_dim);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++)
            rotate_row<T>(a, step, row, turn);
}

void rotary(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, rotary_rows<T>((const Rotary&)call, step, rows_of(call, step), worker));
}

template <typename T>
void write_kv_rows(const WriteKv& a, const Step& step, int64_t rows, const Worker& worker) {
    int64_t piece = piece_of_rows(2 * a.kv_heads * a.head_dim);
    const int64_t* slots = step.slot_mapping + a.group * step.slot_mapping_group;
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++)
            store_token<T>(a, row, slots[row]);
}

void write_kv(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype,
              write_kv_rows<T>((const WriteKv&)call, step, rows_of(call, step), worker));
}

template <typename T>
void write_latent_rows(const WriteLatents& a, const Step& step, int64_t rows,
                       const Worker& worker) {
    const int64_t size = a.rank + a.rotary_dim, piece = piece_of_rows(size);
    const int64_t* slots = step.slot_mapping + a.group * step.slot_mapping_group;
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            if (slots[row] < 0) continue;
            T* to = (T*)a.cache + slots[row] * size;
            std::memcpy(to, (const T*)a.latent + row * a.latent_row, a.rank * sizeof(T));
            std::memcpy(to + a.rank, (const T*)a.key + row * a.key_row, a.rotary_dim * sizeof(T));
        }
}

void write_latents(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype,
              write_latent_rows<T>((const WriteLatents&)call, step, rows_of(call, step), worker));
}

template <typename T>
void rotary_and_write_kv_rows(const RotaryAndWriteKv& a, const Step& step, int64_t rows,
                              const Worker& worker) {
    float* turn = (float*)worker.scratch(a.rotary_dim * sizeof(float));
    int64_t piece = piece_of_rows((a.heads + 2 * a.kv_heads) * a.head_dim);
    const int64_t* slots = step.slot_mapping + a.group * step.slot_mapping_group;
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            rotate_row<T>(a, step, row, turn);
            store_token<T>(a, row, slots[row]);
        }
}

void rotary_and_write_kv(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, rotary_and_write_kv_rows<T>((const RotaryAndWriteKv&)call, step,
                                                      rows_of(call, step), worker));
}
