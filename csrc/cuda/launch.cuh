// Launching a kernel of this room, and what both of them share besides the fence.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.h"

namespace moe_ep::cuda {

constexpr int kAloneThreads = 512;

// Threads for a row of so many units when a block has one row: about four loads each.
inline int alone_threads(int64_t units) {
  return static_cast<int>(std::clamp<int64_t>((units / 4 + 31) / 32 * 32, 64, kAloneThreads));
}

// The largest power of two that divides all values (at most 16).
int64_t alignment_of(std::initializer_list<int64_t> values);

// shared_bytes: of dynamic shared memory.
void launch(const void* kernel, int blocks, int threads, void* params, bool pdl, void* stream, const char* name,
            int32_t shared_bytes = 0);

// Every kernel by room: those whose blocks wait for peers, and those of a rank without peers.
std::vector<const void*> dispatch_kernels();
std::vector<const void*> combine_kernels();
std::vector<const void*> lamport_dispatch_kernels();
std::vector<const void*> lamport_combine_kernels();
std::vector<const void*> counted_dispatch_kernels(CountedPuts puts);
std::vector<const void*> counted_combine_kernels(CountedPuts puts);
std::vector<const void*> dispatch_phase_kernels();
std::vector<const void*> combine_phase_kernels();
std::vector<const void*> dispatch_alone_kernels();
std::vector<const void*> combine_alone_kernels();
std::vector<const void*> start_alone_kernels();

// The kernel of a start or a wait. unit_bytes: 16, 4 or 1 in a dispatch; in a combine `wide` as for the whole op.
const void* dispatch_phase_kernel(Phase phase, int64_t unit_bytes, bool mask);
const void* combine_phase_kernel(Phase phase, ElementType type, bool fp8, bool wide, bool mask);
// A start on a rank without peers, where there is nothing to send.
void start_alone(Communicator& comm, OpKind kind, const RankMask& mask, int64_t timeout_sec, int64_t* pending,
                 void* stream);

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

// Short rows by `count` threads, this one the first-th, in words where everything is aligned to them.
template <class Src, class Dst>
__device__ __forceinline__ void copy_bytes(int32_t rows, int64_t bytes, int32_t first, int32_t count, const Src& src_of,
                                           const Dst& dst_of) {
  if (rows == 0 || bytes == 0) return;
  uintptr_t all =
      static_cast<uintptr_t>(bytes) | reinterpret_cast<uintptr_t>(src_of(0)) | reinterpret_cast<uintptr_t>(dst_of(0));
  if (rows > 1) all |= reinterpret_cast<uintptr_t>(src_of(1)) | reinterpret_cast<uintptr_t>(dst_of(1));
  const bool words = all % 4 == 0;
  const int32_t units = static_cast<int32_t>(words ? bytes / 4 : bytes);
  for (int32_t i = first; i < rows * units; i += count) {
    const int32_t row = divide(i, units), unit = i - row * units;
    if (words) {
      reinterpret_cast<uint32_t*>(dst_of(row))[unit] = reinterpret_cast<const uint32_t*>(src_of(row))[unit];
    } else {
      dst_of(row)[unit] = src_of(row)[unit];
    }
  }
}

}  // namespace moe_ep::cuda
