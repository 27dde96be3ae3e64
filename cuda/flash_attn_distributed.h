/* flash_attn_distributed.h: exact attention of sequences whose tokens are spread over several ranks. A rank is a GPU (of one or several
 * processes), or a CPU thread or process. Plain C, no CUDA types.
 *
 * Every rank holds some tokens of each sequence (its segments, see fa_distributed_segments) and calls the same function with its own q, k,
 * v. Each rank receives its rows of the result that one device would compute from all tokens:
 *     q   (rows_q, nheads,   headdim)     out (rows_q, nheads, headdim_v)     lse (nheads, rows_q) float32, contiguous
 *     k   (rows_k, nheads_k, headdim)     v   (rows_k, nheads_k, headdim_v)
 * rows_q and rows_k are the total lengths of the rank's segments. A batch of equal lengths is passed as a packed (varlen) batch.
 *
 * Modes        how the ranks share the work
 *   gather     a rank fetches the keys and values that its queries see, and nothing outside a window. No partial results
 *   ulysses    a rank fetches all tokens of some heads and sends the rows of out back. The forward pass is bitwise that of one device
 *              (Jacobs et al. 2023, DeepSpeed Ulysses)
 *
 * Rules beyond those of flash_attn.h
 *   - A function marked "collective" must be called by every rank of the group, each from its own thread (or process). It waits on the
 *     host until all ranks have called, at most the group's timeout, and compares their arguments. Its GPU work is asynchronous.
 *   - If one rank cannot go on, all ranks return an error, and fa_last_error() names the rank and the reason. If no work had been
 *     enqueued, the group stays usable. After a timeout, a lost rank or a CUDA error it is unusable: every call returns the reason. An
 *     aborted call waits until no other rank reads its arrays, for at most the timeout once more.
 *   - FA_WORKSPACE_TOO_SMALL is returned to all ranks or to none: they provide more memory, call fa_group_reserve, and call again.
 *   - Equal arguments give equal bits on the same number of ranks. (dq on a GPU: only with `deterministic`.)
 */
#ifndef FLASH_ATTN_DISTRIBUTED_H
#define FLASH_ATTN_DISTRIBUTED_H

#include "flash_attn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- groups ---- */

typedef struct fa_group fa_group;

typedef enum fa_group_kind {
    FA_GROUP_THREADS = 1,   /* the ranks are threads of one process: they read each other's memory */
    FA_GROUP_PROCESSES = 2, /* the ranks are processes of one host. Memory is shared by CUDA IPC, on the CPU by POSIX shared memory */
    FA_GROUP_NCCL = 3       /* GPUs of any hosts: the caller's NCCL communicator transfers the data */
} fa_group_kind;

/* An all-gather of `bytes` bytes of host memory over all ranks: all[r * bytes ..] receives the bytes of rank r. Returns 0, or another
 * number on failure. All ranks make the same calls in the same order. */
typedef int (*fa_all_gather)(void* context, const void* mine, void* all, size_t bytes);

typedef struct fa_group_args {
    size_t struct_size;
    int32_t kind; /* fa_group_kind */
    int32_t rank;
    int32_t size;         /* number of ranks: 1 .. 1024 */
    int32_t device;       /* fa_device */
    int32_t device_index; /* CUDA: the ordinal of this rank's GPU; ranks may share one */
    int32_t reserved;
    int64_t timeout_ms;       /* how long a collective waits for the other ranks; 0 = 30000 */
    fa_all_gather all_gather; /* called by fa_group_create, and for FA_GROUP_NCCL also by later collectives */
    void* context;            /* passed to all_gather as its first argument; valid as long as the group */
    void* nccl_comm;          /* FA_GROUP_NCCL only: an ncclComm_t with the same ranks, borrowed */
    const char* nccl_library; /* path of libnccl, or NULL: the one this process has loaded, else libnccl.so.2 */
} fa_group_args;

/* Collective. Errors: FA_BAD_ARGUMENT, FA_UNSUPPORTED (GPUs without access to each other), FA_CUDA_ERROR, FA_OUT_OF_MEMORY, or
 * FA_RANK_LOST (no group could be formed). */
FA_API fa_status fa_group_create(const fa_group_args* args, fa_group** group);

/* Waits for the GPU work of the group's calls, and for the other ranks to arrive here (at most the timeout); then frees everything.
 * NULL is allowed. */
FA_API void fa_group_destroy(fa_group* group);

/* Collective. Makes sure that every rank has at least this much memory readable by the other ranks: pass the largest
 * `shared_bytes` of the coming plans. When the memory has to grow, it waits for the group's calls on the GPU. The only function
 * that allocates device memory. */
FA_API fa_status fa_group_reserve(fa_group* group, size_t shared_bytes);

/* Collective; replaces whatever collective call the other ranks make, because this rank cannot make it (for instance because a wrapper
 * of the library found an invalid argument). All ranks return `status`, which must be neither FA_OK nor FA_WORKSPACE_TOO_SMALL; the
 * other ranks' error text is this reason. The group stays usable. */
FA_API fa_status fa_group_refuse(fa_group* group, fa_status status, const char* reason);

/* Ends the group from any thread: ranks that wait in a collective, and all later calls, return FA_RANK_LOST with this reason. */
FA_API void fa_group_abort(fa_group* group, const char* reason);

/* ---- which rank holds which tokens ---- */

typedef enum fa_layout {
    FA_LAYOUT_CONTIGUOUS = 1, /* each sequence of L tokens is cut into P chunks at r L / P; rank r holds chunk r */
    FA_LAYOUT_ZIGZAG = 2,     /* 2 P chunks, cut at i L / (2 P); rank r holds chunks r and 2 P - 1 - r: equal work under a causal mask */
    FA_LAYOUT_FLAT = 3 /* the T tokens of all sequences together are cut at r T / P, also inside sequences: fewest, largest transfers */
} fa_layout;           /* divisions round down */

/* Consecutive tokens of one sequence. A rank's rows are those of its segments in order. */
typedef struct fa_segment {
    int32_t sequence;
    int32_t begin, end; /* tokens begin .. end - 1 of the sequence */
} fa_segment;

/* Writes at most `capacity` segments of `rank` to segments, and their total number to *count. Empty segments are left out. cu_seqlens
 * (batch + 1) is in host memory. segments may be NULL with capacity 0. */
FA_API fa_status fa_distributed_segments(int32_t layout, int32_t rank, int32_t size, int32_t batch, const int32_t* cu_seqlens,
                                         fa_segment* segments, int64_t capacity, int64_t* count);

/* ---- attention ---- */

typedef enum fa_mode { FA_MODE_AUTO = 0, FA_MODE_GATHER = 1, FA_MODE_ULYSSES = 2 } fa_mode;

typedef struct fa_distributed_args {
    size_t struct_size;
    /* The rank's part of the call: device, dtype, heads and head dims, q, k, v, out, lse, the options, the workspace. total_q and
     * total_k are rows_q and rows_k. batch, seqlen_q, seqlen_k, cu_seqlens and parts are not read; the fields below replace them. Bias
     * and mask: row i of sequence b is the rank's i-th row of this sequence, and columns count all keys of the sequence. row_stride 0
     * means that all ranks share one row. A rank without rows may pass data = NULL; a row_stride other than 0 then says that the call
     * has a bias or mask. */
    const fa_attention_args* attention;
    const int32_t* cu_seqlens_q; /* (batch + 1) in host memory: the whole sequences, the same on every rank */
    const int32_t* cu_seqlens_k; /* NULL = cu_seqlens_q */
    int32_t batch;
    int32_t layout; /* fa_layout */
    int32_t mode;   /* fa_mode */
    int32_t groups; /* number of head groups: the transfers of one group overlap the attention of others; 0 = the library chooses */
} fa_distributed_args;

/* The answer of a query: what a call would do on one rank. */
typedef struct fa_distributed_plan {
    size_t struct_size;
    int32_t status; /* the status that the call would return if the workspace is large enough */
    int32_t mode;   /* the mode that the call would use */
    int32_t groups;
    int32_t calls;          /* launches of attention */
    int64_t rows_q, rows_k; /* of this rank */
    size_t workspace_bytes; /* size that attention->workspace needs */
    size_t shared_bytes;    /* argument for fa_group_reserve: the most that any rank needs */
    int64_t received_bytes; /* bytes that this rank receives */
    char why_not[1472];     /* "mode: reason", one line for each mode that cannot serve the call */
} fa_distributed_plan;

/* Host only, and not collective: no group is needed. `kind` is the fa_group_kind. Data pointers may be NULL. */
FA_API fa_status fa_distributed_query(const fa_distributed_args* args, int32_t kind, int32_t rank, int32_t size, fa_distributed_plan* plan);

/* Collective. Errors: every fa_status. */
FA_API fa_status fa_distributed_forward(fa_group* group, const fa_distributed_args* args, void* stream);

/* attention->out and attention->lse are inputs, as in fa_attention_backward. dbias gets the gradient of this rank's rows, added to its
 * contents; an axis of stride 0 is summed over this rank's rows only. dsinks is the sum over all ranks, with the same bits on each.
 * gradients->forward is not read. */
typedef struct fa_distributed_backward_args {
    size_t struct_size;
    const fa_distributed_args* forward;          /* the arguments of the forward call */
    const fa_attention_backward_args* gradients; /* dout, dq, dk, dv, dbias, dsinks, dlse; accumulate must be 0 */
} fa_distributed_backward_args;

FA_API fa_status fa_distributed_backward_query(const fa_distributed_backward_args* args, int32_t kind, int32_t rank, int32_t size,
                                               fa_distributed_plan* plan);
FA_API fa_status fa_distributed_backward(fa_group* group, const fa_distributed_backward_args* args, void* stream);

/* ---- decoding and merging ---- */

/* One step of inference over a cache whose tokens are spread over the ranks in any way, for instance token t on rank t / page % size.
 * Every rank passes the same q and its own shard of the cache (contiguous, paged, 8-bit). The rank that stores the new tokens passes
 * them; the others pass seqlen_new = 0. cache_seqlens counts the rank's own keys. Every rank gets the whole result: attention over the
 * keys of all ranks. With causal and more than one query, exactly one rank appends, at least as many tokens as there are queries;
 * earlier queries do not see later new tokens. Windows, ALiBi and the rotary embedding need positions in the whole sequence and are
 * refused. Sinks count once. */
typedef struct fa_distributed_decode_args {
    size_t struct_size;
    const fa_kvcache_args* cache; /* attention->workspace serves the whole call */
} fa_distributed_decode_args;

FA_API fa_status fa_distributed_decode_query(const fa_distributed_decode_args* args, int32_t kind, int32_t rank, int32_t size,
                                             fa_distributed_plan* plan);
FA_API fa_status fa_distributed_decode(fa_group* group, const fa_distributed_decode_args* args, void* stream);

/* Merges results over disjoint sets of keys, one result per rank, in rank order: lse = log(sum of exp(lse_r)),
 * out = sum of exp(lse_r - lse) out_r, added up in float32 and rounded once. Every rank gets the whole result, in place. */
typedef struct fa_distributed_merge_args {
    size_t struct_size;
    int32_t device; /* fa_device */
    int32_t dtype;  /* fa_dtype of out: float32, float16 or bfloat16 */
    int32_t nheads;
    int32_t headdim_v;
    int64_t rows;
    fa_tensor out; /* (rows, nheads, headdim_v) */
    float* lse;    /* (nheads, rows), contiguous */
    void* workspace;
    size_t workspace_bytes;
} fa_distributed_merge_args;

FA_API fa_status fa_distributed_merge_query(const fa_distributed_merge_args* args, int32_t kind, int32_t rank, int32_t size,
                                            fa_distributed_plan* plan);
FA_API fa_status fa_distributed_merge(fa_group* group, const fa_distributed_merge_args* args, void* stream);

/* ---- calls as data ---- */

/* The struct of an fa_call whose operation is FA_OP_DISTRIBUTED_*: the arguments of its function, and those of its query. */
typedef struct fa_group_call {
    size_t struct_size;
    fa_group* group;  /* not read by a query */
    const void* args; /* the struct of the function: fa_distributed_args, ... */
    int32_t kind;     /* this and the two below: read by a query alone */
    int32_t rank;
    int32_t size;
    int32_t reserved;
} fa_group_call;

#ifdef __cplusplus
}
#endif
#endif /* FLASH_ATTN_DISTRIBUTED_H */
