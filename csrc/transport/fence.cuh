// The fence transport on a GPU: csrc/transport/fence.h is the protocol and its argument; this adds what is different
// here.
//
// Blocks. Block b of a rank exchanges with block b of every peer alone (csrc/cuda/launch.h, Plan): it stages or puts
// its share of the rows, releases its own flag to each peer, awaits block b's flag of each peer, and takes its share.
// So there is no barrier across the grid, neither before a flag nor after. A block other than the first piece of its
// group also awaits the flag of that first piece, which put the group's ids.
//
// Round number. Graphs replay in any order, so it cannot be a launch argument. One 64-bit counter per rank, the ticket:
// every block reads it when it begins, and adds its share when it ends: block 0 kTicket - (blocks - 1), every other
// block 1, so that a launch adds kTicket in all, whatever its grid. A block that begins finds ticket / kTicket = rounds
// completed, however many blocks have ended already, for the sum of a launch reaches kTicket only after this block has
// added its own share. Example, kTicket = 65536, 3 blocks, 2 rounds completed: the ticket is 131072. Block 1 ends
// first: 131073; block 0: 196607; block 2 begins only now, finds 196607 / 65536 = 2 and runs round 3 like the others;
// it ends: 196608 = 3 * 65536.
//
// Reuse. A kernel of round n+1 starts after the whole kernel of round n on its rank has ended, and ends only after
// every block saw a flag of every peer. So a flag of round n+1 from any block of peer p says that p has completed
// round n in all its blocks, whatever the two grids were; that is what csrc/transport/fence.h builds on. Whether the
// round before was of the same kind, and so the done words must be posted and awaited, is kept in device memory
// (kinds). With rank masks a peer may have been left out of the rounds between; then done words are always posted and
// awaited.
//
// Order. All threads of a block store with weak stores; the barrier orders them before one warp's fence.acq_rel.sys,
// which orders them before that warp's relaxed flag stores (release pattern, cumulativity). A polling thread loads the
// flag with ld.acquire.sys; the barrier after it orders every thread's later loads.
#pragma once

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.h"

namespace moe_ep::cuda {

constexpr unsigned long long kTicket = 1ull << 16;

__device__ __forceinline__ void hold_up(int64_t cycles) {
  if (cycles <= 0) return;
  const long long start = clock64();
  while (clock64() - start < cycles) __nanosleep(200);
}

// Nobody waits for the sum.
__device__ __forceinline__ void add_ticket(const DeviceComm& comm) {
  atomicAdd(&comm.state->ticket, blockIdx.x == 0 ? kTicket - (gridDim.x - 1) : 1ull);
}

struct FenceShared {
  uint64_t round;
  int32_t same_kind;  // the round before was of this kind
  uint64_t active[kMaskWords];
  char* windows[kMaxRanks];  // base addresses
  int32_t tokens[kMaxRanks];  // T of each peer of this round; 0 for a masked or disagreeing one
  StepHeader headers[kMaxRanks];  // block 0: of the peers
  uint64_t flags[kMaxRanks];  // block 0: their flags
};

template <bool MASK>
class DeviceFence {
 public:
  // Touches only what no kernel writes, so it may run before the predecessor has ended.
  __device__ DeviceFence(const DeviceComm& comm, OpKind kind, FenceShared& shared)
      : comm_(comm), kind_(kind), shared_(shared) {
    for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm.ep_size; p += static_cast<int32_t>(blockDim.x)) {
      shared.windows[p] = comm.windows[p];
    }
  }

  // After the predecessor has ended.
  __device__ void begin(const RankMask& mask) {
    if (MASK && threadIdx.x < kMaskWords) {
      shared_.active[threadIdx.x] = mask.given ? mask.words[threadIdx.x] : comm_.state->active[threadIdx.x];
    }
    if (threadIdx.x == 0) {
      const uint32_t kinds = *reinterpret_cast<volatile uint32_t*>(comm_.state->kinds);
      const uint64_t before = *reinterpret_cast<volatile unsigned long long*>(&comm_.state->ticket) / kTicket;
      shared_.round = before + 1;
      shared_.same_kind = (kinds >> 8 * (before & 3) & 0xFF) == static_cast<uint32_t>(kind_);
      if (blockIdx.x == 0) {
        *const_cast<volatile unsigned char*>(&comm_.state->kinds[shared_.round & 3]) =
            static_cast<unsigned char>(kind_);
      }
    }
  }

  // The last thing a block does.
  __device__ void end() {
    if (threadIdx.x == 0) add_ticket(comm_);
  }

  // All of these are valid after the first barrier that follows begin().
  __device__ uint64_t round() const { return shared_.round; }
  __device__ bool is_active(int32_t rank) const { return !MASK || (shared_.active[rank / 64] >> (rank % 64) & 1) != 0; }
  __device__ bool is_peer(int32_t rank) const { return rank != comm_.rank && is_active(rank) && is_active(comm_.rank); }
  __device__ Window window(int32_t rank) const { return Window{shared_.windows[rank]}; }
  __device__ Window own() const { return Window{comm_.own_window}; }  // valid at once

  // Steps 1 and 2. Every thread of the block calls it, after a barrier.
  __device__ void await_reuse() {
    hold_up(comm_.delay_cycles[static_cast<int>(DelayPoint::kBeforePut)]);
    if (!MASK && !shared_.same_kind) return;
    if (blockIdx.x == 0) {
      for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
        if (!is_peer(p)) continue;
        fence_sys();
        store_relaxed_sys(window(p).done(comm_.offsets, comm_.rank), round() - 1);
      }
    }
    // With masks and another kind before, the round before that is the last that can matter.
    const uint64_t last = shared_.same_kind ? round() - 1 : round() - 2;
    if (round() > 2 || shared_.same_kind) {
      for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
        if (!is_peer(p)) continue;
        const uint64_t* word = own().done(comm_.offsets, p);
        poll(p, PostMortem::kNoDone, [&] { return load_acquire_sys(word) >= last; });
      }
    }
    __syncthreads();
  }

  // Before step 4, by block 0 alone: what this rank says of its step.
  __device__ void put_header(const StepHeader& header) {
    if (blockIdx.x != 0) return;
    constexpr int kWords = sizeof(StepHeader) / 16;
    const uint4* words = reinterpret_cast<const uint4*>(&header);
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < comm_.ep_size * kWords;
         i += static_cast<int32_t>(blockDim.x)) {
      const int32_t p = i / kWords;
      if (!is_peer(p)) continue;
      reinterpret_cast<uint4*>(window(p).header(comm_.offsets, comm_.shape, round(), comm_.rank))[i % kWords] =
          words[i % kWords];
    }
  }

  // Step 4. Holds the barrier after which this block's stores may be released.
  __device__ void signal(int32_t num_tokens) {
    hold_up(comm_.delay_cycles[static_cast<int>(DelayPoint::kBeforeFlag)]);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    fence_sys();
    for (int32_t i = 1 + static_cast<int32_t>(threadIdx.x); i < comm_.ep_size; i += 32) {
      const int32_t p = (comm_.rank + i) % comm_.ep_size;
      if (!is_peer(p)) continue;
      store_relaxed_sys(
          window(p).flag(comm_.offsets, comm_.shape, round(), comm_.rank, static_cast<int32_t>(blockIdx.x)),
          make_flag(round(), static_cast<int32_t>(kind_), num_tokens));
    }
  }

  // Step 5: for this block's flag and that of block `also`, each polled by a thread of its own. Holds the barrier after
  // which every thread may read.
  __device__ void await(int32_t also, const StepHeader& mine) {
    const int32_t block = static_cast<int32_t>(blockIdx.x);
    const int32_t flags = also == block ? comm_.ep_size : 2 * comm_.ep_size;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < flags; i += static_cast<int32_t>(blockDim.x)) {
      const bool first = i < comm_.ep_size;
      const int32_t p = first ? i : i - comm_.ep_size;
      const uint64_t flag = is_peer(p) ? await_flag(p, first ? block : also, mine) : 0;
      if (first && p != comm_.rank) {
        shared_.tokens[p] = flag_kind(flag) == static_cast<int32_t>(kind_) ? flag_tokens(flag) : 0;
      }
      if (first && block == 0 && is_peer(p)) {  // read on the way, compared by check_headers()
        shared_.flags[p] = flag;
        const StepHeader* from = own().header(comm_.offsets, comm_.shape, round(), p);
#pragma unroll
        for (int w = 0; w < static_cast<int>(sizeof(StepHeader)) / 16; ++w) {
          copy_async(reinterpret_cast<char*>(&shared_.headers[p]) + 16 * w,
                     reinterpret_cast<const char*>(from) + 16 * w);
        }
      }
    }
    __syncthreads();
    hold_up(comm_.delay_cycles[static_cast<int>(DelayPoint::kAfterFlags)]);
  }

  // After step 5 and off its critical path, by block 0 alone: compares what the ranks said. The threads that polled the
  // flags do it, for they have issued the copies.
  __device__ void check_headers(const StepHeader& mine) {
    if (blockIdx.x != 0) return;
    await_async_copies();
    for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
      // A flag of 0: the wait was given up because of a disagreement, which is on record.
      if (is_peer(p) && shared_.flags[p] != 0) disagrees(p, shared_.flags[p], mine, shared_.headers[p]);
    }
  }

 private:
  // The peer's flag of this round, or of kind 0 when the peer's step is another one, so that none will come.
  __device__ uint64_t await_flag(int32_t p, int32_t block, const StepHeader& mine) {
    const uint64_t* word = own().flag(comm_.offsets, comm_.shape, round(), p, block);
    uint64_t flag = 0;
    poll(
        p, PostMortem::kNoFlag,
        [&] {
          flag = load_acquire_sys(word);
          return flag_round(flag) >= round();
        },
        [&] {
          // Long wait: has the peer's block 0 told of a step with another grid?
          const uint64_t first = load_acquire_sys(own().flag(comm_.offsets, comm_.shape, round(), p, 0));
          if (flag_round(first) < round()) return false;
          if (!disagrees(p, first, mine, *own().header(comm_.offsets, comm_.shape, round(), p))) return false;
          flag = 0;
          return true;
        });
    return flag;
  }

  template <class Ready>
  __device__ void poll(int32_t peer, PostMortem::What what, const Ready& ready) {
    poll(peer, what, ready, [] { return false; });
  }
  template <class Ready, class GiveUp>
  __device__ void poll(int32_t peer, PostMortem::What what, const Ready& ready, const GiveUp& give_up) {
    if (ready()) return;
    const long long start = clock64();
    for (uint32_t i = 1;; ++i) {
      if (ready()) return;
      if (i % 4096 == 0 && give_up()) return;
      if (clock64() - start > comm_.timeout_cycles) {
        if (ready()) return;
        record(peer, what, 0, 0, 0);
        __trap();
      }
    }
  }

  __device__ bool disagrees(int32_t p, uint64_t flag, const StepHeader& mine, const StepHeader& theirs) {
    if (flag_kind(flag) != static_cast<int32_t>(kind_)) {
      record(p, PostMortem::kDisagree, -1, static_cast<int64_t>(kind_), flag_kind(flag));
      return true;
    }
    for (int32_t field = 0; field < kHeaderFields; ++field) {
      const int64_t here = header_field(mine, field), there = header_field(theirs, field);
      if (here == there) continue;
      record(p, PostMortem::kDisagree, field, here, there);
      return true;
    }
    return false;
  }

  __device__ void record(int32_t peer, PostMortem::What what, int32_t field, int64_t mine, int64_t theirs) {
    if (atomicCAS(&comm_.state->failed, 0u, 1u) != 0u) {
      if (what != PostMortem::kDisagree) __nanosleep(1000000);  // let the first one finish before this one traps
      return;
    }
    volatile PostMortem* out = comm_.post_mortem;
    out->op = static_cast<int32_t>(kind_);
    out->round = static_cast<int64_t>(round());
    out->peer = peer;
    out->field = field;
    out->mine = mine;
    out->theirs = theirs;
    out->timeout_sec = comm_.timeout_sec;
    fence_sys();
    out->what = what;
    fence_sys();
  }

  const DeviceComm& comm_;
  const OpKind kind_;
  FenceShared& shared_;
};

}  // namespace moe_ep::cuda
