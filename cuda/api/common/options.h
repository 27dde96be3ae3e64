// options.h: the options of attention, for those who do not compute them: the fields of fa_attention_args that say what is computed, not
// where arrays are or how long they are. api/attention/options.cpp has a row for each option of the scores.
#pragma once

#include <cstdint>

#include "api/common/status.h"
#include "flash_attn.h"

namespace fa {

fa_status check_options(const fa_attention_args& a);

// Calls that do not take every option.
enum class Calls {
    kOnParts,     // of sequences (fa_part)
    kOverRanks,   // which hold parts of sequences
    kOnCache,     // of keys and values
    kOnTree,      // of draft tokens
    kOverShards,  // of a cache, each on a rank
};
// Refuses the first option of a call that calls of this kind do not take. tree_keys: of a tree of draft tokens.
fa_status refuse_options(const fa_attention_args& a, Calls calls, int32_t tree_keys = 0);

// The scale of a call's scores: the caller's, or that of its head dim.
float softmax_scale_of(const fa_attention_args& a);

// The value of an option in which all ranks of a call must agree. Of an array they agree whether there is one.
struct Agreed {
    const char* name;
    int64_t word;  // the number, the bits of a float, or 1 for an array
    bool real, array;
    bool of_rows;  // an array with rows: a rank without rows may have any address, or none
};
constexpr int kMostAgreed = 16;
int agreed_options(const fa_attention_args& a, Agreed (&found)[kMostAgreed]);  // returns their number, the same for every call

}  // namespace fa
