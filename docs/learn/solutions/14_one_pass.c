float max = -INFINITY, sum = 0;
for (int d = 0; d < n; ++d) out[d] = 0;
for (int j0 = 0; j0 < seen; j0 += kPiece) {
    const int count = seen - j0 < kPiece ? seen - j0 : kPiece;
    scores(q, k + j0 * stride, stride, count, n, scale, s);
    float new_max = max;
    for (int j = 0; j < count; ++j) new_max = fmaxf(new_max, s[j]);
    const float factor = expf(max - new_max);  // 0 before the first key: new_max is finite, because the piece has a key
    sum *= factor;
    for (int d = 0; d < n; ++d) out[d] *= factor;
    for (int j = 0; j < count; ++j) sum += s[j] = expf(s[j] - new_max);
    add_values(out, s, v + j0 * stride, stride, count, n);
    max = new_max;
}
for (int d = 0; d < n && seen > 0; ++d) out[d] /= sum;
*lse = seen > 0 ? max + logf(sum) : -INFINITY;
