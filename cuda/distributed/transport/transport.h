// transport.h: moves bytes from one rank's memory to another's. One interface for GPUs of a process, GPUs of several processes,
// NCCL, and the CPU.
//
// The reader copies. A rank publishes arrays before the first meeting of a call; after it all ranks know their addresses. Signals order
// copies and the work on streams: a rank marks a point of its stream, and copies from that rank wait for the mark. On GPUs, copy engines
// copy from other ranks on streams of the group, because a copy by a kernel would wait for an attention kernel that occupies every SM. But
// a copy engine takes 8 us per message. So kernels copy small messages; the reader launches them before its first attention, on all SMs if
// nothing runs beside them, otherwise on a few. Copies within a rank's memory are kernels too. On the CPU everything is done when a
// function returns, and meetings alone order the ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "distributed/transport/board.h"
#include "flash_attn_distributed.h"

namespace fa::distributed {

// A mark on the stream of a rank. kReady: its inputs may be read. kDone: the rank has finished reading. kTotals: its sums over all pieces
// are ready. kPiece + i: the result of piece i is ready. A signal is given once per call: a second one could come before another rank waits
// for the first, and then ranks might wait for each other.
enum Signal : int32_t { kReady, kDone, kTotals, kPiece };
constexpr int kMostPieces = 16, kSignals = kPiece + kMostPieces;

// Streams of a call. Pieces use them in turn: the copies of the next piece run beside the work on a piece, and kernels overlap
// at their ends.
constexpr int64_t kStreams = 3;

// An array of rows that other ranks read: `rows` rows of `width` bytes, `pitch` bytes apart.
struct Rows {
    void* data;
    int64_t pitch, width, rows;
};

// The description of such an array for the other ranks.
struct Published {
    uint64_t address;  // in the publishing process; with `shared`: offset in its shared memory
    int64_t pitch;
    int32_t shared, used;
};
constexpr int kMostPublished = 12;

// `rows` pieces of `width` bytes, from a published array of one rank to the memory of another.
struct Copy {
    int32_t source, target;  // ranks
    int32_t array;           // index of the published array
    int64_t from;            // bytes from its start
    void* to;                // in the target's memory; ignored on other ranks
    int64_t to_pitch;
    int64_t width, rows;
};

// Whether other work runs beside a transfer, and for how long.
enum class Hidden { kNot, kBehindLittle, kBehindMuch };

class Transport {
public:
    virtual ~Transport() = default;

    // Collective. Provides at least `bytes` bytes of memory that the other ranks can read.
    virtual fa_status reserve(size_t bytes) = 0;
    size_t shared_bytes() const { return shared_bytes_; }
    char* shared() const { return shared_; }

    // The start of a call on this rank. Forgets what is left of an aborted call. The stream waits for the previous call, which may have
    // used another stream, because calls share the group's memory.
    virtual fa_status begin(void*) { return FA_OK; }
    // The end of a call that the ranks did not agree on: the next call waits only for what this call has begun.
    virtual void rest(void*) {}
    // Makes an array readable for the other ranks. If ranks cannot read each other's arrays, it is copied to `staging`, a place in the
    // shared memory. The caller must then give the signal kReady.
    virtual fa_status publish(const Rows& array, char* staging, Published* published) = 0;
    bool stages() const { return stages_; }
    // The arrays that all ranks published: [rank * kMostPublished + array].
    virtual void adopt(const Published* published) = 0;

    virtual fa_status signal(int32_t signal, void* stream) = 0;
    // After this, every rank sees the signals that the ranks gave before it. A meeting, if the transport needs one.
    virtual fa_status fence() = 0;
    // Makes the copies in this list of which this rank is the source or the target; each waits for signal `after` of its source. Every rank
    // passes a list that holds at least its own copies, in the same order.
    virtual fa_status move(const std::vector<Copy>& copies, int32_t after) = 0;
    // The same copies for work on `stream`, which continues when all of them are done.
    virtual fa_status fetch(const std::vector<Copy>& copies, int32_t after, void* stream, Hidden) {
        const fa_status status = move(copies, after);
        return status == FA_OK ? arrive(stream) : status;
    }
    void stage_at(char* place) { staging_ = place; }
    // arrive: the stream waits for all copies so far. follow: later copies wait for the stream.
    virtual fa_status arrive(void* stream) = 0;
    virtual fa_status follow(void* stream) = 0;
    // Streams for the work of a call besides the caller's: index 1 .. kStreams - 1. On the CPU NULL.
    virtual void* side_stream(int64_t) { return nullptr; }
    virtual fa_status join(void*, void*) { return FA_OK; }  // the second stream waits for the first
    // The end of a call. Collective. The stream waits until all ranks have read what this rank published.
    virtual fa_status finish(void* stream) = 0;
    // The end of an aborted call. The stream waits for all work of the call, so that memory may be freed in stream order. The host waits
    // too, at most the timeout, because other ranks may free memory that this rank reads. `agreed`: all ranks had begun the call.
    virtual void retreat(void*, bool) {}
    // Waits on the host for everything.
    virtual void drain() {}

protected:
    size_t shared_bytes_ = 0;
    char* shared_ = nullptr;
    char* staging_ = nullptr;
    bool stages_ = false;
};

// Collective.
fa_status make_host_transport(const fa_group_args& args, Meeting& meeting, std::unique_ptr<Transport>* transport);
fa_status make_cuda_transport(const fa_group_args& args, Meeting& meeting, std::unique_ptr<Transport>* transport);
fa_status make_nccl_transport(const fa_group_args& args, Meeting& meeting, std::unique_ptr<Transport>* transport);

}  // namespace fa::distributed
