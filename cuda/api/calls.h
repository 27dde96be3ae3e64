// calls.h: the operations of fa_call, by number.
#pragma once

#include "flash_attn_transformer.h"

namespace fa {

struct Operation {
    fa_operation number;
    const char* name;
    fa_status (*run)(const void* args, void* stream);
    fa_status (*query)(const void* args, fa_attention_plan* plan);  // NULL: the operation needs no workspace
};

const Operation* find_operation(int64_t number);  // NULL if no operation has this number

}  // namespace fa
