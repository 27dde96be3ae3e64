// transport.h: how bytes get from one rank's memory to another's, behind one interface for GPUs of a process, GPUs of several processes,
// NCCL, and the CPU.
//
// The reader copies. A rank publishes arrays before the first meeting of a call; all ranks then know where they lie. Work on a stream and
// copies are ordered by signals: a rank marks a point of its stream, and copies from that rank wait for the mark. On GPUs copies from other
// ranks are made by copy engines on streams of the group, because a copy that is a kernel would wait behind an attention kernel that holds
// every SM. But a copy engine takes 8 us for each message, so small ones are the work of kernels that the reader launches before its
// first attention: of all SMs where nothing runs beside it, else of a few. Copies within a rank's memory are kernels, too. On the CPU
// everything is done when a function returns, and a meeting is all the order there is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "distributed/board.h"
#include "flash_attn_distributed.h"

namespace fa::distributed {

// A mark on the stream of a rank: inputs may be read; the rank has read; its sums over all pieces are there; the result of piece i is
// there, kPiece + i. A signal is given once in a call: a second one could come before another rank waits for the first, and then ranks
// might wait for each other.
enum Signal : int32_t { kReady, kDone, kTotals, kPiece };
constexpr int kMostPieces = 16, kSignals = kPiece + kMostPieces;

// Streams of a call. Pieces take turns on them: the next one's copies run beside the work on a piece, and kernels overlap at their ends.
constexpr int64_t kStreams = 3;

// An array of rows that other ranks read: `rows` rows of `width` bytes, `pitch` bytes apart.
struct Rows {
    void* data;
    int64_t pitch, width, rows;
};

// What the others are told of it.
struct Published {
    uint64_t address;  // in the publishing process; with `shared`, bytes from the start of its shared memory
    int64_t pitch;
    int32_t shared, used;
};
constexpr int kMostPublished = 12;

// `rows` pieces of `width` bytes, from a published array of one rank to the memory of another.
struct Copy {
    int32_t source, target;  // ranks
    int32_t array;           // number of the published array
    int64_t from;            // bytes from its start
    void* to;                // in the target's memory; not read on other ranks
    int64_t to_pitch;
    int64_t width, rows;
};

// Whether other work runs beside a transfer, and how long that takes.
enum class Hidden { kNot, kBehindLittle, kBehindMuch };

class Transport {
public:
    virtual ~Transport() = default;

    // Collective. Memory that the other ranks can read, at least so many bytes.
    virtual fa_status reserve(size_t bytes) = 0;
    size_t shared_bytes() const { return shared_bytes_; }
    char* shared() const { return shared_; }

    // The start of a call on this rank: what is left of one that broke off is forgotten. The stream waits for the call before, which may
    // have been on another stream: calls share the group's memory.
    virtual fa_status begin(void*) { return FA_OK; }
    // The end of a call that the ranks did not agree on: what it has begun is all that the next one waits for.
    virtual void rest(void*) {}
    // Makes an array readable for the others. Where a rank cannot read another's arrays, it is copied to `staging`, a place in the shared
    // memory. The signal kReady has to follow.
    virtual fa_status publish(const Rows& array, char* staging, Published* published) = 0;
    bool stages() const { return stages_; }
    // What all ranks published: [rank * kMostPublished + array].
    virtual void adopt(const Published* published) = 0;

    virtual fa_status signal(int32_t signal, void* stream) = 0;
    // After this, signals that the ranks gave before are seen by all: a meeting, where one is needed.
    virtual fa_status fence() = 0;
    // Copies of this list of which this rank is the source or the target; each waits for `after` of its source. Every rank gives a list
    // that holds at least its own ones, in the same order.
    virtual fa_status move(const std::vector<Copy>& copies, int32_t after) = 0;
    // The same copies for work on `stream`, which goes on when all of them are done.
    virtual fa_status fetch(const std::vector<Copy>& copies, int32_t after, void* stream, Hidden) {
        const fa_status status = move(copies, after);
        return status == FA_OK ? arrive(stream) : status;
    }
    void stage_at(char* place) { staging_ = place; }
    // The stream waits for all copies so far; copies from here on wait for the stream.
    virtual fa_status arrive(void* stream) = 0;
    virtual fa_status follow(void* stream) = 0;
    // Streams for the work of a call besides the caller's: number 1 .. kStreams - 1. On the CPU NULL.
    virtual void* side_stream(int64_t) { return nullptr; }
    virtual fa_status join(void*, void*) { return FA_OK; }  // the second stream waits for the first
    // The end of a call: collective. The stream waits until all ranks have read what this rank published.
    virtual fa_status finish(void* stream) = 0;
    // The end of a call that broke off. The stream waits for all work of the call, so that memory may be given back in its order. The host
    // waits, too, at most the timeout, because other ranks give back what this one reads. `agreed`: the ranks had all begun it.
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
