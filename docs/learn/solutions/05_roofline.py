def work(batch, seqlen_q, seqlen_k, nheads, headdim, causal):
    return 4 * batch * nheads * seqlen_q * seqlen_k * headdim // (2 if causal else 1)


def traffic(batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, element_bytes):
    return 2 * element_bytes * batch * headdim * (seqlen_q * nheads + seqlen_k * nheads_k)  # q and out, k and v


def bound(operations, bytes_moved, peak=989e12, bandwidth=4.8e12):
    compute, memory = operations / peak, bytes_moved / bandwidth
    return max(compute, memory), "compute" if compute > memory else "memory"
