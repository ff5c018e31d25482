// RMS norms and layer norms. A row is summed in partial sums over ascending elements, then these
// are added. The order does not depend on other rows.

template <typename T>
float mean_square(const T* x, int64_t size) {
    Vec sum;
    int64_t i = 0;
    for (; i + Vec::LANES <= size; i += Vec::LANES) {
        Vec v = Vec::load(x + i);
        sum = Vec::fma(v, v, sum);
    }
    float total = sum.sum();
    for (; i < size; i++) total += Number<T>::get(x[i]) * Number<T>::get(x[i]);
    return total / (float)size;
}

// Rounded to the weight's type W before the weight, as the contract says (kernels/ops.py:
// rms_norm).
template <typename T, typename W>
void normalise(const T* x, const W* weight, T* out, int64_t size, double eps) {
    float factor = 1.0f / std::sqrt(mean_square(x, size) + (float)eps);
    int64_t i = 0;
    for (; i + Vec::LANES <= size; i += Vec::LANES)
        (Number<W>::round(Vec::load(x + i) * Vec(factor)) * Vec::load(weight + i)).store(out + i);
    for (; i < size; i++)
        put(out + i, Number<W>::round(Number<T>::get(x[i]) * factor) * Number<W>::get(weight[i]));
}

// Calls one of a norm's forms: of numbers T and weights W.
#define FOR_DTYPES(a, call)                   \
    do {                                      \
        if ((a).dtype == F32) {               \
            using T = float;                  \
            using W = float;                  \
            call;                             \
        } else if ((a).weight_dtype == F32) { \
            using T = uint16_t;               \
            using W = float;                  \
            call;                             \
        } else {                              \
            using T = uint16_t;               \
            using W = uint16_t;               \
            call;                             \
        }                                     \
    } while (0)

template <typename T, typename W>
void rms_norm_rows(const RmsNorm& a, int64_t rows, const Worker& worker) {
    int64_t piece = piece_of_rows(a.heads * a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++)
            for (int64_t head = 0; head < a.heads; head++)
                normalise((const T*)a.x + row * a.x_row + head * a.x_head, (const W*)a.weight,
                          (T*)a.out + row * a.out_row + head * a.out_head, a.size, a.eps);
}

inline void rms_norm(const Call& call, const Step& step, const Worker& worker) {
    const RmsNorm& a = (const RmsNorm&)call;
    FOR_DTYPES(a, (rms_norm_rows<T, W>(a, rows_of(call, step), worker)));
}

// residual += x, rounded to T
template <typename T>
void add_row(const T* x, T* residual, int64_t size) {
    int64_t i = 0;
    for (; i + Vec::LANES <= size; i += Vec::LANES)
        (Vec::load(residual + i) + Vec::load(x + i)).store(residual + i);
    for (; i < size; i++) put(residual + i, Number<T>::get(residual[i]) + Number<T>::get(x[i]));
}

template <typename T, typename W>
void add_rms_norm_rows(const AddRmsNorm& a, int64_t rows, const Worker& worker) {
    int64_t piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            T* x = (T*)a.x + row * a.x_row;
            T* residual = (T*)a.residual + row * a.residual_row;
            add_row(x, residual, a.size);
            normalise(residual, (const W*)a.weight, x, a.size, a.eps);
        }
}

inline void add_rms_norm(const Call& call, const Step& step, const Worker& worker) {
    const AddRmsNorm& a = (const AddRmsNorm&)call;
    FOR_DTYPES(a, (add_rms_norm_rows<T, W>(a, rows_of(call, step), worker)));
}

// The sum of term(a vector of x, or one number of it) over a row, in 4 times LANES partial sums.
template <typename T, typename Term>
float sum_row(const T* x, int64_t size, Term term) {
    constexpr int N = 4;
    Vec sums[N];
    int64_t i = 0;
    for (; i + N * Vec::LANES <= size; i += N * Vec::LANES)
        for (int n = 0; n < N; n++) sums[n] = sums[n] + term(Vec::load(x + i + n * Vec::LANES));
    for (; i + Vec::LANES <= size; i += Vec::LANES) sums[0] = sums[0] + term(Vec::load(x + i));
    float total = ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
    for (; i < size; i++) {
        float lanes[Vec::LANES] = {Number<T>::get(x[i])};
        term(Vec::load(lanes)).store(lanes);
        total += lanes[0];
    }
    return total;
}

template <typename T>
void layer_normalise(const T* x, const T* weight, const T* bias, T* out, int64_t size, double eps) {
    const float mean = sum_row(x, size, [](Vec v) { return v; }) / (float)size;
    const float variance = sum_row(x, size,
                                   [mean](Vec v) {
                                       Vec centred = v - Vec(mean);
                                       return centred * centred;
                                   }) /
                           (float)size;
    const float factor = 1.0f / std::sqrt(variance + (float)eps);
    int64_t i = 0;
    for (; i + Vec::LANES <= size; i += Vec::LANES) {
        Vec scaled = (Vec::load(x + i) - Vec(mean)) * Vec(factor), w = Vec::load(weight + i);
        (bias ? Vec::fma(scaled, w, Vec::load(bias + i)) : scaled * w).store(out + i);
    }
    for (; i < size; i++) {
        float scaled = (Number<T>::get(x[i]) - mean) * factor, w = Number<T>::get(weight[i]);
        put(out + i, bias ? std::fma(scaled, w, Number<T>::get(bias[i])) : scaled * w);
    }
}

template <typename T>
void layer_norm_rows(const LayerNorm& a, int64_t rows, const Worker& worker) {
    int64_t piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++)
            layer_normalise((const T*)a.x + row * a.x_row, (const T*)a.weight, (const T*)a.bias,
                            (T*)a.out + row * a.out_row, a.size, a.eps);
}

inline void layer_norm(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, layer_norm_rows<T>((const LayerNorm&)call, rows_of(call, step), worker));
}

template <typename T>
void add_layer_norm_rows(const AddLayerNorm& a, int64_t rows, const Worker& worker) {
    int64_t piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            T* x = (T*)a.x + row * a.x_row;
            T* residual = (T*)a.residual + row * a.residual_row;
            add_row(x, residual, a.size);
            layer_normalise(residual, (const T*)a.weight, (const T*)a.bias, x, a.size, a.eps);
        }
}

inline void add_layer_norm(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype,
              add_layer_norm_rows<T>((const AddLayerNorm&)call, rows_of(call, step), worker));
}
