const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;  // a warp for each row
if (row >= rows) return;
const float mine = lane < pieces ? lses[lane * rows + row] : -CUDART_INF_F;  // a lane for each piece
const float top = warp_max(mine), weight = mine == -CUDART_INF_F ? 0 : expf(mine - top), sum = warp_sum(weight);
float4 total = {0, 0, 0, 0};  // four numbers of the row for each lane
for (int p = 0; p < pieces; ++p) {
    const float w = __shfl_sync(~0u, weight, p) / (sum > 0 ? sum : 1);
    if (w == 0) continue;  // 0 * NaN is NaN
    const float4 x = reinterpret_cast<const float4*>(outs + ((size_t)p * rows + row) * kDim)[lane];
    total.x += w * x.x, total.y += w * x.y, total.z += w * x.z, total.w += w * x.w;
}
reinterpret_cast<float4*>(out + (size_t)row * kDim)[lane] = total;
if (lane == 0) lse[row] = sum > 0 ? top + logf(sum) : -CUDART_INF_F;
