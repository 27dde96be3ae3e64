// group.h: a rank's membership of a group, and the frame of a collective call: agree, run, or fail together.
#pragma once

#include <atomic>
#include <memory>

#include "distributed/board.h"
#include "distributed/call.h"
#include "distributed/transport.h"

struct fa_group {
    fa_group_args args{};  // without the caller's struct_size and library path
    std::unique_ptr<fa::distributed::Meeting> meeting;
    std::unique_ptr<fa::distributed::Transport> transport;
    std::atomic<bool> busy{false};
};

namespace fa::distributed {

// One walk of the operation, through p.mode.
fa_status walk(Walk& w, const Problem& p);

// What the call of rank p.rank takes. `own`: the arrays of p are that rank's, so that launches of attention can be asked about; otherwise
// only the shared memory is counted.
fa_status count(const Problem& p, Needs* needs, bool own = true);

// The call of this rank. `checked` is the outcome of its validation: a rank whose arguments are wrong has to tell the others.
fa_status run(fa_group* group, const Problem& p, fa_status checked, void* stream);

// Every rank shares at least as much memory as any of them asks for.
fa_status reserve(fa_group* group, size_t bytes);

}  // namespace fa::distributed
