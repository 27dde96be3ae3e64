/* flash_attn_distributed.h: exact attention of sequences whose tokens lie on several ranks: GPUs of one process or of several, or CPU
 * threads and processes. Plain C, no CUDA types.
 *
 * Every rank holds some tokens of each sequence (its segments, fa_distributed_segments) and calls the same function with its own q, k, v.
 * The result of a rank is its rows of what one device would compute from all tokens:
 *     q   (rows_q, nheads,   headdim)     out (rows_q, nheads, headdim_v)     lse (nheads, rows_q) float32, contiguous
 *     k   (rows_k, nheads_k, headdim)     v   (rows_k, nheads_k, headdim_v)
 * rows_q and rows_k are the sums of the rank's segments. A batch of equal lengths is a packed one.
 *
 * Modes        how the ranks share the work
 *   gather     a rank fetches the keys and values that its queries see. No partial results; a window fetches what it reaches
 *   ulysses    a rank fetches all tokens of some heads, and sends the rows of out back: bitwise the forward pass of one device
 *              (Jacobs et al. 2023, DeepSpeed Ulysses)
 *   ring       a rank walks over the keys of one rank after another, holds two sets of them, and adds up results in float32
 *              (Liu et al. 2023, Ring Attention)
 *
 * Rules beyond those of flash_attn.h
 *   - A function whose text says "collective" is called by every rank of the group, each from a thread (or process) of its own. It waits
 *     on the host until all ranks have called, at most the group's timeout, and compares what they ask for. Its GPU work is asynchronous.
 *   - Where one rank cannot go on, all ranks return a status other than FA_OK, and fa_last_error() names the rank and the reason. Before
 *     any work was enqueued the group stays usable. After a timeout, a lost rank or a CUDA error it does not: every call returns the
 *     reason. A call that breaks off waits until no other rank reads its arrays, at most the timeout once more.
 *   - FA_WORKSPACE_TOO_SMALL comes to all ranks or to none: they make more room, call fa_group_reserve, and call again.
 *   - The same arguments give the same bits on the same number of ranks. (dq of a GPU: with `deterministic`.)
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
    FA_GROUP_PROCESSES = 2, /* processes of one host: memory is shared through CUDA IPC, on the CPU through POSIX shared memory */
    FA_GROUP_NCCL = 3       /* GPUs of any hosts: transfers by an NCCL communicator of the caller */
} fa_group_kind;

/* An all-gather of `bytes` bytes between the hosts of all ranks: all[r * bytes ..] is what rank r gave. Returns 0, or another number when
 * it failed. Ranks make the same calls in the same order. */
typedef int (*fa_all_gather)(void* context, const void* mine, void* all, size_t bytes);

typedef struct fa_group_args {
    size_t struct_size;
    int32_t kind; /* fa_group_kind */
    int32_t rank;
    int32_t size;         /* ranks: 1 .. 1024 */
    int32_t device;       /* fa_device */
    int32_t device_index; /* CUDA: the ordinal of this rank's GPU; ranks may share one */
    int32_t reserved;
    int64_t timeout_ms;       /* how long a collective waits for the other ranks; 0 = 30000 */
    fa_all_gather all_gather; /* called by fa_group_create, and for FA_GROUP_NCCL also by later collectives */
    void* context;            /* its first argument; valid as long as the group */
    void* nccl_comm;          /* ncclComm_t with the same ranks; borrowed. FA_GROUP_NCCL alone */
    const char* nccl_library; /* path of libnccl, or NULL: the one this process has loaded, else libnccl.so.2 */
} fa_group_args;

/* Collective. Errors: FA_BAD_ARGUMENT, FA_UNSUPPORTED (GPUs without access to each other), FA_CUDA_ERROR, FA_RANK_LOST. */
FA_API fa_status fa_group_create(const fa_group_args* args, fa_group** group);

/* Waits for the GPU work of the group's calls, and at most the timeout for the other ranks to come here, then frees everything. NULL is
 * allowed. */
FA_API void fa_group_destroy(fa_group* group);

/* Collective. Makes sure that every rank has at least this much memory that the other ranks can read (the largest `shared_bytes` of the
 * plans to come). It waits for the group's calls on the GPU when the memory has to grow. The one function that allocates device memory. */
FA_API fa_status fa_group_reserve(fa_group* group, size_t shared_bytes);

/* Collective, in the place of any other collective call: this rank cannot make the call that the others make, for instance because a
 * caller of the library found an argument wrong. All ranks return `status`, none of FA_OK and FA_WORKSPACE_TOO_SMALL, the others with the
 * reason. The group stays usable. */
FA_API fa_status fa_group_refuse(fa_group* group, fa_status status, const char* reason);

/* Ends the group from any thread: ranks that wait in a collective return FA_RANK_LOST with this reason, later calls too. */
FA_API void fa_group_abort(fa_group* group, const char* reason);

/* ---- which rank holds what ---- */

typedef enum fa_layout {
    FA_LAYOUT_CONTIGUOUS = 1, /* every sequence of L tokens is cut into P chunks at r L / P, and rank r holds chunk r of each */
    FA_LAYOUT_ZIGZAG = 2, /* into 2 P chunks at i L / (2 P), and rank r holds chunks r and 2 P - 1 - r: equal work under a causal mask */
    FA_LAYOUT_FLAT = 3    /* the T tokens of all sequences together are cut at r T / P, across sequences: fewest, largest transfers */
} fa_layout;              /* divisions round down */

/* Consecutive tokens of one sequence. The rows of a rank are those of its segments, one after another. */
typedef struct fa_segment {
    int32_t sequence;
    int32_t begin, end; /* tokens begin .. end - 1 of the sequence */
} fa_segment;

/* Writes the segments of `rank`, at most `capacity` of them, and how many there are to *count; empty ones are left out. cu_seqlens
 * (batch + 1) is in host memory. segments may be NULL with capacity 0. */
FA_API fa_status fa_distributed_segments(int32_t layout, int32_t rank, int32_t size, int32_t batch, const int32_t* cu_seqlens,
                                         fa_segment* segments, int64_t capacity, int64_t* count);

/* ---- attention ---- */

typedef enum fa_mode { FA_MODE_AUTO = 0, FA_MODE_GATHER = 1, FA_MODE_ULYSSES = 2, FA_MODE_RING = 3 } fa_mode;

typedef struct fa_distributed_args {
    size_t struct_size;
    /* The rank's part of the call: device, dtype, heads and head dims, q, k, v, out, lse, the options, the workspace. total_q and total_k
     * are rows_q and rows_k; batch, seqlen_q, seqlen_k, cu_seqlens and parts are not read: the fields below say them. Bias, mask: row i of
     * sequence b is the rank's i-th row of this sequence; row_stride 0 says that all ranks share one row; columns count all keys of the
     * sequence. Where a rank has no rows, data may be NULL, and a row_stride other than 0 says that there is a bias, or a mask, all the
     * same. */
    const fa_attention_args* attention;
    const int32_t* cu_seqlens_q; /* (batch + 1) in host memory: the whole sequences, the same on every rank */
    const int32_t* cu_seqlens_k; /* NULL = cu_seqlens_q */
    int32_t batch;
    int32_t layout; /* fa_layout */
    int32_t mode;   /* fa_mode */
    int32_t groups; /* pieces of heads whose transfers run behind the work on other pieces; 0 = the library chooses */
} fa_distributed_args;

/* What a call would do on one rank. */
typedef struct fa_distributed_plan {
    size_t struct_size;
    int32_t status; /* that the call would return, but for the workspace */
    int32_t mode;   /* that it would take */
    int32_t groups;
    int32_t calls;          /* launches of attention */
    int64_t rows_q, rows_k; /* of the rank */
    size_t workspace_bytes; /* of attention->workspace */
    size_t shared_bytes;    /* of fa_group_reserve: the most that any rank needs */
    int64_t received_bytes; /* by this rank */
    char why_not[1472];     /* one line for each mode that does not serve the call, "mode: reason" */
} fa_distributed_plan;

/* Host only, and not collective: no group is needed. `kind` is the fa_group_kind. Data pointers may be NULL. */
FA_API fa_status fa_distributed_query(const fa_distributed_args* args, int32_t kind, int32_t rank, int32_t size, fa_distributed_plan* plan);

/* Collective. Errors: every fa_status. */
FA_API fa_status fa_distributed_forward(fa_group* group, const fa_distributed_args* args, void* stream);

/* attention->out and attention->lse are inputs, as in fa_attention_backward. The gradient of the rank's own rows of the bias is
 * added to what dbias holds; an axis of stride 0 is summed over the rows of this rank alone. dsinks is the sum over all ranks, the same
 * bits on each. gradients->forward is not read. */
typedef struct fa_distributed_backward_args {
    size_t struct_size;
    const fa_distributed_args* forward;          /* the arguments of the forward call */
    const fa_attention_backward_args* gradients; /* dout, dq, dk, dv, dbias, dsinks, dlse; accumulate must be 0 */
} fa_distributed_backward_args;

FA_API fa_status fa_distributed_backward_query(const fa_distributed_backward_args* args, int32_t kind, int32_t rank, int32_t size,
                                               fa_distributed_plan* plan);
FA_API fa_status fa_distributed_backward(fa_group* group, const fa_distributed_backward_args* args, void* stream);

/* ---- decode, and merging ---- */

/* One step of inference over a cache whose tokens are spread over the ranks in any way, for instance token t on rank t / page % size.
 * Every rank gives the same q and its own shard of the cache (contiguous, paged, 8-bit); the rank that is to hold the new tokens gives
 * them, the others seqlen_new = 0. Every rank gets the whole result. cache_seqlens counts the rank's own keys. The queries see every key
 * of every rank; with causal, the rank with seqlen_new > 0 hides later new tokens from earlier queries: with several queries one rank
 * appends at least as many tokens. Windows, ALiBi and the rotary
 * embedding need positions in the whole sequence: they are refused. Sinks count once. */
typedef struct fa_distributed_decode_args {
    size_t struct_size;
    const fa_kvcache_args* cache; /* attention->workspace is that of the whole call */
} fa_distributed_decode_args;

FA_API fa_status fa_distributed_decode_query(const fa_distributed_decode_args* args, int32_t kind, int32_t rank, int32_t size,
                                             fa_distributed_plan* plan);
FA_API fa_status fa_distributed_decode(fa_group* group, const fa_distributed_decode_args* args, void* stream);

/* Merges results over disjoint keys, one of each rank, in the order of the ranks: lse = log(sum of exp(lse_r)),
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

#ifdef __cplusplus
}
#endif
#endif /* FLASH_ATTN_DISTRIBUTED_H */
