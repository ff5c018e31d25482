// The part of the library's C interface (abi.h) for drafts of a head; draft_calls.py mirrors it.
#pragma once
#include "abi.h"

// Connects the passes of a head that drafts and of the model that verifies, which run as one: B
// requests, `depth` drafts of each. All change the step into that of the next pass, in its arrays,
// which have room for B * (depth + 1) tokens.
//
// OP_FIRST_DRAFTS: after a pass of the head over several tokens of each request. Keeps their
// last ones in `last` [B] and the drawn token_ids in kept [B], and moves each one's last row of
// `state` to the front. OP_NEXT_TOKENS follows the other passes of the head.
// OP_PLACE_DRAFTS: lays `last` and the drafts kept [depth, kept_row] side by side.
// OP_ACCEPT_DRAFTS: after the model. Copies the drawn token_ids and is_finite to kept and
// kept_finite [B, depth + 1], counts the drafts that were drawn in accepted [B], and lays out the
// head's pass over their positions, with the rows of `hidden` in `state`.
//
// draw_positions, unless null: the positions that the next pass draws.
struct Drafts : Call {
    const int64_t* token_ids;
    const uint8_t* is_finite;
    int64_t* last;
    int64_t* kept;
    uint8_t* kept_finite;
    int64_t* accepted;
    int64_t* draw_positions;
    const void* hidden;
    void* state;
    int64_t row_bytes;  // of state and hidden
    int64_t depth, kept_row, block_size;
};

// out [rows, vocab_size] = `absent`, but x [rows, size] at token_ids [size], which ascend.
struct SpreadLogits : Call {
    const float* x;
    const int32_t* token_ids;
    float* out;
    int64_t x_row, out_row;
    int64_t size, vocab_size;
    double absent;
};
