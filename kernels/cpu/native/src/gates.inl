// What stands between layers that keep a state and other layers (kernels/states.py): products with
// gates, and norms with them.

// Calls function(activation), an activation of Vec.
template <typename Function>
void with_gate(int64_t gate, Function function) {
    if (gate == GATE_SIGMOID) function([](Vec x) { return sigmoid(x); });
    else if (gate == GATE_SILU) function([](Vec x) { return silu(x); });
    else function([](Vec x) { return x; });
}

template <typename T, typename Activation>
void multiply_rows(const Multiply& a, int64_t rows, const Worker& worker, Activation activation) {
    const int64_t count = rows * a.heads, piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(count, piece)) * piece) < count;)
        for (int64_t i = start; i < std::min(start + piece, count); i++) {
            const int64_t row = i / a.heads, head = i % a.heads;
            const T* x = (const T*)a.x + row * a.x_row + head * a.x_head;
            const T* gate = (const T*)a.gate + row * a.gate_row + head * a.gate_head;
            T* out = (T*)a.out + i * a.size;
            const bool is_shared = a.gate_size != a.size;
            const Vec shared = activation(Vec(Number<T>::get(*gate)));
            for (int64_t k = 0; k < a.size; k += Vec::LANES) {
                const int64_t left = a.size - k;
                const Vec factor = is_shared ? shared : activation(load_some(gate + k, left));
                store_some(load_some(x + k, left) * factor, out + k, left);
            }
        }
}

void multiply(const Call& call, const Step& step, const Worker& worker) {
    const Multiply& a = (const Multiply&)call;
    with_gate(a.activation, [&](auto activation) {
        FOR_DTYPE(call.dtype, multiply_rows<T>(a, rows_of(call, step), worker, activation));
    });
}

// wide [size] is overwritten.
template <typename T, typename W>
void gated_norm_group(const T* x, const T* gate, const W* weight, T* out, const GatedRmsNorm& a,
                      float* wide) {
    const int64_t size = a.group_size;
    Vec sum;
    for (int64_t i = 0; i < size; i += Vec::LANES) {
        Vec v = load_some(x + i, size - i);
        if (a.gate_first) v = v * silu(load_some(gate + i, size - i));
        v.store(wide + i);
        sum = Vec::fma(v, v, sum);
    }
    const Vec factor(1.0f / std::sqrt(sum.sum() / (float)size + (float)a.eps));
    for (int64_t i = 0; i < size; i += Vec::LANES) {
        Vec v = Vec::load(wide + i) * factor;
        if (!a.gate_first) v = Number<T>::round(v);
        v = v * load_some(weight + i, size - i);
        if (!a.gate_first) v = v * silu(load_some(gate + i, size - i));
        store_some(v, out + i, size - i);
    }
}

template <typename T, typename W>
void gated_norm_rows(const GatedRmsNorm& a, int64_t rows, const Worker& worker) {
    const int64_t groups = a.size / a.group_size, count = rows * groups,
                  piece = piece_of_rows(a.group_size);
    float* wide = (float*)worker.scratch(round_up(a.group_size, Vec::LANES) * sizeof(float));
    for (int64_t start; (start = worker.next(ceil_div(count, piece)) * piece) < count;)
        for (int64_t i = start; i < std::min(start + piece, count); i++) {
            const int64_t row = i / groups, first = i % groups * a.group_size;
            const W* weight = (const W*)a.weight + (a.weight_size == a.size ? first : 0);
            gated_norm_group((const T*)a.x + row * a.x_row + first,
                             (const T*)a.gate + row * a.gate_row + first, weight,
                             (T*)a.out + row * a.size + first, a, wide);
        }
}

void gated_rms_norm(const Call& call, const Step& step, const Worker& worker) {
    const GatedRmsNorm& a = (const GatedRmsNorm&)call;
    FOR_DTYPES(a, (gated_norm_rows<T, W>(a, rows_of(call, step), worker)));
}
