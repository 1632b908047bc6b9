// The sum of combine: in float32 (float64 for float64 rows), in the order of the targets' first appearance in the
// top-k, starting from the first partial, rounded once; as csrc/cpu/combine.cpp does it, bit for bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace moe_ep::cuda {

__device__ __forceinline__ float to_sum(float x) { return x; }
__device__ __forceinline__ double to_sum(double x) { return x; }
__device__ __forceinline__ float to_sum(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_sum(__half x) { return __half2float(x); }
__device__ __forceinline__ void round_to(float& out, float x) { out = x; }
__device__ __forceinline__ void round_to(double& out, double x) { out = x; }
__device__ __forceinline__ void round_to(__nv_bfloat16& out, float x) { out = __float2bfloat16_rn(x); }
__device__ __forceinline__ void round_to(__half& out, float x) { out = __float2half_rn(x); }

// A running sum of N elements, in the order of add(), starting from the first term; zeros without any.
template <class T, int N>
class RunningSum {
 public:
  using Sum = decltype(to_sum(T{}));
  template <class Term>
  __device__ void add(const Term& term_of) {
#pragma unroll
    for (int e = 0; e < N; ++e) sums_[e] = any_ ? sums_[e] + term_of(e) : term_of(e);
    any_ = true;
  }
  __device__ T rounded(int e) const {
    T out{};
    if (any_) round_to(out, sums_[e]);
    return out;
  }

 private:
  Sum sums_[N];
  bool any_ = false;
};

}  // namespace moe_ep::cuda
