// transport_cuda.h: the common part for GPUs of one host, whether ranks are threads or processes; NCCL builds on it.
#pragma once

#include <cuda_runtime_api.h>

#include "api/common/device.h"
#include "api/common/status.h"
#include "distributed/rows.h"
#include "distributed/transport/transport.h"

namespace fa::distributed {

inline fa_status cuda_status(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return FA_OK;
    cudaGetLastError();
    return fail(FA_CUDA_ERROR, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}
#define FA_RETURN_IF_CUDA_ERROR(call) FA_RETURN_IF_ERROR(cuda_status(#call, call))

inline cudaStream_t cuda_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

class CudaTransport : public Transport {
public:
    CudaTransport(const fa_group_args& args, Meeting& meeting);
    ~CudaTransport() override;
    fa_status open();  // collective: streams, events, access to the peers

    fa_status reserve(size_t bytes) override;
    fa_status begin(void* stream) override;
    void rest(void* stream) override;
    fa_status publish(const Rows& array, char* staging, Published* published) override;
    void adopt(const Published* published) override;
    fa_status signal(int32_t signal, void* stream) override;
    fa_status fence() override;
    fa_status move(const std::vector<Copy>& copies, int32_t after) override;
    fa_status fetch(const std::vector<Copy>& copies, int32_t after, void* stream, Hidden hidden) override;
    fa_status arrive(void* stream) override;
    fa_status follow(void* stream) override;
    void* side_stream(int64_t i) override { return sides_[i - 1]; }
    fa_status join(void* from, void* to) override;
    fa_status finish(void* stream) override;
    void retreat(void* stream, bool agreed) override;
    void drain() override;

protected:
    // Two of the group's streams: copies from other ranks, and copies within this rank's memory.
    enum CopyStream { kRemote, kLocal, kCopyStreams };
    struct Peer {
        char* base = nullptr;  // the peer's shared memory
        bool opened = false;   // base and the events came through IPC and must be closed
        cudaEvent_t events[kSignals] = {};
    };
    fa_status exchange_events();
    fa_status share(size_t bytes);
    fa_status free_shared();
    fa_status mark_end(cudaStream_t stream);
    void close_memory();
    std::vector<const Copy*> to_this_rank(const std::vector<Copy>& copies) const;
    RowsCopy rows_of(const Copy& c) const;
    fa_status wait_for(const std::vector<const Copy*>& copies, int32_t after, cudaStream_t stream);
    fa_status by_engine(const std::vector<const Copy*>& copies);

    Meeting& meeting_;
    int rank_, size_, device_;
    bool processes_, alone_ = false;  // alone: reads no peer's memory (NCCL)
    int64_t timeout_ms_;
    std::vector<Peer> peers_;
    std::vector<char*> addresses_;
    std::vector<Published> published_;
    std::vector<RowsCopy> staged_;  // copies to this rank's shared memory that must be made before it signals kReady
    cudaStream_t copies_[kCopyStreams] = {};
    cudaStream_t sides_[kStreams - 1] = {};
    cudaEvent_t events_[kSignals] = {};  // this rank's marks
    cudaEvent_t arrived_[kCopyStreams] = {}, fork_ = nullptr;
    cudaEvent_t finished_ = nullptr;  // the end of the last call on the caller's stream: all ranks have read. Not set by a captured call
};

}  // namespace fa::distributed
