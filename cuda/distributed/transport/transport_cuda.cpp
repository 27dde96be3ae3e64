// transport_cuda.cpp: GPUs of one host. Threads of a process read each other's memory directly; processes open it, and each other's events,
// through CUDA IPC.
#include "distributed/transport/transport_cuda.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "api/common/checks.h"

namespace fa::distributed {

CudaTransport::CudaTransport(const fa_group_args& args, Meeting& meeting)
    : meeting_(meeting),
      rank_(args.rank),
      size_(args.size),
      device_(args.device_index),
      processes_(args.kind == FA_GROUP_PROCESSES),
      timeout_ms_(args.timeout_ms),
      peers_(static_cast<size_t>(args.size)),
      addresses_(size_t(args.size) * kMostPublished),
      published_(size_t(args.size) * kMostPublished) {
    stages_ = processes_;
}

CudaTransport::~CudaTransport() {
    const CurrentDevice scope(device_);
    if (scope.status() != FA_OK) return;
    drain();
    close_memory();
    for (Peer& peer : peers_)
        if (peer.opened)
            for (cudaEvent_t event : peer.events)
                if (event) cudaEventDestroy(event);
    for (cudaEvent_t event : events_)
        if (event) cudaEventDestroy(event);
    for (cudaEvent_t event : arrived_)
        if (event) cudaEventDestroy(event);
    for (cudaEvent_t event : {fork_, finished_})
        if (event) cudaEventDestroy(event);
    for (cudaStream_t stream : copies_)
        if (stream) cudaStreamDestroy(stream);
    for (cudaStream_t stream : sides_)
        if (stream) cudaStreamDestroy(stream);
    if (shared_) cudaFree(shared_);
    cudaGetLastError();
}

// Closes the memory that other ranks have shared.
void CudaTransport::close_memory() {
    for (Peer& peer : peers_) {
        if (peer.opened && peer.base) cudaIpcCloseMemHandle(peer.base);
        peer.base = nullptr;
    }
}

fa_status CudaTransport::open() {
    const auto make = [&]() -> fa_status {
        const CurrentDevice scope(device_);
        FA_RETURN_IF_ERROR(scope.status());
        for (cudaStream_t& stream : copies_) FA_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        for (cudaStream_t& stream : sides_) FA_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        for (cudaEvent_t& event : arrived_) FA_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        for (cudaEvent_t* event : {&fork_, &finished_}) FA_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
        const unsigned flags = cudaEventDisableTiming | (processes_ ? cudaEventInterprocess : 0u);
        for (cudaEvent_t& event : events_) FA_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, flags));
        return FA_OK;
    };
    struct Answer {
        int32_t status, device;
        char text[256];
        cudaEvent_t events[kSignals];
        cudaIpcEventHandle_t handles[kSignals];
    };
    static_assert(sizeof(Answer) <= kMessageBytes, "an answer is one message");
    Answer mine{};
    mine.status = make(), mine.device = device_;
    if (mine.status == FA_OK && processes_) {
        const CurrentDevice scope(device_);
        for (int i = 0; i < kSignals && mine.status == FA_OK; ++i)
            mine.status = cuda_status("cudaIpcGetEventHandle", cudaIpcGetEventHandle(&mine.handles[i], events_[i]));
    }
    if (mine.status != FA_OK) std::snprintf(mine.text, sizeof mine.text, "%s", fa_last_error());
    std::memcpy(mine.events, events_, sizeof events_);
    std::vector<Answer> all(static_cast<size_t>(size_));
    FA_RETURN_IF_ERROR(meeting_.meet(&mine, all.data(), sizeof mine));
    for (int r = 0; r < size_; ++r)
        if (all[size_t(r)].status != FA_OK)
            return fail(fa_status(all[size_t(r)].status), "rank %d, CUDA device %d: %s", r, all[size_t(r)].device, all[size_t(r)].text);

    // The second half. The ranks exchange its outcome too.
    const auto reach = [&]() -> fa_status {
        const CurrentDevice scope(device_);
        FA_RETURN_IF_ERROR(scope.status());
        for (int r = 0; r < size_; ++r) {
            Peer& peer = peers_[size_t(r)];
            const Answer& answer = all[size_t(r)];
            std::memcpy(peer.events, answer.events, sizeof peer.events);
            if (r == rank_ || alone_) continue;
            if (processes_) {
                peer.opened = true;
                for (int i = 0; i < kSignals; ++i) {
                    peer.events[i] = nullptr;
                    FA_RETURN_IF_CUDA_ERROR(cudaIpcOpenEventHandle(&peer.events[i], answer.handles[i]));
                }
            } else if (answer.device != device_) {
                int can = 0;
                FA_RETURN_IF_CUDA_ERROR(cudaDeviceCanAccessPeer(&can, device_, answer.device));
                if (!can)
                    return fail(FA_UNSUPPORTED, "CUDA device %d cannot read the memory of CUDA device %d: use an NCCL group", device_,
                                answer.device);
                const cudaError_t error = cudaDeviceEnablePeerAccess(answer.device, 0);
                if (error == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
                else FA_RETURN_IF_CUDA_ERROR(error);
            }
        }
        return FA_OK;
    };
    Answer second{};
    second.status = reach(), second.device = device_;
    if (second.status != FA_OK) std::snprintf(second.text, sizeof second.text, "%s", fa_last_error());
    FA_RETURN_IF_ERROR(meeting_.meet(&second, all.data(), sizeof second));
    for (int r = 0; r < size_; ++r)
        if (all[size_t(r)].status != FA_OK) return fail(fa_status(all[size_t(r)].status), "rank %d: %s", r, all[size_t(r)].text);
    return FA_OK;
}

// Collective: memory must not be freed while another rank reads it or has it open.
fa_status CudaTransport::free_shared() {
    FA_RETURN_IF_ERROR(fence());
    close_memory();
    FA_RETURN_IF_ERROR(fence());
    if (shared_) cudaFree(shared_);
    shared_ = nullptr, shared_bytes_ = 0;
    return FA_OK;
}

fa_status CudaTransport::reserve(size_t bytes) {
    struct Memory {
        int32_t status, unused;
        char* address;
        cudaIpcMemHandle_t handle;
    } mine{};
    const CurrentDevice scope(device_);
    drain();
    std::vector<Memory> all(static_cast<size_t>(size_));
    FA_RETURN_IF_ERROR(free_shared());
    void* data = nullptr;
    mine.status = scope.status();
    if (mine.status == FA_OK && cudaMalloc(&data, bytes) != cudaSuccess) {
        cudaGetLastError();
        mine.status = FA_OUT_OF_MEMORY;
    }
    if (mine.status == FA_OK && processes_) mine.status = cuda_status("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&mine.handle, data));
    mine.address = shared_ = static_cast<char*>(data);  // this rank must free it, whatever the meetings return; it is usable once
                                                        // shared_bytes_ is set
    FA_RETURN_IF_ERROR(meeting_.meet(&mine, all.data(), sizeof mine));
    int32_t status = FA_OK;
    for (int r = 0; r < size_ && status == FA_OK; ++r) {
        status = all[size_t(r)].status;
        Peer& peer = peers_[size_t(r)];
        if (status == FA_OK && peer.opened) {
            void* opened = nullptr;
            status =
                cuda_status("cudaIpcOpenMemHandle", cudaIpcOpenMemHandle(&opened, all[size_t(r)].handle, cudaIpcMemLazyEnablePeerAccess));
            peer.base = static_cast<char*>(opened);
        } else if (status == FA_OK) {
            peer.base = all[size_t(r)].address;
        }
    }
    std::vector<int32_t> statuses(static_cast<size_t>(size_));
    FA_RETURN_IF_ERROR(meeting_.meet(&status, statuses.data(), sizeof status));
    for (int r = 0; r < size_; ++r) {
        if (statuses[size_t(r)] == FA_OK) continue;
        FA_RETURN_IF_ERROR(free_shared());
        return fail(fa_status(statuses[size_t(r)]), "rank %d could not share %zu bytes of GPU memory", r, bytes);
    }
    shared_bytes_ = bytes;
    return FA_OK;
}

// A capture can neither wait for an event from outside nor record one for others.
static bool captures(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
    const bool known = cudaStreamIsCapturing(stream, &status) == cudaSuccess;
    if (!known) cudaGetLastError();
    return !known || status != cudaStreamCaptureStatusNone;
}

fa_status CudaTransport::begin(void* stream) {
    staged_.clear();
    if (captures(cuda_stream(stream))) return FA_OK;
    return cuda_status("cudaStreamWaitEvent", cudaStreamWaitEvent(cuda_stream(stream), finished_, 0));
}

fa_status CudaTransport::mark_end(cudaStream_t stream) {
    if (captures(stream)) return FA_OK;
    return cuda_status("cudaEventRecord", cudaEventRecord(finished_, stream));
}

void CudaTransport::rest(void* stream) {
    if (!captures(cuda_stream(stream)) && cudaEventRecord(finished_, cuda_stream(stream)) != cudaSuccess) cudaGetLastError();
}

fa_status CudaTransport::publish(const Rows& array, char* staging, Published* published) {
    *published = {uint64_t(reinterpret_cast<uintptr_t>(array.data)), array.pitch, 0, 1};
    if (!stages_) return FA_OK;
    char* data = static_cast<char*>(array.data);
    if (data >= shared_ && data < shared_ + shared_bytes_) {
        *published = {uint64_t(data - shared_), array.pitch, 1, 1};
        return FA_OK;
    }
    *published = {uint64_t(staging - shared_), array.width, 1, 1};
    staged_.push_back({staging, data, array.width, array.pitch, array.width, array.rows});
    return FA_OK;
}

void CudaTransport::adopt(const Published* published) {
    for (int r = 0; r < size_; ++r)
        for (int i = 0; i < kMostPublished; ++i) {
            const size_t at = size_t(r) * kMostPublished + size_t(i);
            published_[at] = published[at];
            addresses_[at] = published[at].shared ? peers_[size_t(r)].base + published[at].address
                                                  : reinterpret_cast<char*>(uintptr_t(published[at].address));
        }
}

fa_status CudaTransport::signal(int32_t signal, void* stream) {
    if (signal == kReady && !staged_.empty()) {
        const fa_status status = launch_copies(staged_, Beside::kNothing, stream);
        staged_.clear();
        FA_RETURN_IF_ERROR(status);
    }
    return cuda_status("cudaEventRecord", cudaEventRecord(events_[signal], cuda_stream(stream)));
}

fa_status CudaTransport::fence() {
    const char mine = 0;
    std::vector<char> all(static_cast<size_t>(size_));
    return meeting_.meet(&mine, all.data(), 1);
}

// The addresses of a copy. Its source is this rank, or one whose memory is open here.
RowsCopy CudaTransport::rows_of(const Copy& c) const {
    const size_t at = size_t(c.source) * kMostPublished + size_t(c.array);
    return {static_cast<char*>(c.to), addresses_[at] + c.from, c.to_pitch, published_[at].pitch, c.width, c.rows};
}

// The copies to this rank, those from the next rank first, so that not all ranks read the same rank at once.
std::vector<const Copy*> CudaTransport::to_this_rank(const std::vector<Copy>& copies) const {
    std::vector<const Copy*> found;
    for (const Copy& c : copies)
        if (c.target == rank_ && c.width && c.rows) found.push_back(&c);
    const auto turn = [&](const Copy* c) { return (c->source - rank_ + size_) % size_; };
    std::stable_sort(found.begin(), found.end(), [&](const Copy* a, const Copy* b) { return turn(a) < turn(b); });
    return found;
}

fa_status CudaTransport::wait_for(const std::vector<const Copy*>& copies, int32_t after, cudaStream_t stream) {
    int last = -1;
    for (const Copy* c : copies) {
        if (c->source == last) continue;
        last = c->source;
        FA_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(stream, peers_[size_t(last)].events[after], 0));
    }
    return FA_OK;
}

fa_status CudaTransport::by_engine(const std::vector<const Copy*>& copies) {
    for (const Copy* each : copies) {
        const RowsCopy c = rows_of(*each);
        if (c.rows == 1 || (c.from_pitch == c.width && c.to_pitch == c.width))
            FA_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(c.to, c.from, size_t(c.width * c.rows), cudaMemcpyDefault, copies_[kRemote]));
        else
            FA_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(c.to, size_t(c.to_pitch), c.from, size_t(c.from_pitch), size_t(c.width),
                                                      size_t(c.rows), cudaMemcpyDefault, copies_[kRemote]));
    }
    return FA_OK;
}

fa_status CudaTransport::move(const std::vector<Copy>& copies, int32_t after) {
    std::vector<const Copy*> others;
    std::vector<RowsCopy> own;
    for (const Copy* c : to_this_rank(copies)) {
        if (c->source == rank_) own.push_back(rows_of(*c));
        else others.push_back(c);
    }
    if (!own.empty()) FA_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(copies_[kLocal], events_[after], 0));
    FA_RETURN_IF_ERROR(wait_for(others, after, copies_[kRemote]));
    FA_RETURN_IF_ERROR(by_engine(others));
    return launch_copies(own, Beside::kNothing, copies_[kLocal]);
}

fa_status CudaTransport::fetch(const std::vector<Copy>& copies, int32_t after, void* stream, Hidden hidden) {
    // A message costs a copy engine 8 us in addition to its bytes: 28 messages of 256 KB, 1 MB, 1.75 MB and 7 MB each move at 30, 91, 143
    // and 276 GB/s, and by a kernel at 229, 301, 316 and 332 GB/s (H100; docs/context_parallel/peer_copies.cu). But the kernel takes SMs
    // from concurrent attention.
    const int64_t large = hidden == Hidden::kNot ? INT64_MAX : hidden == Hidden::kBehindLittle ? 2 << 20 : 1 << 19;
    std::vector<const Copy*> by_kernel, others;
    for (const Copy* c : to_this_rank(copies)) (c->source != rank_ && c->width * c->rows >= large ? others : by_kernel).push_back(c);
    FA_RETURN_IF_ERROR(wait_for(by_kernel, after, cuda_stream(stream)));
    std::vector<RowsCopy> rows;
    for (const Copy* c : by_kernel) rows.push_back(rows_of(*c));
    FA_RETURN_IF_ERROR(launch_copies(rows, hidden == Hidden::kNot ? Beside::kNothing : Beside::kAttention, stream));
    if (others.empty()) return FA_OK;
    FA_RETURN_IF_ERROR(wait_for(others, after, copies_[kRemote]));
    FA_RETURN_IF_ERROR(by_engine(others));
    return arrive(stream);
}

fa_status CudaTransport::arrive(void* stream) {
    for (int i = 0; i < kCopyStreams; ++i) {
        FA_RETURN_IF_CUDA_ERROR(cudaEventRecord(arrived_[i], copies_[i]));
        FA_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(cuda_stream(stream), arrived_[i], 0));
    }
    return FA_OK;
}

fa_status CudaTransport::follow(void* stream) {
    FA_RETURN_IF_CUDA_ERROR(cudaEventRecord(fork_, cuda_stream(stream)));
    for (cudaStream_t copies : copies_) FA_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(copies, fork_, 0));
    return FA_OK;
}

fa_status CudaTransport::join(void* from, void* to) {
    FA_RETURN_IF_CUDA_ERROR(cudaEventRecord(fork_, cuda_stream(from)));
    return cuda_status("cudaStreamWaitEvent", cudaStreamWaitEvent(cuda_stream(to), fork_, 0));
}

fa_status CudaTransport::finish(void* stream) {
    FA_RETURN_IF_ERROR(arrive(stream));
    FA_RETURN_IF_ERROR(signal(kDone, stream));
    FA_RETURN_IF_ERROR(fence());
    for (int r = 0; r < size_; ++r)
        if (r != rank_) FA_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(cuda_stream(stream), peers_[size_t(r)].events[kDone], 0));
    return mark_end(cuda_stream(stream));
}

void CudaTransport::retreat(void* stream, bool agreed) {
    const auto join = [&](cudaStream_t from) {
        if (cudaEventRecord(fork_, from) == cudaSuccess) cudaStreamWaitEvent(cuda_stream(stream), fork_, 0);
    };
    for (cudaStream_t side : sides_) join(side);
    for (cudaStream_t copies : copies_) join(copies);
    // For a rank that saw all others come to the last meeting, the call took place: its host has continued, and its GPU may still read.
    for (int r = 0; r < size_ && agreed && !processes_ && !alone_; ++r)
        if (r != rank_) cudaStreamWaitEvent(cuda_stream(stream), peers_[size_t(r)].events[kDone], 0);
    const bool recorded = cudaEventRecord(finished_, cuda_stream(stream)) == cudaSuccess;
    const auto begin = std::chrono::steady_clock::now();
    const auto most = std::chrono::milliseconds(timeout_ms_);
    while (recorded && !alone_ && cudaEventQuery(finished_) == cudaErrorNotReady && std::chrono::steady_clock::now() - begin < most)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    cudaGetLastError();
}

void CudaTransport::drain() {
    const CurrentDevice scope(device_);
    for (cudaStream_t stream : copies_)
        if (stream) cudaStreamSynchronize(stream);
    for (cudaStream_t stream : sides_)
        if (stream) cudaStreamSynchronize(stream);
    if (finished_) cudaEventSynchronize(finished_);
}

fa_status make_cuda_transport(const fa_group_args& args, Meeting& meeting, std::unique_ptr<Transport>* transport) {
    std::unique_ptr<CudaTransport> made(new CudaTransport(args, meeting));
    FA_RETURN_IF_ERROR(made->open());
    *transport = std::move(made);
    return FA_OK;
}

}  // namespace fa::distributed
