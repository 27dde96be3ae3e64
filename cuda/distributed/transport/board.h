// board.h: where the hosts of a group meet. A meeting is an all-gather of a small message over all ranks, and therefore also a barrier.
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
    // Sends `bytes` bytes (at most kMessageBytes) and receives those of all ranks: all[r * bytes ..]. Returns FA_RANK_LOST if a rank does
    // not come within the timeout, has ended, or the group was aborted; every later meeting then fails with the same text.
    virtual fa_status meet(const void* mine, void* all, size_t bytes) = 0;
    // Makes every meeting of every rank fail, including those in progress. The first reason is kept.
    virtual void abort(const char* reason) = 0;
    // FA_OK, or FA_RANK_LOST with the reason after the group was aborted.
    virtual fa_status check() = 0;

    // A rank may read the memory of others between `enter` and `leave`. It enters before the meeting in which they publish addresses.
    virtual void enter() {}
    virtual void leave() {}
    // For an aborted group, in which no rank begins to read any more: waits, at most the timeout, until no other rank reads.
    virtual void wait_for_readers() {}
};

// For ranks that share memory: threads of a process, or processes of a host, which use a new object of POSIX shared memory. Collective:
// rank 0 makes the board, and `all_gather` tells the others its address or name.
fa_status meet_on_board(const fa_group_args& args, std::unique_ptr<Meeting>* meeting);

// For ranks without common memory: every meeting is a call of the caller's all_gather.
std::unique_ptr<Meeting> meet_by_callback(const fa_group_args& args);

}  // namespace fa::distributed
