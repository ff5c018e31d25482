// Mixtures of experts (kernels/moe.py): the choice of each token's experts, the order of rows by
// expert, and the sum of what experts return. Their products are in linear.inl and quantized.inl.

// The scores of values [size]: exp(value - most) or sigmoid(value). The array extends to a multiple
// of LANES.
inline void score(float* values, int64_t size, bool is_sigmoid, float most) {
    for (int64_t i = 0; i < size; i += Vec::LANES) {
        const Vec x = Vec::load(values + i);
        (is_sigmoid ? sigmoid(x) : exp(x - Vec(most))).store(values + i);
    }
}

// The index of the largest value that is not taken, the lowest of equals; a NaN counts as less than
// any number.
inline int64_t largest_of(const float* values, const uint8_t* taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best] || values[best] != values[best]))
            best = i;
    return best;
}

// Marks the experts of all groups but the top_groups best as taken. choice [count]
inline void exclude_groups(const RouteExperts& a, const float* choice, uint8_t* taken) {
    const int64_t size = a.count / a.num_groups;
    float of_groups[MAX_EXPERTS];
    uint8_t kept[MAX_EXPERTS] = {};
    for (int64_t group = 0; group < a.num_groups; group++) {
        const float* values = choice + group * size;
        uint8_t used[MAX_EXPERTS] = {};
        const int64_t first = largest_of(values, used, size);
        used[first] = 1;
        of_groups[group] = values[first];
        if (a.group_best == 2) of_groups[group] += values[largest_of(values, used, size)];
    }
    for (int64_t i = 0; i < a.top_groups; i++) kept[largest_of(of_groups, kept, a.num_groups)] = 1;
    for (int64_t i = 0; i < a.count; i++) taken[i] = !kept[i / size];
}

inline void route_row(const RouteExperts& a, const float* logits, int32_t* ids, float* weights) {
    float scores[MAX_EXPERTS + Vec::LANES] = {}, choice[MAX_EXPERTS];
    uint8_t taken[MAX_EXPERTS] = {};
    const bool by_scores = a.bias || a.num_groups > 1,
               needs_all = by_scores || (!a.is_sigmoid && !a.renormalize);
    float most = -INFINITY, total = 0, sum = 0;
    bool spoilt = false;
    for (int64_t i = 0; i < a.count; i++) {
        most = std::max(most, logits[i]);
        spoilt |= logits[i] != logits[i] || (!a.is_sigmoid && logits[i] == INFINITY);
    }
    if (needs_all) {
        std::copy(logits, logits + a.count, scores);
        score(scores, a.count, a.is_sigmoid, most);
        for (int64_t i = 0; i < a.count; i++) total += scores[i];
        for (int64_t i = 0; i < a.count; i++) {
            if (!a.is_sigmoid) scores[i] /= total;
            choice[i] = scores[i] + (a.bias ? a.bias[i] : 0);
        }
    }
    if (a.num_groups > 1) exclude_groups(a, choice, taken);
    for (int64_t k = 0; k < a.top_k; k++) {
        // logits are in the order of scores, and have no ties by rounding
        const int64_t expert = largest_of(by_scores ? choice : logits, taken, a.count);
        taken[expert] = 1;
        ids[k] = (int32_t)expert;
        weights[k] = needs_all ? scores[expert] : logits[expert];
    }
    if (!needs_all) {
        std::copy(weights, weights + a.top_k, scores);
        score(scores, a.top_k, a.is_sigmoid, most);
        std::copy(scores, scores + a.top_k, weights);
    }
    for (int64_t k = 0; k < a.top_k; k++) sum += weights[k];
    for (int64_t k = 0; k < a.top_k; k++) {
        if (a.renormalize) weights[k] /= sum + (float)a.added;
        weights[k] = spoilt ? NAN : weights[k] * (float)a.scale;
    }
}

inline void route_experts(const Call& call, const Step& step, const Worker& worker) {
    const RouteExperts& a = (const RouteExperts&)call;
    const int64_t rows = rows_of(call, step), piece = piece_of_rows(8 * a.count);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++)
            route_row(a, a.logits + row * a.logits_row, a.ids + row * a.top_k,
                      a.weights + row * a.top_k);
}

inline void sort_by_expert(const Call& call, const Step& step, const Worker& worker) {
    const SortByExpert& a = (const SortByExpert&)call;
    if (worker.next(1) != 0) return;
    const int64_t pairs = rows_of(call, step) * a.top_k;
    std::fill(a.starts, a.starts + a.count + 1, 0);
    for (int64_t i = 0; i < pairs; i++) a.starts[a.ids[i] + 1]++;
    for (int64_t expert = 0; expert < a.count; expert++) a.starts[expert + 1] += a.starts[expert];
    // starts[e] counts up to the end of e's rows, which is where those of e + 1 start
    for (int64_t i = 0; i < pairs; i++) {
        const int32_t place = a.starts[a.ids[i]]++;
        a.tokens[place] = (int32_t)(i / a.top_k);
        a.places[i] = place;
    }
    for (int64_t expert = a.count; expert > 0; expert--) a.starts[expert] = a.starts[expert - 1];
    a.starts[0] = 0;
    if (a.counts)
        for (int64_t e = 0; e < a.count; e++) a.counts[e] += a.starts[e + 1] - a.starts[e];
}

inline void count_experts(const Call& call, const Step& step, const Worker& worker) {
    const CountExperts& a = (const CountExperts&)call;
    if (worker.next(1) != 0) return;
    const int64_t rows = rows_of(call, step);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < a.top_k && !(a.slots && a.slots[row] < 0); k++)
            a.counts[a.ids[row * a.top_k + k]]++;
}

inline void scale_by_expert(const Call& call, const Step& step, const Worker& worker) {
    const ScaleByExpert& a = (const ScaleByExpert&)call;
    if (worker.next(1) != 0) return;
    const int64_t count = rows_of(call, step) * a.top_k;
    for (int64_t i = 0; i < count; i++) a.weights[i] *= a.scales[a.ids[i]];
}

template <typename T>
void combine_rows(const CombineExperts& a, int64_t rows, const Worker& worker) {
    const int64_t piece = piece_of_rows(a.size * a.top_k);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            const int32_t* places = a.places + row * a.top_k;
            const float* weights = a.weights + row * a.top_k;
            T* out = (T*)a.out + row * a.out_row;
            int64_t i = 0;
            for (; i + Vec::LANES <= a.size; i += Vec::LANES) {
                Vec total;
                for (int64_t k = 0; k < a.top_k; k++)
                    total =
                        Vec::fma(Vec::load(a.x + places[k] * a.x_row + i), Vec(weights[k]), total);
                total.store(out + i);
            }
            for (; i < a.size; i++) {
                float total = 0;
                for (int64_t k = 0; k < a.top_k; k++)
                    total = std::fma(a.x[places[k] * a.x_row + i], weights[k], total);
                put(out + i, total);
            }
        }
}

inline void combine_experts(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype,
              combine_rows<T>((const CombineExperts&)call, rows_of(call, step), worker));
}

template <typename T>
void add_gated_rows(const AddGated& a, int64_t rows, const Worker& worker) {
    const int64_t piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            const T* x = (const T*)a.x + row * a.x_row;
            T* out = (T*)a.out + row * a.out_row;
            float gate[Vec::LANES] = {a.gate[row * a.gate_row]};
            score(gate, 1, true, 0);
            int64_t i = 0;
            for (; i + Vec::LANES <= a.size; i += Vec::LANES)
                Vec::fma(Vec::load(x + i), Vec(gate[0]), Vec::load(out + i)).store(out + i);
            for (; i < a.size; i++)
                put(out + i, std::fma(Number<T>::get(x[i]), gate[0], Number<T>::get(out[i])));
        }
}

inline void add_gated(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, add_gated_rows<T>((const AddGated&)call, rows_of(call, step), worker));
}

inline void experts_linear(const Call& call, const Step& step, const Worker& worker) {
    const ExpertsLinear& a = (const ExpertsLinear&)call;
    FOR_OWN_DTYPE(call, step, worker,
                  (experts_linear_items<T, typename BlockOf<T>::type>(a, worker)));
}
