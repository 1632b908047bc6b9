// put_counted: how a warp pushes rows that count themselves (csrc/transport/counted.h). A warp copies a chunk into its
// slice of shared memory and then puts it at any number of ranks; all 32 lanes make every call together.
//   begin()         once, before anything else
//   free_slice()    before the slice is written: the puts before have read it
//   put(...)        after it is written: `bytes` of it to `offset` of the window of `rank`, counted at `counter` there
//   complete(bad)   whether all puts so far have been carried out; bad: one has failed. Asked until it is true.
//   before_puts(), before_reads(), before_signal(): the fences between ordinary accesses and those of the fabric.
#pragma once

#include <cuda_runtime.h>

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.h"

// fabric.try_put.counted is known to compilers from CUDA 13.4 on and to machines from compute capability 10.0 on.
#if defined(CUDART_VERSION) && CUDART_VERSION >= 13040
#define MOE_EP_COUNTED 1
#else
#define MOE_EP_COUNTED 0
#endif

namespace moe_ep::cuda {

constexpr int32_t kSliceBytes = 4096;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kSlicesBytes = kWarps * kSliceBytes;  // of a block, in dynamic shared memory

struct alignas(16) PutShared {
  uint64_t barrier[kWarps][2];
};

// Ordinary stores, and a system-scope add after each 512 bytes. For tests: everywhere, between any memory.
class EmulatedPut {
 public:
  __device__ EmulatedPut(const DeviceComm&, PutShared&, char* slices)
      : slice_(slices + threadIdx.x / 32 * kSliceBytes), lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  __device__ char* slice() const { return slice_; }
  __device__ void begin() {}
  __device__ void free_slice() { __syncwarp(); }
  __device__ void put(int32_t, const Window& window, int64_t offset, int64_t counter, int32_t bytes) {
    __syncwarp();
    for (int32_t base = 0; base < bytes; base += 512) {
      const int32_t at = base + 16 * lane_;
      if (at < bytes) {
        *reinterpret_cast<uint4*>(window.base + offset + at) = *reinterpret_cast<const uint4*>(slice_ + at);
      }
      __syncwarp();
      if (lane_ != 0) continue;
      fence_sys();
      add_relaxed_sys(reinterpret_cast<uint64_t*>(window.base + counter),
                      static_cast<uint64_t>(bytes - base < 512 ? bytes - base : 512));
    }
  }
  __device__ bool complete(bool&) { return true; }
  static __device__ void before_puts() {}
  static __device__ void before_reads() {}
  static __device__ void before_signal() {}

 private:
  char* const slice_;
  const int32_t lane_;
};

#if MOE_EP_COUNTED
// The instruction (PTX ISA 9.3: fabric.try_put, fabric.submit, fabric.wait, counted completion). Lane 0 issues; the
// warp's barrier, of the layout that carries reports, counts what is complete in units of 16 bytes.
class FabricPut {
 public:
  __device__ FabricPut(const DeviceComm& comm, PutShared& shared, char* slices)
      : slice_(slices + threadIdx.x / 32 * kSliceBytes),
        endpoints_(comm.endpoints),
        barrier_(static_cast<uint32_t>(__cvta_generic_to_shared(shared.barrier[threadIdx.x / 32]))),
        leads_(threadIdx.x % 32 == 0) {}

  __device__ char* slice() const { return slice_; }

  __device__ void begin() {
#if __CUDA_ARCH__ >= 1000
    if (leads_) asm volatile("mbarrier.init.layout::v1.shared.b64 [%0], 1;" ::"r"(barrier_) : "memory");
    __syncwarp();
#endif
  }

  __device__ void free_slice() {
#if __CUDA_ARCH__ >= 1000
    // PTX 9.5 calls it ::read 0, and takes this form too.
    if (leads_ && units_ > 0) asm volatile("fabric.wait.sync_restrict::reads;" ::: "memory");
    __syncwarp();
#endif
  }

  __device__ void put(int32_t rank, const Window&, int64_t offset, int64_t counter, int32_t bytes) {
#if __CUDA_ARCH__ >= 1000
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // every lane has written a part of the slice
    __syncwarp();
    if (!leads_) return;
    const int32_t units = bytes / static_cast<int32_t>(kCountedAlignment);
    if (units_ + units > kMostUnits) {  // more than the barrier counts in one phase
      bool bad = false;
      while (!try_complete(bad)) {
      }
      failed_ |= bad;
    }
    asm volatile(
        "fabric.try_put.async.shared::cta.mbarrier::complete_tx::16B.mbarrier::report::fabric.counted::bytes.relaxed"
        ".sys.b128 [%0, %1, %2], [%3], %4, [%5];\n fabric.submit;" ::"r"(endpoints_[rank]),
        "l"(offset), "l"(counter), "r"(static_cast<uint32_t>(__cvta_generic_to_shared(slice_))), "r"(bytes),
        "r"(barrier_)
        : "memory");
    units_ += units;
#endif
  }

  __device__ bool complete(bool& bad) {
    if (!leads_) return true;
    const bool done = try_complete(bad);
    bad |= failed_;
    return done;
  }

  // Proxies: ordinary accesses before -> those of the fabric after, and the other way round.
  static __device__ void before_puts() {
#if __CUDA_ARCH__ >= 1000
    asm volatile("fence.proxy.fabric::generic.alias.acquire.sys;" ::: "memory");
#endif
  }
  static __device__ void before_reads() {
#if __CUDA_ARCH__ >= 1000
    asm volatile("fence.proxy.generic::fabric.alias.acquire.sys;" ::: "memory");
#endif
  }
  static __device__ void before_signal() {
#if __CUDA_ARCH__ >= 1000
    asm volatile("fence.proxy.fabric::generic.alias.release.sys;" ::: "memory");
#endif
  }

 private:
  static constexpr int32_t kMostUnits = 1 << 19;  // a barrier counts to 2^20 - 1

  // One look at the phase that waits for all puts issued so far; the first one announces how much that is.
  __device__ bool try_complete(bool& bad) {
    uint32_t done = 1, reported = 0;
#if __CUDA_ARCH__ >= 1000
    if (units_ == 0) return true;
    if (!arrived_) {
      asm volatile("mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_), "r"(units_)
                   : "memory");
      arrived_ = true;
    }
    asm volatile(
        "{\n .reg .pred done, reported;\n"
        " mbarrier.try_wait.parity.phase_type::primary.relaxed.cta.shared::cta.b64 done|reported, [%2], %3;\n"
        " selp.b32 %0, 1, 0, done;\n selp.b32 %1, 1, 0, reported;\n}"
        : "=r"(done), "=r"(reported)
        : "r"(barrier_), "r"(phase_)
        : "memory");
    if (done == 0) return false;
    arrived_ = false;
    phase_ ^= 1;
    units_ = 0;
#endif
    bad = reported != 0;
    return done != 0;
  }

  char* const slice_;
  const uint32_t* const endpoints_;
  const uint32_t barrier_;
  const bool leads_;
  int32_t units_ = 0;  // put since the phase began
  uint32_t phase_ = 0;
  bool arrived_ = false, failed_ = false;
};
#endif

}  // namespace moe_ep::cuda
