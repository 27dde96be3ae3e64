const int last = visible_keys(a, first + rows - 1);  // the last row sees most
for (int j0 = 0; j0 < last; j0 += kBlockN) {
    const int count = a->seqlen_k - j0 < kBlockN ? a->seqlen_k - j0 : kBlockN;
    for (int i = 0; i < rows; ++i) meet(t, i, k + j0 * stride, v + j0 * stride, stride, count, visible_keys(a, first + i) - j0, a->headdim);
}
