// group.h: a rank's membership in a group, and the frame of a collective call: agree, then run or fail together.
#pragma once

#include <atomic>
#include <memory>

#include "distributed/call.h"
#include "distributed/transport/board.h"
#include "distributed/transport/transport.h"

struct fa_group {
    fa_group_args args{};  // without the caller's struct_size and library path
    std::unique_ptr<fa::distributed::Meeting> meeting;
    std::unique_ptr<fa::distributed::Transport> transport;
    std::atomic<bool> busy{false};
};

namespace fa::distributed {

// Walks through the operation in p.mode.
fa_status walk(Walk& w, const Problem& p);

// The needs of rank p.rank's call. `own`: the arrays of p belong to that rank, so launches of attention can be queried; otherwise only the
// shared memory is counted.
fa_status count(const Problem& p, Needs* needs, bool own = true);

// Runs this rank's call. `checked` is the result of its validation: a rank with invalid arguments must still tell the others.
fa_status run(fa_group* group, const Problem& p, fa_status checked, void* stream);

// Makes every rank share at least as much memory as the largest request.
fa_status reserve(fa_group* group, size_t bytes);

}  // namespace fa::distributed
