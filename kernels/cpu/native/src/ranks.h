// How ranks wait for each other (abi_ranks.h).
#pragma once
#include "abi_ranks.h"

// Begins an exchange: this rank's part is written. Returns 0 once all ranks have begun theirs, so
// that all parts may be read; else what line 0 has.
int32_t meet(const Exchange& a);
