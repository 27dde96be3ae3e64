// status.cpp: the thread-local error text. Nothing is allocated, so reporting a failure cannot fail.
#include "api/common/status.h"

#include <cstdarg>
#include <cstdio>

namespace fa {
namespace {
thread_local char text[1024] = "";
}

fa_status fail(fa_status status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return status;
}

const char* last_error() { return text; }
void clear_error() { text[0] = '\0'; }

}  // namespace fa
