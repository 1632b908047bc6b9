// Launching a kernel of this room, and what both of them share besides the fence.
#pragma once

#include <cuda_runtime.h>

#include <initializer_list>
#include <vector>

#include "csrc/cuda/launch.h"

namespace moe_ep::cuda {

constexpr int kMaxThreads = 1024;

// The largest power of two that divides all values (at most 16).
int64_t alignment_of(std::initializer_list<int64_t> values);

void launch(const void* kernel, int blocks, int threads, void* params, bool pdl, void* stream, const char* name);

std::vector<const void*> dispatch_kernels();
std::vector<const void*> combine_kernels();

// One short row by `lanes` threads, this one the k-th; zeros where there is no source.
__device__ __forceinline__ void copy_row_bytes(char* to, const char* from, int64_t bytes, int32_t k, int32_t lanes) {
  const bool words = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 4 == 0;
  if (words) {
    for (int64_t i = 4 * k; i < bytes; i += 4 * lanes) {
      *reinterpret_cast<uint32_t*>(to + i) = from == nullptr ? 0u : *reinterpret_cast<const uint32_t*>(from + i);
    }
  } else {
    for (int64_t i = k; i < bytes; i += lanes) to[i] = from == nullptr ? 0 : from[i];
  }
}

// Short rows by all threads of a block, in words where everything is aligned to them.
template <class Src, class Dst>
__device__ __forceinline__ void copy_bytes(int32_t rows, int64_t bytes, const Src& src_of, const Dst& dst_of) {
  if (rows == 0 || bytes == 0) return;
  uintptr_t all = static_cast<uintptr_t>(bytes) | reinterpret_cast<uintptr_t>(src_of(0)) |
                  reinterpret_cast<uintptr_t>(dst_of(0));
  if (rows > 1) all |= reinterpret_cast<uintptr_t>(src_of(1)) | reinterpret_cast<uintptr_t>(dst_of(1));
  if (all % 4 == 0) {
    const int32_t units = static_cast<int32_t>(bytes / 4);
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < rows * units; i += static_cast<int32_t>(blockDim.x)) {
      reinterpret_cast<uint32_t*>(dst_of(i / units))[i % units] =
          reinterpret_cast<const uint32_t*>(src_of(i / units))[i % units];
    }
  } else {
    const int32_t units = static_cast<int32_t>(bytes);
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < rows * units; i += static_cast<int32_t>(blockDim.x)) {
      dst_of(i / units)[i % units] = src_of(i / units)[i % units];
    }
  }
}

}  // namespace moe_ep::cuda
