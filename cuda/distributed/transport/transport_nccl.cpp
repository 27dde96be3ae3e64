// transport_nccl.cpp: transfers by a communicator that the caller provides, for GPUs that cannot read each other's memory. libnccl is found
// at run time. NCCL's copies are kernels, which take SMs or wait for them, so on one host the other transports are faster.
#include <dlfcn.h>

#include <algorithm>

#include "api/common/checks.h"
#include "common/older_glibc.h"
#include "distributed/transport/transport_cuda.h"

FA_FIRST_VERSION(dlopen);
FA_FIRST_VERSION(dlsym);
FA_FIRST_VERSION(dlerror);

namespace fa::distributed {
namespace {

// The part of nccl.h that is used here, unchanged since NCCL 2.7.
struct Nccl {
    using Comm = void*;
    int (*comm_count)(Comm, int*);
    int (*comm_user_rank)(Comm, int*);
    int (*group_start)();
    int (*group_end)();
    int (*send)(const void*, size_t, int type, int peer, Comm, cudaStream_t);
    int (*recv)(void*, size_t, int type, int peer, Comm, cudaStream_t);
    const char* (*get_error_string)(int);
    static constexpr int kSuccess = 0, kInProgress = 7, kUint8 = 1;

    fa_status load(const char* path) {
        void* library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
        if (!library && !path) library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
        if (!library) return fail(FA_UNSUPPORTED, "nccl_library=%s cannot be loaded: %s", path ? path : "NULL (libnccl.so.2)", dlerror());
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        if (find(comm_count, "ncclCommCount") && find(comm_user_rank, "ncclCommUserRank") && find(group_start, "ncclGroupStart") &&
            find(group_end, "ncclGroupEnd") && find(send, "ncclSend") && find(recv, "ncclRecv") &&
            find(get_error_string, "ncclGetErrorString"))
            return FA_OK;
        return fail(FA_UNSUPPORTED, "nccl_library=%s lacks a function of NCCL 2.7", path ? path : "NULL (libnccl.so.2)");
    }
};

class NcclTransport final : public CudaTransport {
public:
    NcclTransport(const fa_group_args& args, Meeting& meeting) : CudaTransport(args, meeting), comm_(args.nccl_comm) {
        alone_ = true, stages_ = false;
    }

    fa_status start(const fa_group_args& args) {
        FA_RETURN_IF_ERROR(nccl_.load(args.nccl_library));
        int size = 0, rank = -1;
        FA_RETURN_IF_ERROR(check("ncclCommCount", nccl_.comm_count(comm_, &size)));
        FA_RETURN_IF_ERROR(check("ncclCommUserRank", nccl_.comm_user_rank(comm_, &rank)));
        if (size != size_ || rank != rank_)
            return fail(FA_BAD_ARGUMENT, "nccl_comm is rank %d of %d, but the group's rank is %d of %d", rank, size, rank_, size_);
        return FA_OK;
    }

    fa_status fence() override { return FA_OK; }  // the order of the stream, and NCCL's, are enough

    fa_status move(const std::vector<Copy>& copies, int32_t after) override {
        char* place = staging_;
        const auto take = [&](int64_t bytes) {
            char* at = place;
            place += (bytes + kAlign - 1) / kAlign * kAlign;
            return at;
        };
        cudaStream_t stream = copies_[kRemote];
        FA_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(copies_[kLocal], events_[after], 0));
        FA_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(stream, events_[after], 0));
        struct Part {
            const Copy* copy;
            char* data;
        };
        std::vector<Part> sends, receives;
        std::vector<RowsCopy> own;
        for (const Copy& c : copies) {
            if (c.width == 0 || c.rows == 0) continue;
            const size_t at = size_t(rank_) * kMostPublished + size_t(c.array);
            if (c.source == rank_ && c.target == rank_) {
                own.push_back(rows_of(c));
            } else if (c.source == rank_) {
                char* from = addresses_[at] + c.from;
                if (c.rows > 1 && published_[at].pitch != c.width) {
                    char* packed = take(c.width * c.rows);
                    FA_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(packed, size_t(c.width), from, size_t(published_[at].pitch), size_t(c.width),
                                                              size_t(c.rows), cudaMemcpyDefault, stream));
                    from = packed;
                }
                sends.push_back({&c, from});
            } else if (c.target == rank_) {
                char* to = static_cast<char*>(c.to);
                if (c.rows > 1 && c.to_pitch != c.width) to = take(c.width * c.rows);
                receives.push_back({&c, to});
            }
        }
        FA_RETURN_IF_ERROR(launch_copies(own, Beside::kNothing, copies_[kLocal]));
        if (!sends.empty() || !receives.empty()) {
            FA_RETURN_IF_ERROR(check("ncclGroupStart", nccl_.group_start()));
            for (const Part& s : sends)
                FA_RETURN_IF_ERROR(check(
                    "ncclSend", nccl_.send(s.data, size_t(s.copy->width * s.copy->rows), Nccl::kUint8, s.copy->target, comm_, stream)));
            for (const Part& r : receives)
                FA_RETURN_IF_ERROR(check(
                    "ncclRecv", nccl_.recv(r.data, size_t(r.copy->width * r.copy->rows), Nccl::kUint8, r.copy->source, comm_, stream)));
            FA_RETURN_IF_ERROR(check("ncclGroupEnd", nccl_.group_end()));
        }
        for (const Part& r : receives)
            if (r.data != r.copy->to)
                FA_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(r.copy->to, size_t(r.copy->to_pitch), r.data, size_t(r.copy->width),
                                                          size_t(r.copy->width), size_t(r.copy->rows), cudaMemcpyDefault, stream));
        return FA_OK;
    }

    fa_status fetch(const std::vector<Copy>& copies, int32_t after, void* stream, Hidden hidden) override {
        return Transport::fetch(copies, after, stream, hidden);
    }
    fa_status finish(void* stream) override {  // by then everything that this rank published has been sent
        FA_RETURN_IF_ERROR(arrive(stream));
        return mark_end(cuda_stream(stream));
    }

private:
    static constexpr int64_t kAlign = 256;
    fa_status check(const char* what, int result) {
        if (result == Nccl::kSuccess || result == Nccl::kInProgress) return FA_OK;
        return fail(FA_CUDA_ERROR, "%s: %s", what, nccl_.get_error_string(result));
    }
    Nccl nccl_;
    Nccl::Comm comm_;
};

}  // namespace

fa_status make_nccl_transport(const fa_group_args& args, Meeting& meeting, std::unique_ptr<Transport>* transport) {
    std::unique_ptr<NcclTransport> made(new NcclTransport(args, meeting));
    const fa_status own = made->start(args);
    if (own != FA_OK) meeting.abort(fa_last_error());
    FA_RETURN_IF_ERROR(own);
    FA_RETURN_IF_ERROR(made->open());
    *transport = std::move(made);
    return FA_OK;
}

}  // namespace fa::distributed
