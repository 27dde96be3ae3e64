#include "distributed/transport/board.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>

#include "api/common/checks.h"
#include "distributed/transport/shared_memory.h"

namespace fa::distributed {
namespace {

using Clock = std::chrono::steady_clock;

// A rank's place on the board. Messages have two slots, used alternately: a rank writes the slot of meeting n + 2 only after all ranks have
// come to meeting n + 1, so all of them have read the messages of meeting n.
struct Place {
    alignas(64) std::atomic<uint64_t> meetings;  // number of meetings that the rank has come to
    std::atomic<uint32_t> reads;                 // 1 while the rank may read the memory of others
    int32_t pid;
    uint32_t bytes[2];  // sizes of the two messages: kinds of meetings differ in size
    alignas(64) char message[2][kMessageBytes];
};

struct Board {
    std::atomic<uint32_t> aborted;  // 0 = no, 1 = the reason is being written, 2 = it is in `reason`
    char reason[256];
    std::atomic<uint32_t> joined;  // ranks that have mapped the board
    int32_t size;
    Place* places() { return reinterpret_cast<Place*>(reinterpret_cast<char*>(this) + kHead); }
    static constexpr size_t kHead = 512;
    static size_t bytes(int size) { return kHead + sizeof(Place) * size_t(size); }
};
static_assert(sizeof(Board) <= Board::kHead, "the places lie behind the board's own fields");
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics work between processes only without locks");

// The board of threads; the last rank to leave frees it.
struct Heap {
    static Board* make(int size) {
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, Board::bytes(size))) return nullptr;
        return static_cast<Board*>(memory);
    }
};

// Whether the process does not exist, or is a zombie that only waits for its parent.
bool has_ended(int32_t pid) {
    if (kill(pid, 0) != 0) return errno == ESRCH;
    char name[64], line[256] = "";
    std::snprintf(name, sizeof name, "/proc/%d/stat", int(pid));
    if (FILE* file = std::fopen(name, "re")) {
        if (!std::fgets(line, sizeof line, file)) *line = 0;
        std::fclose(file);
    }
    const char* state = std::strrchr(line, ')');  // "pid (command) state ..."
    return state && state[1] == ' ' && (state[2] == 'Z' || state[2] == 'X');
}

// The PID namespace of this process: processes of two containers may have the same PID.
uint64_t space_of_pids() {
    char name[64] = "";  // "pid:[4026531836]"
    unsigned long long number = 0;
    const ssize_t length = readlink("/proc/self/ns/pid", name, sizeof name - 1);
    return length > 0 && std::sscanf(name, "pid:[%llu]", &number) == 1 ? uint64_t(number) : 0;
}

class BoardMeeting final : public Meeting {
public:
    // watches: the ranks can check whether each other's processes have ended.
    BoardMeeting(Board* board, SharedMemory memory, const fa_group_args& args, bool watches)
        : board_(board),
          memory_(std::move(memory)),
          rank_(args.rank),
          size_(args.size),
          processes_(args.kind == FA_GROUP_PROCESSES),
          watches_(watches),
          timeout_ms_(args.timeout_ms) {}
    ~BoardMeeting() override {
        if (processes_) return;  // memory_ unmaps the board
        if (board_->joined.fetch_sub(1) == 1) free(board_);
    }

    fa_status meet(const void* mine, void* all, size_t bytes) override {
        FA_RETURN_IF_ERROR(check());
        const uint64_t meeting = ++meetings_;
        Place* places = board_->places();
        std::memcpy(places[rank_].message[meeting % 2], mine, bytes);
        places[rank_].bytes[meeting % 2] = uint32_t(bytes);
        places[rank_].meetings.store(meeting, std::memory_order_release);
        const Clock::time_point begin = Clock::now();
        int64_t looks = 0, naps = 4 * kSpins;  // naps: after so many looks, the rank sleeps between two looks
        for (int r = 0; r < size_; ++r) {
            while (places[r].meetings.load(std::memory_order_acquire) < meeting) {
                if (board_->aborted.load(std::memory_order_acquire)) {
                    // The rank may have come since, found all others there, continued, and left the group: then this meeting took place.
                    if (places[r].meetings.load(std::memory_order_acquire) >= meeting) break;
                    return check();
                }
                if (++looks < kSpins) continue;
                if (looks < naps) {
                    sched_yield();
                    if (looks % 16 == 0 && milliseconds_since(begin) >= 2) naps = looks;  // busy threads take turns of milliseconds
                    continue;
                }
                nap();
                const int64_t waited = milliseconds_since(begin);
                if (watches_ && looks % 64 == 0 && has_ended(places[r].pid) &&
                    places[r].meetings.load(std::memory_order_acquire) < meeting) {
                    char reason[128];
                    std::snprintf(reason, sizeof reason, "rank %d (process %d) has ended", r, int(places[r].pid));
                    abort(reason);
                } else if (waited > timeout_ms_) {
                    char reason[160];
                    std::snprintf(reason, sizeof reason, "rank %d did not come within timeout_ms=%lld, and rank %d stopped waiting", r,
                                  static_cast<long long>(timeout_ms_), rank_);
                    abort(reason);
                }
            }
            if (places[r].bytes[meeting % 2] != bytes) {
                char reason[160];
                std::snprintf(reason, sizeof reason, "ranks %d and %d called different functions: one leaves the group", std::min(r, rank_),
                              std::max(r, rank_));
                abort(reason);
                return check();
            }
            std::memcpy(static_cast<char*>(all) + size_t(r) * bytes, places[r].message[meeting % 2], bytes);
        }
        return FA_OK;
    }

    void abort(const char* reason) override {
        uint32_t none = 0;
        if (!board_->aborted.compare_exchange_strong(none, 1)) return;
        std::snprintf(board_->reason, sizeof board_->reason, "%s", reason);
        board_->aborted.store(2, std::memory_order_release);
    }

    fa_status check() override {
        if (!board_->aborted.load()) return FA_OK;
        for (int i = 0; i < 1000 && board_->aborted.load(std::memory_order_acquire) == 1; ++i) sched_yield();
        const bool stands = board_->aborted.load(std::memory_order_acquire) == 2;
        return fail(FA_RANK_LOST, "the group has ended: %s", stands ? board_->reason : "a rank broke off");
    }

    // Either this rank sees that the group was aborted when it meets the others, or the failing rank sees that this one reads: both write
    // before they look, and the accesses are sequentially consistent.
    void enter() override { board_->places()[rank_].reads.store(1); }
    void leave() override { board_->places()[rank_].reads.store(0, std::memory_order_release); }

    void wait_for_readers() override {
        const Clock::time_point begin = Clock::now();
        for (int r = 0; r < size_; ++r)
            for (int64_t looks = 1; r != rank_ && board_->places()[r].reads.load(); ++looks) {
                if (milliseconds_since(begin) > timeout_ms_) return;
                if (watches_ && looks % 64 == 0 && has_ended(board_->places()[r].pid)) break;
                nap();
            }
    }

private:
    static void nap() {
        const timespec time = {0, 50000};
        nanosleep(&time, nullptr);
    }
    static int64_t milliseconds_since(Clock::time_point begin) {
        return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
    }
    static constexpr int64_t kSpins = 2000;
    Board* board_;
    SharedMemory memory_;
    int rank_, size_;
    bool processes_, watches_;
    int64_t timeout_ms_;
    uint64_t meetings_ = 0;
};

class CallbackMeeting final : public Meeting {
public:
    explicit CallbackMeeting(const fa_group_args& args) : all_gather_(args.all_gather), context_(args.context) {}
    fa_status meet(const void* mine, void* all, size_t bytes) override {
        FA_RETURN_IF_ERROR(check());
        if (const int error = all_gather_(context_, mine, all, bytes)) {
            char reason[96];
            std::snprintf(reason, sizeof reason, "all_gather returned %d", error);
            abort(reason);
        }
        return check();
    }
    void abort(const char* reason) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (reason_.empty()) reason_ = *reason ? reason : "aborted";
    }
    fa_status check() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        return reason_.empty() ? FA_OK : fail(FA_RANK_LOST, "the group has ended: %s", reason_.c_str());
    }

private:
    fa_all_gather all_gather_;
    void* context_;
    std::mutex mutex_;
    std::string reason_;
};

}  // namespace

fa_status meet_on_board(const fa_group_args& args, std::unique_ptr<Meeting>* meeting) {
    struct Invitation {
        Board* board;                // threads
        char name[kSharedNameSize];  // processes
        int32_t status, pid, rank, size;
        uint64_t pids;  // the PID namespace of pid
    } mine{}, *all = nullptr;
    std::vector<Invitation> invitations(static_cast<size_t>(args.size));
    all = invitations.data();
    const bool threads = args.kind == FA_GROUP_THREADS;
    SharedMemory memory;
    Board* board = nullptr;
    mine.pid = int32_t(getpid()), mine.pids = space_of_pids(), mine.rank = args.rank, mine.size = args.size;
    if (args.rank == 0) {
        if (threads) {
            board = Heap::make(args.size);
        } else if (memory.create(Board::bytes(args.size))) {
            board = static_cast<Board*>(memory.data());
            std::snprintf(mine.name, sizeof mine.name, "%s", memory.name());
        }
        if (board) {
            std::memset(static_cast<void*>(board), 0, Board::bytes(args.size));
            board->size = args.size;
        }
        mine.board = board, mine.status = board ? FA_OK : FA_OUT_OF_MEMORY;
    }
    if (const int error = args.all_gather(args.context, &mine, all, sizeof mine))
        return fail(FA_RANK_LOST, "all_gather returned %d: the ranks of the group could not find each other", error);
    fa_status status = FA_OK;
    for (int r = 0; r < args.size && status == FA_OK; ++r) {
        if (all[r].rank != r || all[r].size != args.size)
            status = fail(FA_BAD_ARGUMENT, "all_gather gave rank %d of %d at place %d, where this is rank %d of %d", all[r].rank,
                          all[r].size, r, args.rank, args.size);
        else if (threads && all[r].pid != mine.pid)
            status = fail(FA_BAD_ARGUMENT, "kind=FA_GROUP_THREADS, but rank %d is another process", r);
    }
    if (status == FA_OK && all[0].status != FA_OK) status = fail(FA_OUT_OF_MEMORY, "rank 0 has no host memory to share");
    if (status == FA_OK && args.rank != 0) {
        if (threads) {
            board = all[0].board;
        } else if (memory.open(all[0].name, Board::bytes(args.size))) {
            board = static_cast<Board*>(memory.data());
        } else {
            status = fail(FA_BAD_ARGUMENT, "kind=FA_GROUP_PROCESSES: shared memory %s of rank 0 could not be opened: %s", all[0].name,
                          std::strerror(errno));
        }
    }
    // All ranks map the board before its name is removed.
    int32_t mine_status = status;
    std::vector<int32_t> statuses(static_cast<size_t>(args.size));
    if (board) board->places()[args.rank].pid = mine.pid, board->joined.fetch_add(1);
    if (const int error = args.all_gather(args.context, &mine_status, statuses.data(), sizeof mine_status))
        return fail(FA_RANK_LOST, "all_gather returned %d: the ranks of the group could not find each other", error);
    memory.unlink();
    for (int r = 0; r < args.size && status == FA_OK; ++r)
        if (statuses[size_t(r)] != FA_OK) status = fail(fa_status(statuses[size_t(r)]), "rank %d could not join the group", r);
    if (status != FA_OK) {
        if (threads && board && board->joined.fetch_sub(1) == 1) free(board);
        return status;
    }
    bool watches = !threads && mine.pids != 0;
    for (int r = 0; r < args.size; ++r) watches = watches && all[r].pids == mine.pids;
    meeting->reset(new BoardMeeting(board, std::move(memory), args, watches));
    return FA_OK;
}

std::unique_ptr<Meeting> meet_by_callback(const fa_group_args& args) { return std::unique_ptr<Meeting>(new CallbackMeeting(args)); }

}  // namespace fa::distributed
