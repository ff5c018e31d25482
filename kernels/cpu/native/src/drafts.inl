// What connects the passes of a head that drafts and of the model that verifies (abi_drafts.h).

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
        if (row != b) std::memcpy(state + b * a.row_bytes, state + row * a.row_bytes, a.row_bytes);
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
        int64_t start = step.positions[b] - a.depth + 1;
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
    int64_t width = a.depth + 1, end = 0;
    std::copy_n(a.token_ids, step.num_logits, a.kept);
    std::copy_n(a.is_finite, step.num_logits, a.kept_finite);
    for (int64_t b = 0; b < step.num_requests; b++) {
        int64_t first = b * width, count = 0;
        while (count < a.depth && a.is_finite[first + count] &&
               a.token_ids[first + count] == step.token_ids[first + count + 1])
            count++;
        a.accepted[b] = count;
        int64_t start = step.positions[first];
        for (int64_t row = first; row <= first + count; row++, end++) {
            step.token_ids[end] = (int32_t)a.token_ids[row];
            place_row(step, end, b, start + row - first, a.block_size);
            std::memcpy((char*)a.state + end * a.row_bytes,
                        (const char*)a.hidden + row * a.row_bytes, a.row_bytes);
        }
        step.seq_lens[b] = (int32_t)(start + count + 1);
        step.query_start_loc[b + 1] = (int32_t)end;
        step.logits_indices[b] = end - 1;
        if (a.draw_positions) a.draw_positions[b] = start + count + 2;
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
