// status.h: the text of this thread's last error.
#pragma once

#include "flash_attn.h"

namespace fa {

// Records the formatted text for fa_last_error, and returns `status`.
[[gnu::format(printf, 2, 3)]] fa_status fail(fa_status status, const char* format, ...);

const char* last_error();
void clear_error();

}  // namespace fa
