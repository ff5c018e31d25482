// Several streams, and sparse activations (kernels/altup.py). A piece of work is whole tokens,
// whose sums have an order of their own.

template <typename T>
void stack_rows(const StackStreams& a, int64_t rows, const Worker& worker) {
    const int64_t piece = piece_of_rows((1 + a.heads) * a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            T* out = (T*)a.out + row * (1 + a.heads) * a.size;
            std::copy_n((const T*)a.x + row * a.x_row, a.size, out);
            const T* others = (const T*)a.others + row * a.others_row;
            for (int64_t head = 0; head < a.heads; head++)
                std::copy_n(others + head * a.others_head, a.size, out + (1 + head) * a.size);
        }
}

void stack_streams(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, stack_rows<T>((const StackStreams&)call, rows_of(call, step), worker));
}

template <typename T>
void match_rows(const MatchMagnitude& a, int64_t rows, const Worker& worker) {
    constexpr float LEAST = 1e-5f;
    const int64_t piece = piece_of_rows((1 + a.heads) * a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            const float wanted =
                std::sqrt(mean_square((const T*)a.like + row * a.like_row, a.size));
            for (int64_t head = 0; head < a.heads; head++) {
                T* x = (T*)a.x + row * a.x_row + head * a.x_head;
                const float own = mean_square(x, a.size);
                const Vec factor(wanted / std::sqrt(own < LEAST ? LEAST : own));
                for (int64_t i = 0; i < a.size; i += Vec::LANES)
                    store_some(load_some(x + i, a.size - i) * factor, x + i, a.size - i);
            }
        }
}

void match_magnitude(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, match_rows<T>((const MatchMagnitude&)call, rows_of(call, step), worker));
}

// factors [count] = weight [count, size] tanh(routed [size])
inline void route_streams(const float* weight, const float* routed, int64_t count, int64_t size,
                          float* factors) {
    float mixed[MAX_STREAMS];
    for (int64_t i = 0; i < size; i += Vec::LANES)
        store_some(tanh(load_some(routed + i, size - i)), mixed + i, size - i);
    for (int64_t n = 0; n < count; n++) {
        factors[n] = 0;
        for (int64_t i = 0; i < size; i++) factors[n] += weight[n * size + i] * mixed[i];
    }
}

template <typename T>
void predict_rows(const AltupPredict& a, int64_t rows, const Worker& worker) {
    const int64_t count = a.num_streams, piece = piece_of_rows(count * a.size);
    float factors[MAX_STREAMS * MAX_STREAMS];
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            route_streams(a.weight, a.routed + row * a.routed_row, count * count, count, factors);
            const T* streams = (const T*)a.streams + row * a.streams_row;
            T* out = (T*)a.out + row * count * a.size;
            for (int64_t k = 0; k < a.size; k += Vec::LANES) {
                const int64_t left = a.size - k;
                Vec x[MAX_STREAMS];
                for (int64_t j = 0; j < count; j++)
                    x[j] = load_some(streams + j * a.streams_head + k, left);
                for (int64_t i = 0; i < count; i++) {
                    Vec sum;
                    for (int64_t j = 0; j < count; j++)
                        sum = Vec::fma(Vec(factors[i * count + j]), x[j], sum);
                    store_some(x[i] + sum, out + i * a.size + k, left);
                }
            }
        }
}

void altup_predict(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, predict_rows<T>((const AltupPredict&)call, rows_of(call, step), worker));
}

template <typename T>
void correct_rows(const AltupCorrect& a, int64_t rows, const Worker& worker) {
    const int64_t count = a.num_streams, piece = piece_of_rows(count * a.size);
    float factors[MAX_STREAMS];
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            route_streams(a.weight, a.routed + row * a.routed_row, count, count, factors);
            const T* activated = (const T*)a.activated + row * a.activated_row;
            T* streams = (T*)a.streams + row * a.streams_row;
            for (int64_t k = 0; k < a.size; k += Vec::LANES) {
                const int64_t left = a.size - k;
                const Vec change = load_some(activated + k, left) -
                                   load_some(streams + a.active * a.streams_head + k, left);
                for (int64_t i = 0; i < count; i++) {
                    T* x = streams + i * a.streams_head + k;
                    store_some(Vec::fma(Vec(1.0f + factors[i]), change, load_some(x, left)), x,
                               left);
                }
            }
        }
}

void altup_correct(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, correct_rows<T>((const AltupCorrect&)call, rows_of(call, step), worker));
}

template <typename T>
void top_k_rows(const GaussianTopK& a, int64_t rows, const Worker& worker) {
    const int64_t piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            T* x = (T*)a.x + row * a.x_row;
            const float mean = sum_row(x, a.size, [](Vec v) { return v; }) / (float)a.size;
            const float variance = sum_row(x, a.size,
                                           [mean](Vec v) {
                                               const Vec centred = v - Vec(mean);
                                               return centred * centred;
                                           }) /
                                   (float)a.size;
            const Vec cut(mean + (float)a.deviations * std::sqrt(variance));
            for (int64_t i = 0; i < a.size; i += Vec::LANES)
                store_some(relu(load_some(x + i, a.size - i) - cut), x + i, a.size - i);
        }
}

void gaussian_top_k(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, top_k_rows<T>((const GaussianTopK&)call, rows_of(call, step), worker));
}
