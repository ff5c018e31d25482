// What connects passes that draft and passes that verify (abi_drafts.h).

// The cache slots of row `row`, which is at `position` of request `request`, in each group.
inline void place_row(Step& step, int64_t row, int64_t request, int64_t position,
                      int64_t block_size) {
    const int32_t* blocks = step.block_tables + request * step.block_table_row;
    step.positions[row] = position;
    for (int64_t group = 0; group < step.num_groups; group++)
        step.slot_mapping[group * step.slot_mapping_group + row] =
            blocks[group * step.block_table_group + position / block_size] * block_size +
            position % block_size;
}

// How many of the drafts in the step's rows [first + 1, first + width) were drawn.
inline int64_t num_accepted(const Step& step, int64_t first, int64_t width,
                            const int64_t* token_ids, const uint8_t* is_finite) {
    int64_t count = 0;
    while (count < width - 1 && is_finite[first + count] &&
           token_ids[first + count] == step.token_ids[first + count + 1])
        count++;
    return count;
}

void first_drafts(const Call& call, const Step& constant, const Worker& worker) {
    const Drafts& a = (const Drafts&)call;
    if (worker.next(1) != 0) return;
    Step& step = const_cast<Step&>(constant);
    char* state = (char*)a.state;
    // rows move to the front, so none is overwritten before it is read
    for (int64_t b = 0; b < step.num_requests; b++) {
        int64_t row = step.logits_indices[b];
        a.last[b] = step.token_ids[row];
        a.kept[b] = a.token_ids[b];
        if (state && row != b)
            std::memcpy(state + b * a.row_bytes, state + row * a.row_bytes, a.row_bytes);
        step.token_ids[b] = (int32_t)a.token_ids[b];
        place_row(step, b, b, step.positions[row] + 1, a.block_size);
        step.seq_lens[b]++;
        step.logits_indices[b] = b;
        step.query_start_loc[b + 1] = (int32_t)b + 1;
        if (a.draw_positions) a.draw_positions[b]++;
    }
    step.num_tokens = step.num_requests;
}

void place_drafts(const Call& call, const Step& constant, const Worker& worker) {
    const Drafts& a = (const Drafts&)call;
    if (worker.next(1) != 0) return;
    Step& step = const_cast<Step&>(constant);
    int64_t width = a.depth + 1;
    // rows move to the back
    for (int64_t b = step.num_requests; b-- > 0;) {
        int64_t start = step.positions[b] - a.depth + (a.state != nullptr);
        for (int64_t j = 0; j < width; j++) {
            int64_t row = b * width + j;
            step.token_ids[row] = (int32_t)(j ? a.kept[(j - 1) * a.kept_row + b] : a.last[b]);
            place_row(step, row, b, start + j, a.block_size);
            step.logits_indices[row] = row;
            if (a.draw_positions) a.draw_positions[row] = start + j + 1;
        }
        step.seq_lens[b] = (int32_t)(start + width);
        step.query_start_loc[b + 1] = (int32_t)((b + 1) * width);
    }
    step.num_tokens = step.num_logits = step.num_requests * width;
}

void accept_drafts(const Call& call, const Step& constant, const Worker& worker) {
    const Drafts& a = (const Drafts&)call;
    if (worker.next(1) != 0) return;
    Step& step = const_cast<Step&>(constant);
    int64_t width = a.depth + 1, end = 0, ahead = a.state != nullptr;
    std::copy_n(a.token_ids, step.num_logits, a.kept);
    std::copy_n(a.is_finite, step.num_logits, a.kept_finite);
    for (int64_t b = 0; b < step.num_requests; b++) {
        int64_t first = b * width;
        int64_t count = a.accepted[b] = num_accepted(step, first, width, a.token_ids, a.is_finite);
        int64_t after = step.positions[first] + 1;  // of the token that was drawn in row `first`
        int64_t begin = a.state ? first : first + count - (count == a.depth);
        for (int64_t row = begin; row <= first + count; row++, end++) {
            step.token_ids[end] = (int32_t)a.token_ids[row];
            if (!a.is_last) place_row(step, end, b, after - ahead + row - first, a.block_size);
            if (a.state)
                std::memcpy((char*)a.state + end * a.row_bytes,
                            (const char*)a.hidden + row * a.row_bytes, a.row_bytes);
        }
        step.seq_lens[b] = (int32_t)(after - ahead + count + 1);
        step.query_start_loc[b + 1] = (int32_t)end;
        step.logits_indices[b] = end - 1;
        if (a.draw_positions) a.draw_positions[b] = after + count + 1;
    }
    step.num_tokens = end;
    step.num_logits = step.num_requests;
}

void spread_logits(const Call& call, const Step& step, const Worker& worker) {
    const SpreadLogits& a = (const SpreadLogits&)call;
    constexpr int64_t PIECE = 8192;
    const int64_t pieces = ceil_div(a.vocab_size, PIECE), count = rows_of(a, step) * pieces;
    const int32_t* ids_end = a.token_ids + a.size;
    for (int64_t item; (item = worker.next(count)) < count;) {
        const int64_t row = item / pieces, first = item % pieces * PIECE,
                      end = std::min(first + PIECE, a.vocab_size);
        const float* x = a.x + row * a.x_row;
        float* out = a.out + row * a.out_row;
        std::fill(out + first, out + end, (float)a.absent);
        const int32_t* id = std::lower_bound(a.token_ids, ids_end, (int32_t)first);
        for (; id < ids_end && *id < end; id++) out[*id] = x[id - a.token_ids];
    }
}

// Where the drafts of `text` [length] begin, or -1 (executor/runner/speculation/proposers.py).
inline int64_t find_drafts(const int32_t* text, int64_t length, int64_t least, int64_t most) {
    int64_t found = -1, longest = least - 1;
    for (int64_t end = length - 1; end-- > 0 && longest < most;) {  // the latest place comes first
        if (text[end] != text[length - 1]) continue;
        int64_t count = 1;
        while (count < most && count <= end && text[end - count] == text[length - 1 - count])
            count++;
        if (count > longest) {
            longest = count;
            found = end + 1;
        }
    }
    return found;
}

void lookup_drafts(const Call& call, const Step& constant, const Worker& worker) {
    const Lookups& a = (const Lookups&)call;
    if (worker.next(1) != 0) return;
    Step& step = const_cast<Step&>(constant);
    int64_t end = 0;
    for (int64_t b = 0; b < step.num_requests; b++) {
        const int32_t* text = a.texts + a.slots[b] * a.text_row;
        int64_t known = a.num_known[b], first = end;
        int64_t start = a.most[b] ? find_drafts(text, known, a.least_equal, a.most_equal) : -1;
        int64_t count = start < 0 ? 0 : a.most[b];
        step.token_ids[first] = text[known - 1];
        // a place that overlaps the end: the text repeats itself with this period
        for (int64_t i = 0; i < count; i++)
            step.token_ids[first + 1 + i] = text[start + i % (known - start)];
        for (; end <= first + count; end++) {
            place_row(step, end, b, known - 1 + end - first, a.block_size);
            step.logits_indices[end] = end;
            if (!a.sample) continue;
            const Sample& from = *a.columns;
            const Sample& to = *a.sample;
            const_cast<float*>(to.temperature)[end] = from.temperature[b];
            const_cast<int32_t*>(to.top_k)[end] = from.top_k[b];
            const_cast<float*>(to.top_p)[end] = from.top_p[b];
            const_cast<float*>(to.min_p)[end] = from.min_p[b];
            const_cast<int64_t*>(to.seeds)[end] = from.seeds[b];
            const_cast<int64_t*>(to.positions)[end] = known + end - first;
        }
        step.seq_lens[b] = (int32_t)(known + count);
        step.query_start_loc[b + 1] = (int32_t)end;
    }
    step.num_tokens = step.num_logits = end;
}

void accept_lookups(const Call& call, const Step& step, const Worker& worker) {
    const Lookups& a = (const Lookups&)call;
    if (worker.next(1) != 0) return;
    std::copy_n(a.token_ids, step.num_logits, a.kept);
    std::copy_n(a.is_finite, step.num_logits, a.kept_finite);
    std::copy_n(step.query_start_loc, step.num_requests + 1, a.starts);
    for (int64_t b = 0; b < step.num_requests; b++) {
        int64_t first = step.query_start_loc[b], width = step.query_start_loc[b + 1] - first;
        int64_t count = a.accepted[b] = num_accepted(step, first, width, a.token_ids, a.is_finite);
        int32_t* text = a.texts + a.slots[b] * a.text_row + a.num_known[b];
        std::copy_n(a.token_ids + first, count + 1, text);
        a.num_known[b] += count + 1;
    }
}
