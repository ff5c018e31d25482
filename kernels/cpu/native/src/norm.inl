// RMS norms. A row is summed in LANES partial sums over ascending elements, then these are added.
// The order does not depend on other rows.

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

void rms_norm(const Call& call, const Step& step, const Worker& worker) {
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

void add_rms_norm(const Call& call, const Step& step, const Worker& worker) {
    const AddRmsNorm& a = (const AddRmsNorm&)call;
    FOR_DTYPES(a, (add_rms_norm_rows<T, W>(a, rows_of(call, step), worker)));
}
