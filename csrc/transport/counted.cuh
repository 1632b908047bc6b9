// Counted writes on a GPU; csrc/transport/counted.h is the protocol and its argument. What is not about rows is the
// fence transport as it is, blocks and flags included.
#pragma once

#include "csrc/cuda/put_counted.cuh"
#include "csrc/transport/fence.cuh"

namespace moe_ep::cuda {

struct CountedShared {
  int32_t rows[kMaxRanks];  // that this block puts at each rank in this round
  PutShared puts;
};

// Bytes of a row that a warp moves at a time.
struct Chunk {
  int64_t begin;
  int32_t bytes;
};

template <bool MASK, class Put>
class DeviceCounted : public DeviceFence<MASK> {
  using Base = DeviceFence<MASK>;
  using Base::comm_;

 public:
  static constexpr bool kCounted = true;
  using Base::is_peer;
  using Base::own;
  using Base::round;
  using Base::window;

  __device__ DeviceCounted(const DeviceComm& comm, OpKind kind, FenceShared& fence, CountedShared& shared, char* slices)
      : Base(comm, kind, fence), shared_(shared), puts_(comm, shared.puts, slices) {}

  __device__ void begin(const RankMask& mask) {
    Base::begin(mask);
    for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
      shared_.rows[p] = 0;
    }
    puts_.begin();
  }

  // One row more for rank p, of those that announce() sums up.
  __device__ void count_row(int32_t p) { atomicAdd(&shared_.rows[p], 1); }

  // Step 3: the total, which the flag releases. Every thread calls it, after all count_row().
  __device__ void announce(int64_t bytes_of_row) {
    __syncthreads();
    const int32_t block = static_cast<int32_t>(blockIdx.x);
    for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
      if (!is_peer(p)) continue;
      unsigned long long& sent = comm_.sent[static_cast<int64_t>(p) * kCountedBlocks + block];
      sent += static_cast<unsigned long long>(shared_.rows[p]) * static_cast<unsigned long long>(bytes_of_row);
      *window(p).total(comm_.offsets, comm_.shape, comm_.rank, block) = sent;
    }
    Put::before_signal();
  }

  // Step 4b. Rows are cut into chunks; a warp calls load_chunk() and then put_chunk() for each rank the row goes to.
  static __device__ int32_t chunks_of(int64_t bytes) {
    return static_cast<int32_t>((bytes + kSliceBytes - 1) / kSliceBytes);
  }
  static __device__ Chunk chunk(int32_t nth, int64_t bytes) {
    const int64_t begin = static_cast<int64_t>(nth) * kSliceBytes, left = bytes - begin;
    return {begin, static_cast<int32_t>(left < kSliceBytes ? left : kSliceBytes)};
  }
  __device__ void begin_puts() {
    Base::delay(DelayPoint::kBeforeRows);
    Put::before_puts();
  }
  __device__ void load_chunk(const char* row, const Chunk& chunk) {
    puts_.free_slice();
    const char* from = row + chunk.begin;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
#pragma unroll 4
    for (int32_t at = 16 * (static_cast<int32_t>(threadIdx.x) % 32); at < chunk.bytes; at += 512) {
      *reinterpret_cast<uint4*>(puts_.slice() + at) = load_unit(from + at, 16, aligned);
    }
  }
  // `offset`: of the row in a window.
  __device__ void put_chunk(int32_t rank, int64_t offset, const Chunk& chunk) {
    const uint64_t* counter = own().counter(comm_.offsets, comm_.rank, static_cast<int32_t>(blockIdx.x));
    puts_.put(rank, window(rank), offset + chunk.begin, reinterpret_cast<const char*>(counter) - own().base,
              chunk.bytes);
  }

  // Step 5, after await(). Holds the barrier after which every thread may read.
  __device__ void await_rows() {
    const int32_t block = static_cast<int32_t>(blockIdx.x);
    for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
      if (!is_peer(p)) continue;
      // Of a peer that took another step it is an old total, which the counter has reached.
      const uint64_t total = load_acquire_sys(own().total(comm_.offsets, comm_.shape, p, block));
      const uint64_t* counter = own().counter(comm_.offsets, p, block);
      Base::poll(
          round(), p, PostMortem::kNoRows, [&] { return load_acquire_sys(counter) >= total; }, [] { return false; });
    }
    __syncthreads();
    Put::before_reads();
  }

  // Step 7.
  __device__ void finish_puts() {
    bool failed = false;
    Base::poll(round(), comm_.rank, PostMortem::kNotPut, [&] { return puts_.complete(failed); }, [] { return false; });
    if (!failed) return;
    Base::record(round(), comm_.rank, PostMortem::kPutFailed, 0, 0, 0);
    __trap();
  }

 private:
  CountedShared& shared_;
  Put puts_;
};

}  // namespace moe_ep::cuda
