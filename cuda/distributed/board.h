// board.h: where the hosts of a group meet. A meeting is an all-gather of a small message between all ranks, and therefore a barrier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flash_attn_distributed.h"

namespace fa::distributed {

constexpr size_t kMessageBytes = 2048;

class Meeting {
public:
    virtual ~Meeting() = default;
    // Gives `bytes` (at most kMessageBytes) and gets those of all ranks: all[r * bytes ..]. FA_RANK_LOST when a rank does not come within
    // the timeout, has ended, or the group was aborted; then every later meeting fails with the same text.
    virtual fa_status meet(const void* mine, void* all, size_t bytes) = 0;
    // Makes every meeting of every rank fail, also those that have begun. The first reason stays.
    virtual void abort(const char* reason) = 0;
    // FA_OK, or FA_RANK_LOST with the reason once the group was aborted.
    virtual fa_status check() = 0;

    // A rank reads the memory of others from `enter`, which comes before the meeting where they say where it lies, to `leave`.
    virtual void enter() {}
    virtual void leave() {}
    // Of an aborted group, where no rank begins to read: waits, at most the timeout, until no other rank reads.
    virtual void wait_for_readers() {}
};

// Ranks that share memory: threads of a process, or processes of a host, for which `name` is a new name of POSIX shared memory. Collective:
// rank 0 makes the board, and `all_gather` tells the others where it is.
fa_status meet_on_board(const fa_group_args& args, std::unique_ptr<Meeting>* meeting);

// Ranks without common memory: every meeting is a call of the caller's all_gather.
std::unique_ptr<Meeting> meet_by_callback(const fa_group_args& args);

}  // namespace fa::distributed
