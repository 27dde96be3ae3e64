// transport_host.cpp: ranks on the CPU. Threads read each other's arrays in place; processes first copy theirs to shared memory.
#include <cstring>
#include <vector>

#include "api/common/checks.h"
#include "distributed/transport/shared_memory.h"
#include "distributed/transport/transport.h"

namespace fa::distributed {
namespace {

void copy_rows(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t rows) {
    if (to_pitch == width && from_pitch == width) {
        std::memcpy(to, from, size_t(width * rows));
        return;
    }
    for (int64_t i = 0; i < rows; ++i)
        std::memcpy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, size_t(width));
}

class HostTransport final : public Transport {
public:
    HostTransport(const fa_group_args& args, Meeting& meeting)
        : meeting_(meeting),
          rank_(args.rank),
          size_(args.size),
          processes_(args.kind == FA_GROUP_PROCESSES),
          peers_(static_cast<size_t>(args.size)),
          addresses_(size_t(args.size) * kMostPublished),
          published_(size_t(args.size) * kMostPublished) {
        stages_ = processes_;
    }

    fa_status reserve(size_t bytes) override {
        struct Memory {
            char* address;
            char name[kSharedNameSize];
            int32_t status;
        } mine{};
        std::vector<Memory> all(static_cast<size_t>(size_));
        SharedMemory memory;
        shared_ = nullptr, shared_bytes_ = 0;
        if (processes_) {
            mine.status = memory.create(bytes) ? FA_OK : FA_OUT_OF_MEMORY;
            std::snprintf(mine.name, sizeof mine.name, "%s", memory.name());
            mine.address = static_cast<char*>(memory.data());
        } else {
            try {
                heap_.reset(new char[bytes]);
                mine.address = heap_.get();
            } catch (const std::bad_alloc&) {
                mine.status = FA_OUT_OF_MEMORY;
            }
        }
        FA_RETURN_IF_ERROR(meeting_.meet(&mine, all.data(), sizeof mine));
        int32_t status = FA_OK;
        std::vector<SharedMemory> peers(static_cast<size_t>(size_));
        for (int r = 0; r < size_ && status == FA_OK; ++r) {
            Peer& peer = peers_[size_t(r)];
            status = all[size_t(r)].status;
            peer.base = all[size_t(r)].address;
            if (status == FA_OK && processes_ && r != rank_) {
                if (!peers[size_t(r)].open(all[size_t(r)].name, bytes)) status = FA_OUT_OF_MEMORY;
                peer.base = static_cast<char*>(peers[size_t(r)].data());
            }
        }
        std::vector<int32_t> statuses(static_cast<size_t>(size_));
        FA_RETURN_IF_ERROR(meeting_.meet(&status, statuses.data(), sizeof status));
        memory.unlink();
        for (int r = 0; r < size_; ++r)
            if (statuses[size_t(r)] != FA_OK) {
                heap_.reset();
                return fail(FA_OUT_OF_MEMORY, "rank %d has no host memory left to share %zu bytes", r, bytes);
            }
        for (int r = 0; r < size_; ++r) std::swap(peers_[size_t(r)].memory, peers[size_t(r)]);
        std::swap(own_, memory);
        shared_ = mine.address, shared_bytes_ = bytes;
        return FA_OK;
    }

    fa_status publish(const Rows& array, char* staging, Published* published) override {
        *published = {uint64_t(reinterpret_cast<uintptr_t>(array.data)), array.pitch, 0, 1};
        if (!processes_) return FA_OK;
        const bool there = static_cast<char*>(array.data) >= shared_ && static_cast<char*>(array.data) < shared_ + shared_bytes_;
        if (!there) {
            copy_rows(staging, array.width, array.data, array.pitch, array.width, array.rows);
            *published = {uint64_t(staging - shared_), array.width, 1, 1};
        } else {
            *published = {uint64_t(static_cast<char*>(array.data) - shared_), array.pitch, 1, 1};
        }
        return FA_OK;
    }

    void adopt(const Published* published) override {
        for (int r = 0; r < size_; ++r)
            for (int i = 0; i < kMostPublished; ++i) {
                const size_t at = size_t(r) * kMostPublished + size_t(i);
                published_[at] = published[at];
                addresses_[at] = published[at].shared ? peers_[size_t(r)].base + published[at].address
                                                      : reinterpret_cast<char*>(uintptr_t(published[at].address));
            }
    }

    fa_status signal(int32_t, void*) override { return FA_OK; }
    fa_status fence() override {
        const char mine = 0;
        std::vector<char> all(static_cast<size_t>(size_));
        return meeting_.meet(&mine, all.data(), 1);
    }
    fa_status move(const std::vector<Copy>& copies, int32_t) override {
        for (const Copy& c : copies) {
            if (c.target != rank_) continue;
            const size_t at = size_t(c.source) * kMostPublished + size_t(c.array);
            copy_rows(c.to, c.to_pitch, addresses_[at] + c.from, published_[at].pitch, c.width, c.rows);
        }
        return FA_OK;
    }
    fa_status arrive(void*) override { return FA_OK; }
    fa_status follow(void*) override { return FA_OK; }
    fa_status finish(void*) override { return fence(); }

private:
    struct Peer {
        char* base = nullptr;
        SharedMemory memory;
    };
    Meeting& meeting_;
    int rank_, size_;
    bool processes_;
    std::vector<Peer> peers_;
    std::vector<char*> addresses_;
    std::vector<Published> published_;
    SharedMemory own_;
    std::unique_ptr<char[]> heap_;
};

}  // namespace

fa_status make_host_transport(const fa_group_args& args, Meeting& meeting, std::unique_ptr<Transport>* transport) {
    transport->reset(new HostTransport(args, meeting));
    return FA_OK;
}

}  // namespace fa::distributed
