def key_tiles(row0, rows, seqlen_q, seqlen_k, block_k):
    shift = seqlen_k - seqlen_q
    first_row_end = min(max(row0 + shift + 1, 0), seqlen_k)  # keys that the first row sees, and with it every row
    last_row_end = min(max(row0 + rows + shift, 0), seqlen_k)
    return first_row_end // block_k, -(-last_row_end // block_k)
