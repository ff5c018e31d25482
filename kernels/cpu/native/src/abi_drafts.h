// The part of the library's C interface (abi.h) for rounds of drafts and their verification in one
// run.
#pragma once
#include "abi.h"

// Connects the passes of what drafts and of the model that verifies, which run as one: B requests,
// `depth` drafts of each. What drafts is a head, which reads `state` and whose positions get the
// tokens after them, or, where state is null, a model. All change the step into that of the next
// pass, in its arrays, which have room for B * (depth + 1) tokens.
//
// OP_FIRST_DRAFTS: after a drafting pass over several tokens of each request. Keeps their last ones
// in `last` [B] and the drawn token_ids in kept [B], and moves each one's last row of `state` to
// the front. OP_NEXT_TOKENS follows the other drafting passes.
// OP_PLACE_DRAFTS: lays `last` and the drafts kept [depth, kept_row] side by side.
// OP_ACCEPT_DRAFTS: after the model. Copies the drawn token_ids and is_finite to kept and
// kept_finite [B, depth + 1], counts the drafts that were drawn in accepted [B], and, unless
// is_last, lays out the drafting pass over the tokens that were not computed: of a head all
// accepted positions, with the rows of `hidden` in `state`; of a model the last token, after the
// last draft if all were accepted.
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
    int64_t depth, kept_row, block_size, is_last;
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

// Prompt lookup between passes of the model that verifies: B requests, whose texts are rows of
// `texts`. The step's arrays have room for `most` + 1 tokens of each request.
//
// OP_LOOKUP_DRAFTS: lays out a pass over the last of num_known [B] tokens of each request and at
// most `most` [B] drafts: what followed the latest place where the longest end of its text stands,
// of most_equal tokens at most and least_equal at least. sample, unless null: the call that draws,
// whose columns [rows] are filled from those of `columns` [B].
// OP_ACCEPT_LOOKUPS: after the model. Copies the drawn token_ids and is_finite to kept and
// kept_finite [rows] and the first row of each request to starts [B + 1], counts the drafts that
// were drawn in accepted [B], and appends these and the token after them to the text.
struct Lookups : Call {
    int32_t* texts;
    const int64_t* slots;  // [B]: rows of texts
    int64_t* num_known;
    const int64_t* most;
    const Sample* columns;
    const Sample* sample;
    const int64_t* token_ids;
    const uint8_t* is_finite;
    int64_t* kept;
    uint8_t* kept_finite;
    int64_t* starts;
    int64_t* accepted;
    int64_t text_row, least_equal, most_equal, block_size;
};
