/* experiments.h: the ladder's experiments, kernels that are not in the library because they are slower or exist to show something.
 *
 * Built from a checkout alone, with -DFLASH_ATTN_EXPERIMENTS=ON, into libflash_attn_experiments.so beside the library. A variant is one
 * kernel for one head dim. It differs from a kernel of the library in what `about` says. The rules of flash_attn.h hold here too: structs
 * start with their size, a call returns a status, work goes to `stream`, and nothing is allocated.
 *
 * Every variant takes bfloat16, plain calls: dense q, k, v of one head dim, full or causal, any softmax_scale above 0, grouped heads, and
 * rows of whole 16 bytes. A call that a variant does not serve gets FA_UNSUPPORTED, and fa_variant_last_error says why.
 */
#ifndef FLASH_ATTN_EXPERIMENTS_H
#define FLASH_ATTN_EXPERIMENTS_H

#include "flash_attn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fa_variant {
    size_t struct_size;
    const char* name;       /* unique */
    const char* experiment; /* "block-size", "traffic", "optimisation", "online-softmax", "trace" */
    const char* kernel;     /* the kernel of the library that it is a variant of */
    const char* about;      /* in a line: what differs; in a climb, from the step before */
    int32_t order;          /* place in its experiment, from 1; steps of a climb go upwards */
    int32_t backward;       /* 0 forward, 1 backward */
    /* The numbers of a step that is a kernel of the library itself are 0: the library chooses them for each call. */
    int32_t tile_m, tile_n; /* query rows and keys of a tile */
    int32_t stages;         /* tiles of keys in shared memory at a time; backward: of queries */
    int32_t threads;        /* of a block */
    int32_t registers;      /* of a thread. This, spill_bytes and blocks_per_sm are 0 without a GPU */
    int32_t shared_bytes;   /* of a block */
    int32_t spill_bytes;    /* local memory of a thread */
    int32_t blocks_per_sm;
    int32_t headdim; /* of q, k and v; 0 = whatever the library's kernel serves */
    int32_t compute; /* it needs this GPU: 80 = sm_80 or newer, 90 = Hopper, 0 = any */
} fa_variant;

FA_API int32_t fa_variant_count(void);
/* device: the number of a GPU, or -1 for what is known without one. */
FA_API fa_status fa_variant_get(int32_t index, int32_t device, fa_variant* variant);

/* The call's `kernel` is ignored, and its workspace is the variant's. A forward variant refuses fa_variant_backward, and a backward variant
 * fa_variant_forward. */
FA_API fa_status fa_variant_forward(const char* name, const fa_attention_args* args, void* stream);
FA_API fa_status fa_variant_backward(const char* name, const fa_attention_backward_args* args, void* stream);
/* The bytes of workspace for a call with these arguments, or FA_UNSUPPORTED when the variant does not serve it; launches nothing. For a
 * backward variant `args` is the forward call of the gradients. Data pointers may be NULL. */
FA_API fa_status fa_variant_workspace(const char* name, const fa_attention_args* args, size_t* bytes);
/* The text of this thread's last error in this library. */
FA_API const char* fa_variant_last_error(void);

/* ---- what "online-softmax" variants write: the workspace starts with a row of counters for every row of every head ----
 * workspace: fa_softmax_row[batch][nheads][seqlen_q]; the workspace is aligned to 16 bytes. */
typedef struct fa_softmax_row {
    uint32_t tiles;    /* of keys that the row's block has walked */
    uint32_t moved;    /* tiles, without the first, that raised the row's maximum: each rescales the sums */
    uint32_t rescales; /* tiles, without the first, that exceed the maximum in use by more than 2^8: all that a lazy maximum rescales */
    float rise;        /* of the maximum after the first tile, in powers of two */
} fa_softmax_row;

/* ---- what "trace" variants write: fa_trace at FA_TRACE_OFFSET bytes into the workspace, which is aligned to 16 bytes ----
 * A stamp is the moment at which a thread of a role begins to do something, which lasts until its next stamp. Clocks count cycles of the
 * multiprocessor, so that the roles of a block can be compared with each other, but not blocks. */
enum { FA_TRACE_OFFSET = 256, FA_TRACE_BLOCKS = 4, FA_TRACE_ROLES = 4, FA_TRACE_STAMPS = 4096 };
typedef enum fa_trace_event {
    FA_TRACE_WAIT_ITEM = 0,    /* consumer: wait for a work item and its Q; producer: for the buffer of Q */
    FA_TRACE_WAIT_KEYS = 1,    /* consumer: wait for a tile of K to arrive; producer: for a free buffer */
    FA_TRACE_WAIT_VALUES = 2,  /* the same of V */
    FA_TRACE_COPIED = 3,       /* producer: the copies of the tile it waited for are issued */
    FA_TRACE_WAIT_TURN = 4,    /* wait for the turn of this warpgroup */
    FA_TRACE_SCORES = 5,       /* issue S = Q K^T */
    FA_TRACE_PRODUCT = 6,      /* issue O += P V */
    FA_TRACE_WAIT_SCORES = 7,  /* wait for S */
    FA_TRACE_SOFTMAX = 8,      /* S becomes P */
    FA_TRACE_WAIT_PRODUCT = 9, /* wait for O */
    FA_TRACE_RESCALE = 10,     /* P to 16 bits, O *= scale where the maximum moved */
    FA_TRACE_EPILOGUE = 11     /* out and lse */
} fa_trace_event;
typedef struct fa_trace_stamp {
    uint64_t clock;
    int32_t tile; /* of keys; a role walks them from the last to the first */
    uint16_t item, event;
} fa_trace_stamp;
typedef struct fa_trace_role {
    uint32_t count;          /* of stamps; those from FA_TRACE_STAMPS on are lost */
    uint32_t multiprocessor; /* that the block runs on */
    fa_trace_stamp stamps[FA_TRACE_STAMPS];
} fa_trace_role;
typedef struct fa_trace {
    fa_trace_role roles[FA_TRACE_BLOCKS][FA_TRACE_ROLES]; /* of the first blocks; role 0 produces, 1 .. 3 consume 64 query rows each */
} fa_trace;

#ifdef __cplusplus
}
#endif

#endif
